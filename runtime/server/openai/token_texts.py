"""What single tokens are as text and bytes, for log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from inferencex.runtime.text.decoding import byte_alphabet
from inferencex.runtime.text.detokenizer import IncrementalDetokenizer
from inferencex.runtime.text.tokenizer import Tokenizer

_BYTE_OF = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The tokens of one tokenizer, each as it is inside a text: with the space that it may begin with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _kinds(tokenizer.decoder_spec)
        self._spells_bytes = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; they may begin or end inside a character. Empty for an id that is no token."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """Return a token's text, with U+FFFD where its bytes are none."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """Return a token's text, or, where its bytes are none, those as `bytes:\\xe2\\x80`."""
        data = self.bytes_of(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._spells_bytes and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if self._has_byte_tokens and byte is not None:
            return bytes([int(byte[1], 16)])
        alone = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False, prompt_ids=(token_id,))
        return (alone.push(token_id) + alone.flush()).encode("utf-8")


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Return the tokens of a tokenizer, which are remembered as long as it lives."""
    found: TokenTexts | None = tokenizer.derived.get(TokenTexts)
    if found is None:
        found = tokenizer.derived[TokenTexts] = TokenTexts(tokenizer)
    return found


class TextOffsets:
    """Where the characters of each token begin in the text of all of them."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._length = 0

    def push(self, token_id: int) -> int:
        """Take the next token and return its offset."""
        offset = self._length
        self._length += len(self._detokenizer.push(token_id))
        return offset


def prompt_text(tokenizer: Tokenizer, ids: Sequence[int], text: str | None) -> tuple[str, list[int]]:
    """Return a prompt's text and each token's offset in it.

    The text is `text` wherever the tokens spell it, with or without special ones; otherwise what they spell.
    """
    spelled = ""
    offsets: list[int] = []
    for skip_special_tokens in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        offsets, length = [], 0
        for token_id in ids:
            offsets.append(length)
            length += len(detokenizer.push(token_id))
        detokenizer.flush()
        spelled = detokenizer.text
        if spelled == text:
            break
    return spelled, offsets


def _kinds(spec: dict[str, Any] | None) -> set[str]:
    """Return the kinds of decoders in a chain of them."""
    if spec is None:
        return set()
    inner = spec.get("decoders", [])
    return {spec["type"], *(kind for part in inner for kind in _kinds(part))}
