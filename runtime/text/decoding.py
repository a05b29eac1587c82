"""The decoders of `tokenizer.json`, restated so that they work on one token at a time.

The `tokenizers` library decodes a whole list of tokens. Each stage here takes the tokens one by one and returns the
pieces of text that no later token can change, so that all pieces joined equal what the library gives for the list.
Stages that treat each token on its own call the library's decoder for it; only those with memory are written out.
A decoder that has no such form (CTC, for one) is deferred: its text comes at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import tokenizers

Spec = dict[str, Any]


class Stage(Protocol):
    """One decoder of the chain."""

    def after(self, token: str) -> None:
        """Before the first push: say that the text continues another one, which ended with `token`."""

    def push(self, token: str) -> list[str]:
        """Take the next token (or piece of text) and return what is certain by now."""
        ...

    def end(self) -> list[str]:
        """Return what was held back; nothing follows."""
        ...


def library_decoder(spec: Spec) -> Any:
    """Build the library's decoder from its JSON form, by way of a tokenizer with an empty model."""
    shell = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": spec}
    return tokenizers.Tokenizer.from_str(json.dumps(shell)).decoder


class _PerToken:
    """A decoder that looks at one token, and at whether it is the first one."""

    def __init__(self, spec: Spec) -> None:
        self._decoder = library_decoder(spec)
        self._positional = spec["type"] in ("WordPiece", "Metaspace")
        self._first = True
        self._pieces: dict[str, str] = {}

    def after(self, token: str) -> None:
        self._first = False

    def push(self, token: str) -> list[str]:
        if self._first:
            self._first = False
            return [self._decoder.decode([token])]
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decoder.decode(["", token] if self._positional else [token])
        return [piece]

    def end(self) -> list[str]:
        return []


class _Spaced:
    """No decoder at all: the library then puts a space between tokens."""

    def __init__(self) -> None:
        self._first = True

    def after(self, token: str) -> None:
        self._first = False

    def push(self, token: str) -> list[str]:
        if self._first:
            self._first = False
            return [token]
        return [" " + token]

    def end(self) -> list[str]:
        return []


class _WordEnds:
    """BPEDecoder: a suffix that marks the end of a word turns into a space, or into nothing on the last token."""

    def __init__(self, spec: Spec) -> None:
        self._suffix: str = spec["suffix"]
        self._held: str | None = None

    def after(self, token: str) -> None:
        self._held = self._suffix if token.endswith(self._suffix) else None

    def push(self, token: str) -> list[str]:
        pieces = [] if self._held is None else [self._held.replace(self._suffix, " ")]
        self._held = token if self._suffix in token else None
        if self._held is None:
            pieces.append(token)
        return pieces

    def end(self) -> list[str]:
        held, self._held = self._held, None
        return [] if held is None else [held.replace(self._suffix, "")]


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class _ByteRuns:
    """ByteFallback: a run of byte tokens is one text if all of it is valid UTF-8, else one U+FFFD for each byte.

    Validity is settled for the run as a whole. A run that is valid so far is held until a token that is no byte
    ends it; once it is broken, every further byte is a U+FFFD at once.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._valid: list[str] = []
        self._length = 0
        self._broken = False

    def after(self, token: str) -> None:
        pass

    def push(self, token: str) -> list[str]:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is None:
            pieces = self.end()
            pieces.append(token)
            return pieces
        if self._broken:
            return ["\ufffd"]
        self._length += 1
        try:
            self._valid.append(self._decoder.decode(bytes([int(byte[1], 16)])))
        except UnicodeDecodeError:
            self._broken = True
            return ["\ufffd"] * self._length
        return []

    def end(self) -> list[str]:
        if self._broken or self._length == 0:
            pieces = []
        else:
            try:
                self._decoder.decode(b"", final=True)
                pieces = ["".join(self._valid)]
            except UnicodeDecodeError:
                pieces = ["\ufffd"] * self._length
        if self._length:
            self._start()
        return pieces


def byte_alphabet() -> dict[str, int]:
    """Return the character that stands for each byte in byte-level vocabularies (those of GPT-2), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()


@cache  # as large as vocabularies are
def _spelled(token: str) -> tuple[bytes, str | None]:
    """Return the bytes that a byte-level token spells, and their text unless they begin or end inside a character."""
    try:
        data = bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token that is plain text
        data = token.encode("utf-8")
    try:
        return data, data.decode("utf-8")
    except UnicodeDecodeError:
        return data, None


class _ByteLevel:
    """Tokens spell bytes; the bytes of all of them are one UTF-8 text, with U+FFFD for what is invalid."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside_character = False

    def after(self, token: str) -> None:
        pass

    def push(self, token: str) -> list[str]:
        data, text = _spelled(token)
        if text is None or self._inside_character:
            text = self._decoder.decode(data)
            self._inside_character = bool(self._decoder.getstate()[0])
        return [text]

    def end(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class _LeadingStrip:
    """Strip at the start of the whole text."""

    def __init__(self, spec: Spec) -> None:
        self._character: str = spec["content"]
        self._left: int = spec["start"]

    def after(self, token: str) -> None:
        self._left = 0

    def push(self, token: str) -> list[str]:
        while self._left and token:
            if token[0] != self._character:
                self._left = 0
                break
            token = token[1:]
            self._left -= 1
        return [token]

    def end(self) -> list[str]:
        return []


class _Deferred:
    """Decoders that need the whole text: nothing comes before the end."""

    def __init__(self, specs: Sequence[Spec], fused: bool) -> None:
        self._decoder = library_decoder({"type": "Sequence", "decoders": list(specs)})
        self._fused = fused
        self._tokens: list[str] = []
        self._known = 0

    def _text(self) -> str:
        text: str = self._decoder.decode(["".join(self._tokens)] if self._fused else self._tokens)
        return text

    def after(self, token: str) -> None:
        self._tokens = [token]
        self._known = len(self._text())

    def push(self, token: str) -> list[str]:
        self._tokens.append(token)
        return []

    def end(self) -> list[str]:
        return [self._text()[self._known :]]


def build_stages(spec: Spec | None) -> list[Stage]:
    """Return the stages that do what the decoder `spec` of a `tokenizer.json` does."""
    if spec is None:
        return [_Spaced()]
    specs = _flatten(spec)
    stages: list[Stage] = []
    fused = False  # from here on there is one long token, of which pieces arrive
    for index, part in enumerate(specs):
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "ByteLevel" and not fused:
            stages.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback" and not fused:
            stages.append(_ByteRuns())
        elif kind == "BPEDecoder" and part["suffix"] and not fused:
            stages.append(_WordEnds(part))
        elif kind in ("Replace", "Strip", "WordPiece", "Metaspace") and not fused:
            stages.append(_PerToken(part))
        elif kind == "Strip" and part["stop"] == 0:
            stages.append(_LeadingStrip(part))
        elif kind == "Replace" and len(part["pattern"].get("String", "")) == 1:
            stages.append(_PerToken(part))
        else:
            stages.append(_Deferred(specs[index:], fused))
            break
    return stages


def _flatten(spec: Spec) -> list[Spec]:
    if spec["type"] != "Sequence":
        return [spec]
    return [part for inner in spec["decoders"] for part in _flatten(inner)]
