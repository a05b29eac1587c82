"""A bundle's tokenizer in the form that GGUF files carry."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export.checkpoint import read_json

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
"""Names that llama.cpp has for the expressions by which tokenizers cut text into words."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_tokenizer(writer: gguf.GGUFWriter, bundle: Bundle, vocab_size: int) -> None:
    """Write vocabulary, merges or scores, special tokens and chat template.

    Raises ExportError for a tokenizer that llama.cpp has no like of, or whose way of cutting text has no name there.
    """
    tokenizer = read_json(bundle, "tokenizer.json")
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE":
        raise ExportError(f"{bundle.path}: its tokenizer is {model.get('type')}; gguf export knows BPE")
    byte_level = _split_name(tokenizer.get("pre_tokenizer"))
    where = bundle.path / "tokenizer.json"
    if byte_level is None and not _is_sentencepiece(tokenizer):
        raise ExportError(
            f"{where}: cuts text into words by a rule that gguf export has no name of llama.cpp's for; its tokens "
            "could differ"
        )
    tokens, types = _vocabulary(tokenizer, vocab_size, where)
    if byte_level is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(byte_level)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix(_adds_prefix(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    log = logging.getLogger("gguf.vocab")  # it warns of templates for pairs of texts, which nothing here uses
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        special = gguf.SpecialVocab(Path(bundle.path), load_merges=byte_level is not None, n_vocab=vocab_size)
    finally:
        log.setLevel(level)
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _vocabulary(tokenizer: Mapping[str, Any], vocab_size: int, where: Path) -> tuple[list[str], list[int]]:
    """Return every token and its type, filled up to the rows of the embedding."""
    tokens: dict[int, tuple[str, gguf.TokenType]] = {}
    byte_fallback = bool(tokenizer["model"].get("byte_fallback"))
    for text, number in tokenizer["model"]["vocab"].items():
        is_byte = byte_fallback and _BYTE.fullmatch(text) is not None
        tokens[number] = (text, gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL)
    unknown = tokenizer["model"].get("unk_token")
    for added in tokenizer.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = (added["content"], gguf.TokenType.UNKNOWN if added["content"] == unknown else kind)
    if tokens and max(tokens) >= vocab_size:
        raise ExportError(f"{where}: has a token {max(tokens)}, the model embeds {vocab_size}")
    filled = [tokens.get(n, (f"[PAD{n}]", gguf.TokenType.UNUSED)) for n in range(vocab_size)]
    return [text for text, _ in filled], [int(kind) for _, kind in filled]


def _split_name(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return llama.cpp's name of the rule that cuts text into words before byte-level merges; None if there is none."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    by_bytes = bool(steps[-1].get("use_regex", True))
    if kinds == ["ByteLevel"] and by_bytes:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and by_bytes:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not by_bytes and steps[0].get("behavior") == "Isolated":
        return _SPLITS.get(steps[0].get("pattern", {}).get("Regex", ""))
    return None


def _normalizers(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    normalizer = tokenizer.get("normalizer") or {}
    steps: list[Mapping[str, Any]] = normalizer.get("normalizers", [normalizer] if normalizer else [])
    return steps


def _is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    """Tell whether text is merged as a whole, with spaces written as U+2581, as SentencePiece's BPE does."""
    pre_tokenizer = tokenizer.get("pre_tokenizer")
    if pre_tokenizer is not None:
        return pre_tokenizer.get("type") == "Metaspace" and not pre_tokenizer.get("split", True)
    return {step.get("type") for step in _normalizers(tokenizer)} <= {"Prepend", "Replace"} and any(
        step.get("content") == "\u2581" for step in _normalizers(tokenizer)
    )


def _adds_prefix(tokenizer: Mapping[str, Any]) -> bool:
    pre_tokenizer = tokenizer.get("pre_tokenizer") or {}
    prepends = any(step.get("type") == "Prepend" for step in _normalizers(tokenizer))
    return prepends or pre_tokenizer.get("prepend_scheme") in ("first", "always")


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return scores by which llama.cpp merges in the order of the merge list: the earlier, the higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model.get("merges", [])):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    last = len(ranks) + 1
    return [-float(ranks.get(token, last)) for token in tokens]
