"""Which tokens are special, as `tokenizer_config.json` and its older companions say it.

The rules are those by which `transformers` 5 loads a `tokenizer.json`, so that both give the same ids:
`add_bos_token` and `add_eos_token` are ignored (the post-processor in `tokenizer.json` decides), the tokens of
`added_tokens_decoder` are added again with the flags given there, and a named special token that the tokenizer
does not know yet is added at the end. `special_tokens_map.json` and `added_tokens.json` count only where
`tokenizer_config.json` has no `added_tokens_decoder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from inferencex.formats.errors import BundleError
from inferencex.formats.records import record
from inferencex.runtime.text.side_files import read_json_object

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG_FILE = "tokenizer_config.json"

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@record(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    named:  attribute ("bos_token", ...) to token text, standard names first; chat templates see these as variables
    to_add: tokens to hand to the tokenizer, in order
    """

    named: dict[str, str]
    to_add: list[AddedToken]


def read_special_tokens(bundle_dir: Path, config: dict[str, Any], known: dict[int, AddedToken]) -> SpecialTokens:
    """Collect the special tokens of `bundle_dir`, given its tokenizer configuration and the tokens already added.

    Raises BundleError when a token is given in a form that is neither a text nor an added-token object.
    """
    values = {key: value for key, value in config.items() if value is not None}
    if "added_tokens_decoder" in values:
        indexed = _decoder_entries(bundle_dir, values["added_tokens_decoder"])
    else:
        values.update({k: v for k, v in read_json_object(bundle_dir / "special_tokens_map.json").items() if v})
        special = [_token(values[name], f"{bundle_dir / CONFIG_FILE}: {name}") for name in NAMED if name in values]
        special += _extra(values, bundle_dir)
        indexed = _legacy_entries(bundle_dir, {token.content for token in special})
        indexed.update(known)

    by_content = {token.content: token for token in indexed.values()}
    named: dict[str, AddedToken] = {}
    specific = {key: value for key, value in values.items() if key.endswith("_token") and key not in NAMED}
    if isinstance(values.get("extra_special_tokens"), dict):
        specific.update(values["extra_special_tokens"])
    for name in NAMED:
        if name in values:
            token = _token(values[name], f"{bundle_dir / CONFIG_FILE}: {name}")
            named[name] = by_content.get(token.content, token)
    for name, value in specific.items():
        if not isinstance(value, bool):
            named[name] = _token(value, f"{bundle_dir / CONFIG_FILE}: {name}")

    to_add = [token for _, token in sorted(indexed.items())]
    present = {token.content for token in known.values()} | {token.content for token in to_add}
    for token in [*named.values(), *_extra(values, bundle_dir)]:
        if token.content not in present:
            present.add(token.content)
            token.special = token.special or token.content in {entry.content for entry in named.values()}
            to_add.append(token)
    return SpecialTokens(named={name: token.content for name, token in named.items()}, to_add=to_add)


def _token(value: Any, where: str) -> AddedToken:
    """Build an added token from its text or its JSON object."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value})
    raise BundleError(f"{where}: {value!r} is not a token; expected a text or an object with 'content'")


def _extra(values: dict[str, Any], bundle_dir: Path) -> list[AddedToken]:
    """Return the special tokens that have no name of their own."""
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return []
    return [_token(value, f"{bundle_dir / CONFIG_FILE}: extra_special_tokens") for value in extra]


def _decoder_entries(bundle_dir: Path, entries: Any) -> dict[int, AddedToken]:
    where = f"{bundle_dir / CONFIG_FILE}: added_tokens_decoder"
    if not isinstance(entries, dict) or not all(str(index).isdecimal() for index in entries):
        raise BundleError(f"{where}: expected an object from token id to token")
    return {int(index): _token(value, f"{where}[{index}]") for index, value in entries.items()}


def _legacy_entries(bundle_dir: Path, special: set[str]) -> dict[int, AddedToken]:
    path = bundle_dir / "added_tokens.json"
    indexed: dict[int, AddedToken] = {}
    for content, index in read_json_object(path).items():
        if not isinstance(index, int):
            raise BundleError(f"{path}: token {content!r} has id {index!r}, expected a number")
        is_special = content in special
        indexed[index] = AddedToken(content, normalized=not is_special, special=is_special)
    return indexed
