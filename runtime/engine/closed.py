"""What stands in for a model that was given back."""

from __future__ import annotations

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import Executable, Float32Array, StepBatch


class ClosedExecutable:
    """Knows what it was, and runs no steps."""

    def __init__(self, executable: Executable) -> None:
        self.facts = executable.facts
        self.num_blocks = executable.num_blocks
        self.block_size = executable.block_size

    def error(self) -> BackendError:
        """Return the error of whoever asks for something."""
        return BackendError("the model was closed; load the bundle again")

    def step(self, batch: StepBatch) -> Float32Array:
        """Raise BackendError."""
        raise self.error()
