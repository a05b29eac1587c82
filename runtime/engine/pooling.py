"""One vector for a whole prompt: of its last token, or the mean over all, as hidden states arrive chunk by chunk."""

from __future__ import annotations

import numpy as np

from inferencex.formats.errors import RequestError
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.outputs import POOLINGS, Pooling


class HiddenStatePool:
    """Pools the hidden states of one prompt.

    The mean is summed in float64, token after token: how the prompt was cut into chunks changes no bit of it.

    pooling:   "last" or "mean"
    normalize: whether the vector gets length 1
    num_added: hidden states taken so far
    """

    __slots__ = ("_total", "normalize", "num_added", "pooling")

    def __init__(self, name: str, pooling: Pooling, normalize: bool) -> None:
        if pooling not in POOLINGS:
            raise RequestError(f"{name}: pooling is {pooling!r:.60}; expected one of: {', '.join(POOLINGS)}")
        if not isinstance(normalize, bool):
            raise RequestError(f"{name}: normalize is {normalize!r:.60}; expected true or false")
        self.pooling = pooling
        self.normalize = normalize
        self._total: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        self.num_added = 0

    @property
    def reads_every_token(self) -> bool:
        """Whether the hidden states of all tokens are needed, and not only the last one's."""
        return self.pooling == "mean"

    def add(self, hidden_states: Float32Array) -> None:
        """Take the hidden states [tokens, hidden] that follow."""
        for row in hidden_states:
            if self._total is None:
                self._total = row.astype(np.float64)
            else:
                self._total += row
            self.num_added += 1

    def result(self) -> Float32Array:
        """Return the vector, float32 [hidden], once all hidden states are there."""
        if self._total is None:
            raise RuntimeError("a prompt was pooled before its hidden states were computed")
        vector = self._total / self.num_added
        if self.normalize:
            length = float(np.sqrt(np.dot(vector, vector)))
            if length > 0.0:
                vector /= length
        return vector.astype(np.float32)
