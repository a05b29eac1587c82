"""A bundle ready to execute steps on a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.formats.kv_cache import KVScales
from inferencex.runtime.backends.base import Draws, Float32Array, Int32Array, ModelFacts, PendingTokens, StepBatch
from inferencex.runtime.backends.graph.layer_shapes import LayerShape
from inferencex.runtime.backends.triton.decode_graphs import DecodeGraphs, Record
from inferencex.runtime.backends.triton.kernels.attention import rows_per_tile
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.kernels.sampling import sample
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums
from inferencex.runtime.backends.triton.lowering.program import Program
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.backends.triton.step_plan import StepBuffer, StepPlan, is_decode, plan_step


class LayerPool:
    """The pages of all layers."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        scales: Mapping[int, KVScales],
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
    ) -> None:
        self._layers, self._scales, self._dtype, self._device = layers, scales, dtype, device
        self.block_size = block_size
        self._pages: dict[int, KVPages] = {}

    def allocate(self, num_blocks: int) -> None:
        """Reserve pages of all layers, in place of those there were. Raises BackendError for want of memory."""
        self._pages.clear()
        for layer, shape in self._layers.items():
            self._pages[layer] = KVPages.allocate(
                num_blocks, self.block_size, shape.num_kv_heads, shape.key_width, shape.value_width,
                self._dtype, self._device, self._scales.get(layer),
            )  # fmt: skip

    def release(self) -> None:
        """Let go of all pages."""
        self._pages.clear()

    def __call__(self, layer: int) -> KVPages:
        """Return the pages of a layer."""
        return self._pages[layer]


@dataclass(frozen=True)
class DeviceTokens:
    """Tokens of a step that was launched, int32 [R], on the device and on their way to the host."""

    on_device: Tensor
    on_host: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, tokens: Tensor) -> DeviceTokens:
        """Begin to copy tokens to the host, in order with what runs on the current stream."""
        if tokens.device.type != "cuda":
            return cls(tokens, tokens, None)
        on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(tokens, on_host, copied)

    def result(self) -> Int32Array:
        """Wait for the tokens; see `PendingTokens`."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: Int32Array = self.on_host.numpy()
        return tokens


class TritonExecutable:
    """Executes a lowered graph; see `Executable`. Steps take turns when several threads call.

    hidden_size: only there when the graph ends in a head, which makes this a `HiddenStatesExecutable`
    """

    hidden_size: int

    def __init__(
        self,
        program: Program,
        pool: LayerPool,
        facts: ModelFacts,
        *,
        num_blocks: int,
        heads: Mapping[int, int],
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        sums: SplitSums,
        hidden_size: int | None = None,
    ) -> None:
        """`heads`: query heads by layer; `sums`: memory that decode attention uses. The pool has its pages already."""
        self.program, self.pool, self.facts, self.dtype = program, pool, facts, dtype
        self.num_blocks, self.block_size = num_blocks, pool.block_size
        self._device, self._max_model_len = device, max_model_len
        self._sums: SplitSums | None = sums
        self._limits = sums.limits
        self._tile_rows = min(
            (rows_per_tile(device, count, pool(layer), dtype) for layer, count in heads.items()), default=1
        )
        self._buffer: StepBuffer | None = None
        self._graphs: DecodeGraphs | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        if hidden_size is not None:
            self.hidden_size = hidden_size

    def record_decoding(self, record: Record, *, max_sequences: int, memory: int) -> None:
        """From now on record decode steps with what makes recordings, in at most `memory` bytes."""
        program, sums = self.program, self._sums  # and not this object, whose memory a cycle of references would keep
        if sums is None:
            raise BackendError("the model was closed; load the bundle again")
        self._graphs = DecodeGraphs(
            lambda inputs: _launch(program, inputs, program.logits),
            record,
            self._device,
            block_size=self.block_size,
            max_sequences=max_sequences,
            max_context=self._max_model_len,
            memory=memory,
            sums=sums,
        )

    def close(self) -> None:
        """Give the device's memory back; steps raise BackendError from now on."""
        with self._lock, on_device(self._device):
            self._is_closed, self._graphs, self._buffer, self._sums = True, None, None, None
            self.program = replace(self.program, instructions=(), ended=())
            self.pool.release()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def step(self, batch: StepBatch) -> Float32Array:
        """Run one step; see `Executable`. Raises BackendError for a batch that cannot be, and for want of memory."""
        return self._rows(batch, self.program.logits)

    def hidden_states(self, batch: StepBatch) -> Float32Array:
        """Run one step up to the head; see `HiddenStatesExecutable`."""
        if self.program.hidden is None:
            raise BackendError("this bundle's graph does not end in a linear layer, so it has no hidden states to give")
        return self._rows(batch, self.program.hidden)

    def logits(self, batch: StepBatch) -> Tensor:
        """Launch one step and return its logits on the device, `[R, vocab]`; they are valid until the next step."""
        with self._lock, on_device(self._device), torch.inference_mode():
            return self._run(batch, self.program.logits)[0]

    def launch(
        self, batch: StepBatch, draws: Draws, previous: PendingTokens | None = None, rows: Int32Array | None = None
    ) -> DeviceTokens:
        """Begin a step that chooses its tokens; see `SamplingExecutable`."""
        if previous is not None and not isinstance(previous, DeviceTokens):
            raise BackendError(f"a step follows one of this executable, not {type(previous).__name__}")
        with self._lock, on_device(self._device), torch.inference_mode():
            logits, inputs = self._run(batch, self.program.logits, draws=draws, previous=previous, rows=rows)
            count = len(batch.logit_rows)
            return DeviceTokens.of(
                sample(
                    logits,
                    inputs.temperature[:count],
                    inputs.top_k[:count],
                    inputs.top_p[:count],
                    inputs.min_p[:count],
                    inputs.uniform[:count],
                )
            )

    def _rows(self, batch: StepBatch, wanted: str) -> Float32Array:
        with self._lock, on_device(self._device), torch.inference_mode():
            rows = self._run(batch, wanted)[0].to(torch.float32).cpu().numpy()
        return np.ascontiguousarray(rows, dtype=np.float32)

    def _run(
        self,
        batch: StepBatch,
        wanted: str,
        *,
        draws: Draws | None = None,
        previous: DeviceTokens | None = None,
        rows: Int32Array | None = None,
    ) -> tuple[Tensor, StepInputs]:
        """Launch a step until the value `wanted` is there; returns its rows, and what the step was given."""
        self._check(batch)
        graphs, bucket = self._graphs, None
        if graphs is not None and wanted == self.program.logits and is_decode(batch) and self._is_one_launch(batch):
            bucket = graphs.bucket_of(len(batch.context_lengths), int(batch.context_lengths.max(initial=1)))
        plan = plan_step(
            batch, self.block_size, self._tile_rows, bucket, limits=self._limits, draws=draws, token_rows=rows
        )

        def prepare(inputs: StepInputs) -> None:
            if previous is not None:
                count = len(batch.token_ids)
                # A row that is not finite has the token -1: its sequence fails, and no table has such a row.
                tokens = previous.on_device.index_select(0, inputs.token_rows[:count]).clamp(min=0)
                inputs.token_ids[:count].copy_(tokens)

        with out_of_memory_in_words(f"a step of {len(batch.token_ids)} tokens"):
            if graphs is not None and bucket is not None:
                logits, inputs = graphs.run(bucket, plan, prepare)
                return logits[: len(batch.logit_rows)], inputs
            inputs = self._load(plan)
            prepare(inputs)
            return _launch(self.program, inputs, wanted), inputs

    def _is_one_launch(self, batch: StepBatch) -> bool:
        """Tell whether decode attention of a step needs one launch a layer, which is all that recordings have."""
        return self._limits.hold(int(batch.context_lengths.sum(dtype=np.int64)), len(batch.context_lengths))

    def _load(self, plan: StepPlan) -> StepInputs:
        if self._buffer is None or self._buffer.capacity < plan.shape.nbytes:
            self._buffer = StepBuffer(
                plan.shape, self._device, self._tile_rows, capacity=2 * plan.shape.nbytes, sums=self._sums
            )
        return self._buffer.load(plan)

    def _check(self, batch: StepBatch) -> None:
        """Raise BackendError for what would read or write outside of tables and pages."""
        if self._is_closed:
            raise BackendError("the model was closed; load the bundle again")
        longest = int(batch.context_lengths.max(initial=0))
        if longest > self._max_model_len:  # nor do tables of angles have more rows
            raise BackendError(f"a sequence of {longest} tokens is longer than max_model_len={self._max_model_len}")
        if longest > self.num_blocks * self.block_size:  # nor is there memory for the sums of its splits
            raise BackendError(
                f"a sequence of {longest} tokens is longer than a pool of {self.num_blocks} blocks of {self.block_size}"
            )
        tokens = batch.token_ids
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.facts.vocab_size):
            raise BackendError(
                f"token ids are {tokens.min()} to {tokens.max()}; the vocabulary is 0 to {self.facts.vocab_size - 1}"
            )
        needed = -(-batch.context_lengths // self.block_size)
        width = batch.block_tables.shape[1]
        if needed.max(initial=0) > width:
            raise BackendError(f"a sequence needs {needed.max()} blocks, and the block tables have {width} columns")
        used = np.arange(width)[None, :] < needed[:, None]
        blocks = batch.block_tables[used]
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < self.num_blocks):
            raise BackendError(
                f"block tables name blocks {blocks.min()} to {blocks.max()} of a pool of {self.num_blocks}"
            )


def _launch(program: Program, inputs: StepInputs, wanted: str) -> Tensor:
    values = {
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "prompt_lengths": inputs.prompt_lengths,
        "logit_rows": inputs.logit_rows,
    }
    return program.run(values, inputs, wanted)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one of this thread, which Triton launches kernels on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def out_of_memory_in_words(what: str) -> Iterator[None]:
    """Make a device's out-of-memory a BackendError that says what asked for it and what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"{what} did not fit on the device: {str(error).splitlines()[0]} Lower gpu_memory_utilization, "
            "max_num_batched_tokens or max_num_seqs"
        ) from error
