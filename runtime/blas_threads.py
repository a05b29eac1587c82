"""numpy's BLAS without threads that look for work before there is any, on the cores that a bundle is loaded with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOKING_TIME = "OPENBLAS_THREAD_TIMEOUT"
"""OpenBLAS's environment variable, read as it is loaded: idle threads look for work for 2 to the power of it cycles."""
_SHORTEST = "4"


@contextmanager
def idle_blas_threads_sleep() -> Iterator[None]:
    """While numpy is imported, have the threads that its OpenBLAS starts go to sleep at once, and not after 0.1 s.

    They wake up when there is work, as before. Where the environment says how long they look, or numpy was imported
    already, nothing changes; nor does anything stay in the environment.
    """
    if LOOKING_TIME in os.environ or "numpy" in sys.modules:
        yield
        return
    os.environ[LOOKING_TIME] = _SHORTEST
    try:
        yield
    finally:
        os.environ.pop(LOOKING_TIME, None)
