"""What a request gives back: text, tokens, log-probabilities and timings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from inferencex.formats.errors import InferenceXError
from inferencex.formats.records import record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@record(frozen=True)
class Logprob:
    """One token's log-probability (natural logarithm) at one position, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


# The chosen token's entry comes first, then the most likely ones in order of their rank.
TokenLogprobs = Mapping[int, Logprob]


@record  # one is made for every token, and freezing it would take three times as long
class CompletionDelta:
    """What one step added to one continuation. `text` never ends inside a code point.

    The joined `text` of all deltas is the text of the finished continuation. A delta can bring tokens and
    no text yet (a code point or a possible stop string is incomplete) and text without tokens (the last).
    `output` is set on the very last delta of the whole request.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None


@record(frozen=True)
class CompletionOutput:
    """One finished continuation of a prompt.

    token_ids:      every generated token, the one that ended it included
    text_offsets:   for each token, the index in `text` where its characters start; `text[a:b]` between one
                    offset and the next is what the token added (tokens inside a code point add nothing)
    logprobs:       for each token, or None when not asked for
    finish_reason:  "stop" (end of sequence, a stop, or a constraint after which nothing can follow), "length",
                    "abort" or "error"
    stop_reason:    the stop string or stop token id that ended it; None for end of sequence
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    text_offsets: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@record
class RequestMetrics:
    """When things happened to a request, in seconds of a monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from arrival until the first step that worked on the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first generated token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, of all continuations, per second since the first."""
        if self.first_token_time is None or self.finished_time is None or self.num_generated_tokens < 2:
            return None
        seconds = self.finished_time - self.first_token_time
        return (self.num_generated_tokens - 1) / seconds if seconds > 0 else None


@record(frozen=True)
class RequestOutput:
    """A finished request. `prompt_logprobs` has one entry a prompt token, None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_cached_tokens: int
    metrics: RequestMetrics
    error: InferenceXError | None = None


def _no_embedding() -> NDArray[np.float32]:
    import numpy as np  # here, for the command line describes outputs before it knows that it will make any

    return np.empty(0, np.float32)


@record(frozen=True)
class EmbeddingOutput(RequestOutput):
    """A finished request for an embedding; `outputs` is empty.

    embedding: float32 [hidden]; without elements when the request was aborted or has failed
    """

    embedding: NDArray[np.float32] = field(default_factory=_no_embedding, compare=False)
