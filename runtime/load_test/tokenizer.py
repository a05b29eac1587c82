"""Text to token ids and back: by the server that is measured, or by a tokenizer's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from inferencex.formats.errors import OptionError, RequestError
from inferencex.runtime.load_test.api import ask
from inferencex.runtime.load_test.connection import HttpClient

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

_FILE = "tokenizer.json"
# Paths of servers, the field that their request has the text in, and the path of the way back.
_DIALECTS = (
    ("/tokenize", "prompt", "/detokenize", "prompt"),  # InferenceX, vLLM
    ("/tokenize", "content", "/detokenize", "content"),  # llama.cpp's own server
    ("/extras/tokenize", "input", "/extras/detokenize", "text"),  # llama-cpp-python's
)


class Tokenizer(Protocol):
    """Both ways between text and ids."""

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Return a text's ids, with those that the model expects around it where they are wanted."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ...


class FileTokenizer:
    """A `tokenizer.json`, or the one in a folder; OptionError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        file = path / _FILE if path.is_dir() else path
        try:
            self._tokenizer: HuggingFaceTokenizer = HuggingFaceTokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise OptionError(f"--tokenizer {path}: cannot be read ({error}); give a {_FILE} or its folder") from error

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Return ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class ServerTokenizer:
    """The tokenizer of the server's model, asked over HTTP; `find` tries the ways in which servers offer it."""

    def __init__(self, client: HttpClient, model: str, dialect: tuple[str, str, str, str]) -> None:
        self._client = client
        self._model = model
        self._encode_path, self._text_field, self._decode_path, self._decoded_field = dialect

    @classmethod
    async def find(cls, client: HttpClient, model: str) -> ServerTokenizer:
        """Return the server's tokenizer; RequestError when it offers none."""
        for dialect in _DIALECTS:
            tokenizer = cls(client, model, dialect)
            path, body = tokenizer._encode_request("a", False)
            reply = await ask(client, "POST", path, body)
            if reply.status == 200 and isinstance(reply.content, dict) and "tokens" in reply.content:
                return tokenizer
        raise RequestError(
            f"{client.origin} does not turn text into tokens (no /tokenize); give --tokenizer with the model's "
            f"{_FILE}, or prompts by --prompts"
        )

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Return ids; RequestError when the server does not."""
        found = await self._ask(*self._encode_request(text, special_tokens), field="tokens")
        if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
            raise RequestError(f'{self._client.origin}{self._encode_path}: "tokens" is no list of token ids')
        return found

    async def decode(self, ids: Sequence[int]) -> str:
        """Return text; RequestError when the server does not."""
        body = {"model": self._model, "tokens": list(ids)}
        return str(await self._ask(self._decode_path, body, field=self._decoded_field))

    def _encode_request(self, text: str, special_tokens: bool) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self._model, self._text_field: text}
        if self._text_field == "prompt":
            body["add_special_tokens"] = special_tokens
        elif self._text_field == "content":
            body["add_special"] = special_tokens
        return self._encode_path, body

    async def _ask(self, path: str, body: dict[str, Any], field: str) -> Any:
        reply = await ask(self._client, "POST", path, body)
        if reply.status != 200 or not isinstance(reply.content, dict) or field not in reply.content:
            said = reply.text.decode(errors="replace")[:200]
            raise RequestError(f"{self._client.origin}{path} answered {reply.status}: {said}; give --tokenizer")
        return reply.content[field]
