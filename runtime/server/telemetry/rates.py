"""How fast a count grows at the moment, from what it was when somebody last looked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 10.0  # seconds
_SPACING = 0.5  # seconds between two looks that are remembered


class Rate:
    """A count's growth per second over the last ten seconds, or since it was looked at before that.

    Nothing runs in between: whoever asks leaves a mark for those who ask later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()

    def per_second(self, count: int) -> float:
        """Return how fast the count has grown until now; 0 when nobody looked before."""
        now = self._clock()
        while len(self._marks) > 1 and self._marks[1][0] <= now - _WINDOW:
            self._marks.popleft()
        if not self._marks or now - self._marks[-1][0] >= _SPACING:
            self._marks.append((now, count))
        then, before = self._marks[0]
        return max(count - before, 0) / (now - then) if now > then else 0.0
