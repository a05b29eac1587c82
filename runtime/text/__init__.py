"""Text in and out of a model: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferencex.runtime.text.chat import ChatTemplate as ChatTemplate
    from inferencex.runtime.text.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from inferencex.runtime.text.stop import StopMatcher as StopMatcher
    from inferencex.runtime.text.tokenizer import Tokenizer as Tokenizer

_HOMES = {
    "ChatTemplate": "chat",
    "IncrementalDetokenizer": "detokenizer",
    "StopMatcher": "stop",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that to read a side file does not pull in the tokenizer's library."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
