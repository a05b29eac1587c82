"""Triton's kernels for tests: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

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
