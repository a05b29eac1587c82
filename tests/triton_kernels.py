"""Triton's kernels for tests: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from inferencex.runtime.backends.device_names import may_have_gpu

AVAILABLE = importlib.util.find_spec("triton") is not None
"""Whether there is Triton: it is made for Linux."""


def prepare() -> None:
    """Say how kernels run, by environment variables; called before anything imports Triton, which reads them then."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if not may_have_gpu():
        os.environ["TRITON_INTERPRET"] = "1"


def device() -> str:
    """Return the torch device that kernels run on."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def hasten_interpreter() -> None:
    """Halve what the interpreter takes: without this it prepares Triton's language anew in each call of a function.

    A function that is called by a kernel finds the language prepared by the kernel's own launch.
    """
    from triton.runtime import interpreter

    if device() == "cuda" or getattr(interpreter._patch_lang, "is_hastened", False):
        return
    patch, core = interpreter._patch_lang, interpreter.tl.core

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is interpreter.tl or value is core]
        if languages and not any(core.is_builtin(language.load) for language in languages):
            return _Nothing()
        return patch(function)

    patch_once.is_hastened = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once


class _Nothing:
    """What a call changed of the language: nothing to take back."""

    def restore(self) -> None: ...
