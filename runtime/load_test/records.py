"""What is kept of each request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request, with times in seconds on the clock of the run (`time.perf_counter`).

    index:          its place in the run
    prompt_tokens:  tokens of its prompt, as the server counted them, else as they were asked for; None: not known
    output_tokens:  tokens of its answer, as the server counted them, else as its events were; None: not known
    due:            when it should have been sent
    sent:           when it was
    arrivals:       when each event with text arrived, of a streamed answer
    ended:          when the answer was complete, or the request failed
    error:          what kind of failure it was; None: it did not fail
    message:        what the failure said
    finish_reason:  why the answer ended, as the server says it
    """

    index: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    error: str | None = None
    message: str | None = None
    finish_reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer came whole."""
        return self.error is None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from sending to the first text; None when it was not streamed."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds a token after the first; None when it was not streamed or had but one."""
        if not self.arrivals or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return self.ended - self.sent

    def fail(self, kind: str, message: str) -> None:
        """Say that it failed; the first failure counts."""
        if self.error is None:
            self.error, self.message = kind, message
