"""What calibration text consists of, wherever it comes from: documents, taken from rows by their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inferencex.formats.errors import OptionError, RequestError

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Writes a chat as the text that the model was trained on."""

_TEXT_COLUMNS = ("text", "content")
_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant"}  # what ShareGPT calls them


@dataclass(frozen=True)
class Document:
    """A text that belongs together. A `chat` is rendered: it ends as the template ends, and needs no separator."""

    text: str
    chat: bool = False


@dataclass(frozen=True)
class Reading:
    """How documents are read.

    render:   writes chats as text
    seed:     of the order in which a stream comes
    section:  characters; text without any other structure is cut into documents of at most so many
    """

    render: Render
    seed: int = 0
    section: int = 8192


class TextSource(Protocol):
    """A place that calibration text comes from.

    name:      how the user named it, without folders of this machine
    kind:      "hub", "local" or "builtin"
    streamed:  its documents come in an order that is random already, and reading all of them is out of the question
    """

    name: str
    kind: str
    streamed: bool

    def facts(self) -> dict[str, Any]:
        """What a bundle's manifest should record of it beyond its name, as JSON values."""
        ...

    def documents(self, reading: Reading) -> Iterator[Document]:
        """Yield the documents, from the first on in every call. Raises OptionError saying where the fault is."""
        ...


def document_of(row: Mapping[str, Any], where: str, column: str | None, render: Render) -> Document | None:
    """Return the text of a row of a file or dataset, or None where it is empty.

    The column is `column` if given, else the first there is of `text`, `content` (texts), `messages`,
    `conversations`, `conversation` (chats). Raises OptionError naming `where` and the columns it has.
    """
    candidates = (column,) if column is not None else (*_TEXT_COLUMNS, *_CHAT_COLUMNS)
    found = next((name for name in candidates if row.get(name) is not None), None)
    if found is None:
        if any(name in row for name in candidates):
            return None  # the column is there, and this row has no value in it
        wanted = repr(column) if column is not None else "'text' or 'messages'"
        raise OptionError(
            f"--calibration {where}: there is no column {wanted}; its columns are {', '.join(map(repr, row))}. "
            "Name the one to use: SOURCE#COLUMN"
        )
    value = row[found]
    if isinstance(value, str):
        return Document(value) if value.strip() else None
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return _chat(value, f"{where}, column {found!r}", render)
    raise OptionError(
        f"--calibration {where}: column {found!r} holds a {type(value).__name__}, expected a text or a list of chat "
        "messages; name another one: SOURCE#COLUMN"
    )


def _chat(messages: Sequence[Any], where: str, render: Render) -> Document | None:
    if not messages:
        return None
    if not all(isinstance(message, Mapping) for message in messages):
        raise OptionError(f"--calibration {where}: a chat is a list of objects with 'role' and 'content'")
    try:
        return Document(render([_message(message) for message in messages]), chat=True)
    except RequestError as error:
        raise OptionError(f"--calibration {where}: {error}") from error


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the usual names of its parts."""
    if "from" not in message or "role" in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    role = message["from"]
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": message.get("value"), **rest}


def sections(chunks: Iterable[str], longest: int) -> Iterator[str]:
    """Cut a text that arrives in pieces into sections of at most `longest` characters, at ends of paragraphs or lines.

    Joined, the sections are the text. Only a line that is longer than a section is cut within.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > longest:
            end = _cut(held, start, longest)
            yield held[start:end]
            start = end
        held = held[start:]
    if held:
        yield held


def _cut(text: str, start: int, longest: int) -> int:
    """Return where a section that begins at `start` ends."""
    limit = start + longest
    for separator in ("\n\n", "\n", " "):
        at = text.rfind(separator, start + longest // 2, limit)
        if at >= 0:
            return at + len(separator)
    return limit
