"""The contract every backend fulfils: compile a bundle once, then execute steps over ragged batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import OptionError
from inferencex.formats.records import record

DEFAULT_KV_CACHE_MEMORY = 4 << 30  # bytes

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


@record(frozen=True)
class StepBatch:
    """One step's work: `S` sequences, `T` new tokens in all, laid out one sequence after the other.

    token_ids:         int32 [T]
    positions:         int32 [T]     position of each token in its own sequence, counted from 0
    sequence_offsets:  int32 [S + 1] tokens of sequence `s` are rows `offsets[s]:offsets[s + 1]`
    context_lengths:   int32 [S]     tokens of the sequence whose state is held once this step is done
    block_tables:      int32 [S, B]  KV blocks of each sequence in order, padded with -1
    logit_rows:        int32 [R]     rows of `[T]` whose logits are wanted, ascending
    prompt_lengths:    int32 [T]     length of the whole prompt that each token's sequence was admitted with;
                                     RoPE variants that depend on the sequence's length read it

    The new tokens of a sequence occupy positions `context_length - new .. context_length - 1`, consecutive.
    The token at position `p` keeps its keys and values in slot `p % block_size` of block
    `block_tables[s, p // block_size]`. A backend reads no slot at or past `context_length`, so blocks are
    handed out unwiped. Blocks shared by several sequences are full and never written again.
    """

    token_ids: Int32Array
    positions: Int32Array
    sequence_offsets: Int32Array
    context_lengths: Int32Array
    block_tables: Int32Array
    logit_rows: Int32Array
    prompt_lengths: Int32Array


@record(frozen=True)
class ModelFacts:
    """What the engine needs to know about a compiled model, read off its graph."""

    vocab_size: int
    max_model_len: int
    num_layers: int
    bytes_per_token: int  # of layer state, all layers together
    # Prompts of at most this many tokens have equal layer state wherever their tokens are equal; the state of a
    # longer prompt also depends on its length (dynamic and long RoPE). None: state never depends on the length.
    length_independent_up_to: int | None = None


MAX_SLOTS = 1 << 26
"""Tokens of layer state that a pool may be asked to hold: far beyond any memory, and safe in int32 arithmetic."""


@record(frozen=True)
class BackendOptions:
    """What the user may ask of any backend.

    num_blocks:             blocks in the pool of layer state; None: as many as `kv_cache_memory` holds
    block_size:             tokens in a block
    threads:                threads to compute with; None: the backend chooses
    kv_cache_memory:        bytes for the pool when `num_blocks` is None; None: `DEFAULT_KV_CACHE_MEMORY` at most
    max_num_seqs:           most sequences (`S`) in one step
    max_num_batched_tokens: most new tokens (`T`) in one step
    max_model_len:          longest sequence that will be asked for; None: the model's own limit
    activation_dtype:       "auto", or what activations are: "float32"; on a CPU also "int8", which is how linears with
                            INT4 and INT8 weights then read them; on a GPU also "bfloat16" and "float16"
    kv_cache_dtype:         "auto", "float32", "float16", "bfloat16", "int8" or "fp8"; "auto" is the format that the
                            bundle has calibrated scales for, if any, and "fp8" needs such scales
    pin:                    keep each thread on a processor of its own
    device:                 "auto", "cpu", "cuda", "rocm", or a GPU by its number such as "cuda:1"
    gpu_memory_utilization: share of a GPU's memory that weights, steps and the pool may take together, when neither
                            `num_blocks` nor `kv_cache_memory` says how large the pool is
    meanwhile:              what else the caller has to do: a backend may call it, once, where it would only wait
    """

    num_blocks: int | None = None
    block_size: int = 16
    threads: int | None = None
    kv_cache_memory: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int | None = None
    activation_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    pin: bool = False
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    meanwhile: Callable[[], object] | None = field(default=None, compare=False)

    def warn_of_unused(self, log: logging.Logger, bundle: Path, where: str, *names: str) -> None:
        """Log a warning, in one line, of those of these options that are not at their defaults."""
        defaults = BackendOptions()
        given = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(defaults, name)]
        if given:
            log.warning("%s: %s: not used %s", bundle, ", ".join(given), where)

    def blocks_for(self, facts: ModelFacts) -> int:
        """Return how many blocks the pool of a model with these facts gets; OptionError when not even one fits.

        Without `num_blocks` the pool is no larger than `max_num_seqs` sequences of `max_model_len` can use.
        """
        if self.num_blocks is not None:
            if self.num_blocks * self.block_size > MAX_SLOTS:
                raise OptionError(
                    f"num_kv_blocks={self.num_blocks} of {self.block_size} tokens are "
                    f"{self.num_blocks * self.block_size} slots; at most {MAX_SLOTS} are possible, and each takes "
                    f"{facts.bytes_per_token} bytes in this model"
                )
            return self.num_blocks
        memory = DEFAULT_KV_CACHE_MEMORY if self.kv_cache_memory is None else self.kv_cache_memory
        block_bytes = self.block_size * facts.bytes_per_token
        affordable = memory // max(block_bytes, 1)
        if affordable < 1:
            raise OptionError(
                f"kv_cache_memory={memory} bytes hold no block: one block of {self.block_size} tokens takes "
                f"{block_bytes} bytes in this model; give more memory or a smaller block_size"
            )
        longest = min(facts.max_model_len, self.max_model_len or facts.max_model_len)
        return min(affordable, self.max_num_seqs * -(-longest // self.block_size))


class Executable(Protocol):
    """A bundle compiled for one device, with its pool of layer state (paged KV is one kind of it)."""

    facts: ModelFacts
    num_blocks: int  # `options.blocks_for(facts)`
    block_size: int

    def step(self, batch: StepBatch) -> Float32Array:
        """Run one step and return logits, float32 `[R, vocab_size]`, one row per entry of `logit_rows`.

        The array may be a view of a buffer that the next step writes to: it is valid until the next step, and
        whoever keeps logits copies them. C-contiguous arrays are read as they are, others are copied first.

        A row's values depend only on its own sequence's tokens: not on the other sequences, nor on how the
        sequence was cut into steps, nor on whether its prefix was computed or shared.
        """
        ...


@runtime_checkable
class HiddenStatesExecutable(Executable, Protocol):
    """An executable that can also say what its last linear layer, the head, reads: for embeddings."""

    hidden_size: int

    def hidden_states(self, batch: StepBatch) -> Float32Array:
        """Run one step up to the head and return what it would read, float32 `[R, hidden_size]`, after the final norm.

        There is a row per entry of `logit_rows`; all that `step` promises, and what it leaves in the state of the
        layers, holds here too.
        """
        ...


@runtime_checkable
class ClosableExecutable(Protocol):
    """An executable that holds more than memory of this process, such as other processes, or a device's memory."""

    def close(self) -> None:
        """Give it back; steps raise BackendError from now on. It is given back as well when nobody uses it any more."""
        ...


@runtime_checkable
class LosableExecutable(Protocol):
    """An executable that depends on what can be lost, such as other processes."""

    @property
    def failure(self) -> str | None:
        """Why every step raises BackendError from now on; None as long as steps run."""
        ...

    def abandon(self, reason: str) -> None:
        """Let go of it all, for a reason that becomes the failure: a step that waits for what does not come ends."""
        ...


@record(frozen=True)
class Draws:
    """How the next token of each of `R` rows of logits is chosen.

    temperature: float64 [R]  0 takes the largest logit, the first of equals
    top_k:       int32 [R]    of so many of the largest; 0: of all
    top_p:       float64 [R]  of the fewest that have this probability together
    min_p:       float64 [R]  of those with at least this part of the largest's probability
    uniform:     float64 [R]  the random number in [0, 1) that picks one
    """

    temperature: Float64Array
    top_k: Int32Array
    top_p: Float64Array
    min_p: Float64Array
    uniform: Float64Array


class PendingTokens(Protocol):
    """The tokens of a step that was launched and may still run."""

    def result(self) -> Int32Array:
        """Wait for the step and return a token for each of its rows, int32 `[R]`; -1 where logits are not finite.

        Raises BackendError when the step failed.
        """
        ...


@runtime_checkable
class SamplingExecutable(Executable, Protocol):
    """An executable that chooses tokens itself, and takes the next step before the last one is done."""

    def launch(
        self, batch: StepBatch, draws: Draws, previous: PendingTokens | None = None, rows: Int32Array | None = None
    ) -> PendingTokens:
        """Begin a step after all those begun before, and return at once what will have its tokens.

        With `previous`, what an earlier launch returned, `batch.token_ids` say nothing: token `i` is the one of row
        `rows[i]` of that step, which need not be known on the host yet. Raises BackendError.
        """
        ...


@runtime_checkable
class ProfiledExecutable(Protocol):
    """An executable that can say where its time goes."""

    def set_profiling(self, on: bool) -> None:
        """Measure every operation from the next step on, or stop doing so."""
        ...

    def profile_lines(self) -> Iterator[str]:
        """Yield a table of what was measured."""
        ...


@record(frozen=True)
class DeviceState:
    """A device's name, and bytes of its memory: those that nobody uses, and all."""

    name: str
    free: int
    total: int


@record(frozen=True)
class MemoryNeeds:
    """Bytes that a compiled bundle takes.

    weights:          as they are kept for the kernels
    state:            the pool of layer state
    step:             values of the largest step
    state_of_longest: the part of the pool that one sequence of `max_model_len` uses
    device:           the device whose memory it is; None for memory of the process
    """

    weights: int
    state: int
    step: int
    state_of_longest: int
    device: DeviceState | None = None


@runtime_checkable
class MemoryPlanner(Protocol):
    """A backend that can say what a bundle will take before it takes it."""

    def memory_needs(self, bundle: Path, options: BackendOptions) -> MemoryNeeds:
        """Return what `compile` with these options would take; raises what it would raise for the bundle."""
        ...


class Backend(Protocol):
    """A way to run bundles, chosen by name."""

    name: str

    def supports(self, bundle: Path) -> Sequence[str]:
        """Reasons why this backend cannot run `bundle` here; empty when it can."""
        ...

    def compile(self, bundle: Path, options: BackendOptions) -> Executable:
        """Load `bundle` and allocate its state pool. Raises BundleError or BackendError."""
        ...
