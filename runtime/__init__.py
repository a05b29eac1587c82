"""Bundles to tokens: `LLM`, what to ask it (`SamplingParams`), and what it answers (`RequestOutput`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from inferencex.runtime.blas_threads import idle_blas_threads_sleep
from inferencex.runtime.garbage import collection_paused

if TYPE_CHECKING:
    from inferencex.runtime.llm import LLM as LLM
    from inferencex.runtime.outputs import CompletionDelta as CompletionDelta
    from inferencex.runtime.outputs import CompletionOutput as CompletionOutput
    from inferencex.runtime.outputs import EmbeddingOutput as EmbeddingOutput
    from inferencex.runtime.outputs import Logprob as Logprob
    from inferencex.runtime.outputs import RequestMetrics as RequestMetrics
    from inferencex.runtime.outputs import RequestOutput as RequestOutput
    from inferencex.runtime.params import SamplingParams as SamplingParams
    from inferencex.runtime.server.launch import launch_model as launch_model
    from inferencex.runtime.structured import Grammar as Grammar

_HOMES = {
    "LLM": "llm",
    "CompletionDelta": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "Grammar": "structured",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
    "launch_model": "server.launch",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that a backend alone does not pull in the engine and the tokenizer."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with idle_blas_threads_sleep(), collection_paused():  # modules, classes and functions are no garbage
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
