"""Loading without looking for garbage: nearly all that it makes stays, and looking through it again takes its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause automatic collection of reference cycles, if it is on; also a decorator.

    What was made meanwhile counts as old: else the next object would have all of it looked through at once.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what the application has frozen stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
