"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests import triton_kernels

triton_kernels.prepare()

# A shell without job control has what it runs in the background ignore Ctrl-C, and with it all that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of tiny trained models and texts; skip where it is absent."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("INFERENCEX_SHARED_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the shared test data is not at {folder} (set INFERENCEX_SHARED_DATA)")
    return folder
