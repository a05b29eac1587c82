"""A request and its sequences: one per continuation, each with its tokens and its place in the pool."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import field
from enum import Enum, auto

from inferencex.formats.records import record
from inferencex.runtime.engine.constraint import SequenceConstraint
from inferencex.runtime.engine.pooling import HiddenStatePool
from inferencex.runtime.engine.sampler import SequenceSampler
from inferencex.runtime.engine.text_stream import TextStream
from inferencex.runtime.outputs import FinishReason, RequestMetrics, TokenLogprobs
from inferencex.runtime.params import SamplingParams


class Status(Enum):
    """Where a sequence stands. Only a running one holds blocks."""

    HELD = auto()  # its request's first sequence has yet to compute the prompt they share
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@record(eq=False)
class Request:
    """One prompt to continue, or to embed, as accepted: every parameter resolved against the model.

    max_tokens:      most tokens each continuation may have; prompt + max_tokens fits context and pool
    stop_token_ids:  token ids that end a continuation, the end-of-sequence ones included unless ignored
    cache_root:      start of the prefix chain; only requests with equal roots share blocks; None: no sharing
    prompt_logprobs: filled by position while the prompt is computed; None when not asked for
    pool:            takes the prompt's hidden states, where an embedding is asked for: nothing is generated then
    is_constrained:  whether its sequences have constraints
    """

    id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    priority: int
    cache_root: Hashable | None
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None
    sequences: list[Sequence] = field(default_factory=list)
    arrival: int = 0
    num_cached_tokens: int = 0
    pool: HiddenStatePool | None = None
    is_constrained: bool = False

    @property
    def finished(self) -> bool:
        """Tell whether every continuation has ended."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)


def empty_block_table() -> array[int]:
    """Return a table without blocks. It is an array of int32, which a step takes over without a look at each block."""
    return array("i")


@record(eq=False)
class Sequence:
    """One continuation of a request's prompt.

    token_ids:           prompt and output
    block_table:         blocks that hold the layer state, in order
    num_prompt_tokens:   how many of `token_ids` are the prompt's
    content_ids:         identities, in the prefix cache, of the leading full blocks
    num_computed_tokens: leading tokens whose layer state is held
    constraint:          what may be said next; None: anything
    """

    request: Request
    index: int
    sampler: SequenceSampler
    text_stream: TextStream | None
    token_ids: list[int]
    status: Status = Status.WAITING
    block_table: array[int] = field(default_factory=empty_block_table)
    content_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    constraint: SequenceConstraint | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose layer state is not held; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tell whether this sequence has yet to deliver log-probabilities of its request's prompt."""
        return self.request.prompt_logprobs is not None and self.index == 0 and self.num_output_tokens == 0

    @property
    def first_prompt_row(self) -> int:
        """Position of the first token of the prompt whose logits are wanted: the one in front of what is reported."""
        return max(self.request.params.prompt_logprobs_start, 1) - 1

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens that may come from the cache: those of which nothing is wanted but their layer state."""
        pool = self.request.pool
        if pool is not None and pool.reads_every_token:
            return 0
        last = len(self.token_ids) - 1  # computed in any case: its logits are needed
        return min(self.first_prompt_row, last) if self.wants_prompt_logprobs else last
