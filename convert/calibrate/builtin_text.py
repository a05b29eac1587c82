"""English text that ships with Python itself, the language reference, made to read like prose."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from typing import Any

from inferencex.convert.calibrate.documents import Document, Reading
from inferencex.formats.errors import OptionError

_MARK = re.compile(r"(?<![\w*])(\*{1,2})(?=[^\s*])(.+?)(?<=[^\s*])\1(?![\w*])", re.DOTALL)
_UNDERLINE = re.compile(r"([*=~^\"'`+#-])\1{2,}")
_BULLET = re.compile(r"(?:\*|-|\d+\.|\[\d+\])\s+")
_STATEMENT = re.compile(
    r"(?:>>>|\.\.\. |\$ |# |@\w|print\(|import \w+$|from [\w.]+ import )"
    r"|(?:async |def |class |for |while |if |elif |else\b|with |try\b|except\b|finally\b|match |case ).*:(?:$|\s+#)"
    r"|[\w.\[\], ()*]+ [-+*/|&]?= "
)


class BuiltinText:
    """The topics of Python's reference in alphabetical order; a paragraph found before is left out.

    Topics quote each other at length, and what was used to calibrate must not come again in a text held out.
    """

    name = "builtin"
    kind = "builtin"
    streamed = False

    def facts(self) -> dict[str, Any]:
        """Return which Python's reference it is."""
        return {"python": ".".join(platform.python_version_tuple()[:2])}

    def documents(self, reading: Reading) -> Iterator[Document]:
        """Yield a document for each topic. Raises OptionError where Python was built without them."""
        seen: set[str] = set()
        for _, topic in sorted(_topics().items()):
            paragraphs = list(dict.fromkeys(text for text in _paragraphs(topic) if text not in seen))
            seen.update(paragraphs)
            if paragraphs:
                yield Document("\n\n".join(paragraphs))


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise OptionError(
            f"--calibration builtin: this Python ({platform.python_version()}) lacks the module pydoc_data.topics, "
            "which some distributions leave out or put in a package of their own (Debian: python3-doc or the full "
            "python3); install it, or give a text file or a dataset"
        ) from error
    return topics


def _paragraphs(topic: str) -> Iterator[str]:
    """Yield the paragraphs of a topic as text without markup: one line each, but code as it is."""
    for block in re.split(r"\n\s*\n", topic):
        lines = [line.rstrip() for line in block.splitlines() if not _UNDERLINE.fullmatch(line.strip())]
        if not any(line.strip() for line in lines) or _is_diagram(lines):
            continue
        indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        lines = [line[indent:] for line in lines]
        yield "\n".join(lines) if _is_code(lines, indent) else _prose(lines)


def _is_diagram(lines: list[str]) -> bool:
    """Whether this is a table or a piece of grammar."""
    first = lines[0].lstrip()
    return first.startswith(("+-", "+=", "| ")) or "::=" in first


def _is_code(lines: list[str], indent: int) -> bool:
    """Whether a block is an example: indented, and some line of it looks like a statement."""
    return indent > 0 and any(_STATEMENT.match(line.lstrip()) for line in lines)


def _prose(lines: list[str]) -> str:
    """Join wrapped lines; list items begin a line of their own, and marks of emphasis go."""
    text = ""
    for line in lines:
        stripped = line.strip()
        text += ("\n" if text and _BULLET.match(stripped) else " " if text else "") + stripped
    return _MARK.sub(r"\2", text)
