"""A bundle's tokenizer: text to token ids and back, with the ids that `transformers` gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from inferencex.formats.errors import BundleError, RequestError
from inferencex.runtime.text.cleanup import clean_up_spaces
from inferencex.runtime.text.eos import configured_eos_token_ids
from inferencex.runtime.text.side_files import TOKENIZER_FILE as TOKENIZER_FILE
from inferencex.runtime.text.side_files import read_json_object
from inferencex.runtime.text.special_tokens import CONFIG_FILE, read_special_tokens


class Tokenizer:
    """The tokenizer of one bundle. Immutable after loading, and safe to share between threads.

    derived: what others have worked out from it and want to keep as long as it lives, by its class. A dictionary with
             weak keys would not do: what is derived from a tokenizer mostly refers to it, and would keep it alive
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        eos_token_ids: tuple[int, ...],
        clean_up_spaces: bool = False,
    ) -> None:
        self._backend = backend
        self._clean_up_spaces = clean_up_spaces
        self.special_tokens = special_tokens
        self.eos_token_ids = eos_token_ids
        self._entries: dict[int, str | None] = {}
        self.derived: dict[type[Any], Any] = {}

    @classmethod
    def load(cls, bundle_dir: Path) -> Tokenizer:
        """Load `tokenizer.json` of `bundle_dir`, with the settings of the files beside it where they exist.

        `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` add special tokens;
        `generation_config.json`, then `config.json`, then the tokenizer's own `eos_token` say which ids end a
        text. Raises BundleError when a file is missing or unreadable.
        """
        path = bundle_dir / TOKENIZER_FILE
        if not path.is_file():
            raise BundleError(f"{path}: not found; a bundle needs its tokenizer: convert the model again")
        try:
            # From bytes: decoding megabytes only for the library to encode them again takes a tenth of the time.
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise BundleError(f"{path}: cannot be read ({error}); convert the model again") from error
        except Exception as error:  # the library raises plain Exception for any defect of the file
            raise BundleError(f"{path}: is not a usable tokenizer ({error}); convert the model again") from error
        config = read_json_object(bundle_dir / CONFIG_FILE)
        if backend.padding is not None:
            config = {"pad_token": backend.padding["pad_token"], **config}
        backend.no_truncation()
        backend.no_padding()
        _remember_no_words(backend)

        special = read_special_tokens(bundle_dir, config, backend.get_added_tokens_decoder())
        backend.add_tokens(special.to_add)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))

        return cls(
            backend,
            special_tokens=special.named,
            eos_token_ids=_eos_token_ids(bundle_dir, backend, special.named.get("eos_token")),
            clean_up_spaces=_cleans_up(config, backend),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written out in the text become their ids.

        `add_special_tokens` adds what the model expects around a text (often a beginning-of-text token); a rendered
        chat already has them. Raises RequestError for text that has no UTF-8 form (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise RequestError(f"the text holds a lone surrogate ({found}), which no tokenizer can encode") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids that name no token are passed over. Raises RequestError for negative ids."""
        try:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RequestError(f"token ids must lie between 0 and {self.vocab_size - 1}") from error
        return clean_up_spaces(text) if self._clean_up_spaces else text

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at the least, in no time; 0 where the tokenizer gives no such bound."""
        longest = self._longest_token
        return 0 if longest is None else -(-len(text) // longest)

    @cached_property
    def _longest_token(self) -> int | None:
        """Characters that a token stands for at the most; None for tokenizers that may drop or merge any number.

        Those of byte-level BPE drop nothing: an entry has a character for each byte of what it stands for.
        """
        spec = json.loads(self._backend.pre_tokenizer.__getstate__()) if self._backend.pre_tokenizer is not None else {}
        steps = spec.get("pretokenizers", [spec])
        added = self._backend.get_added_tokens_decoder().values()
        if (
            self._backend.normalizer is not None
            or not any(step.get("type") == "ByteLevel" for step in steps)
            or any(step.get("type") not in ("ByteLevel", "Digits", "Split") for step in steps)
            or any(step.get("behavior") == "Removed" for step in steps)
            or any(token.lstrip or token.rstrip for token in added)
        ):
            return None
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def to_json(self) -> str:
        """Return the tokenizer as a `tokenizer.json`, with the tokens that the files beside it have added."""
        text: str = self._backend.to_str()
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's entry for an id (not its text: bytes and spaces may be coded), None if none."""
        try:
            return self._entries[token_id]
        except KeyError:
            token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
            self._entries[token_id] = token  # the library makes a new string each time
            return token

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, None when there is none."""
        index: int | None = self._backend.token_to_id(token)
        return index

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own logits may be padded beyond it."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @cached_property
    def special_contents(self) -> frozenset[str]:
        """Vocabulary entries that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token.content for token in added.values() if token.special)

    @cached_property
    def decoder_spec(self) -> dict[str, Any] | None:
        """How token entries turn into text: the `decoder` object of `tokenizer.json`, None when it has none."""
        decoder = self._backend.decoder
        if decoder is None:
            return None
        spec: dict[str, Any] = json.loads(decoder.__getstate__())
        return spec

    @property
    def cleans_up_spaces(self) -> bool:
        """Whether `decode` removes the spaces in front of punctuation and English contractions."""
        return self._clean_up_spaces

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-text token, None when the tokenizer names none."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-text token, None when the tokenizer names none."""
        return self.special_tokens.get("eos_token")


def _remember_no_words(backend: tokenizers.Tokenizer) -> None:
    """Have a BPE model find the tokens of every word anew, which takes hardly longer than to look them up.

    The library (0.23) remembers words for each thread and model, and forgets them when the thread ends: after the
    model is gone, and every other one that the thread has used, megabytes of them stay.
    """
    resize = getattr(backend.model, "_resize_cache", None)
    if isinstance(backend.model, tokenizers.models.BPE) and resize is not None:
        resize(0)


def _cleans_up(config: dict[str, Any], backend: tokenizers.Tokenizer) -> bool:
    """Whether decoding cleans up spaces: asked for, and (unless forced) not a BPE model, which it would corrupt."""
    if not config.get("clean_up_tokenization_spaces", False):
        return False
    forced = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(forced) or type(backend.model).__name__ != "BPE"


def _eos_token_ids(bundle_dir: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Return the ids that end a text, from the first file that names any."""
    configured = configured_eos_token_ids(bundle_dir)
    if configured is not None:
        return configured
    index = backend.token_to_id(eos_token) if eos_token is not None else None
    return () if index is None else (index,)
