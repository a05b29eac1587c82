"""A bundle ready to execute steps in the native module."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.mapped_file import MappedFile
from inferencex.formats.errors import BackendError
from inferencex.runtime.aside import Aside
from inferencex.runtime.backends.base import Float32Array, ModelFacts, StepBatch
from inferencex.runtime.backends.cpu.lowering import LoweredProgram, LoweringOptions
from inferencex.runtime.backends.cpu.lowering.views import ITEM_SIZES, Storage, View
from inferencex.runtime.backends.cpu.memory_limits import machine_memory
from inferencex.runtime.backends.cpu.native import _cpu

if TYPE_CHECKING:
    from inferencex.runtime.backends.cpu.listing import OperationProfile


class CpuExecutable:
    """Executes a lowered graph; see `Executable`. Steps take turns when several threads call.

    program:     from `begin_program`
    hidden_size: only there when the graph ends in a head, which makes this a `HiddenStatesExecutable`
    """

    hidden_size: int

    def __init__(
        self,
        program: _cpu.Program,
        lowered: LoweredProgram,
        options: LoweringOptions,
        facts: ModelFacts,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self.facts = facts
        self.num_blocks, self.block_size = options.num_blocks, options.block_size
        self.lowered, self.options = lowered, options
        self._process = os.getpid()
        self._lock = threading.Lock()
        if lowered.hidden is not None:
            self.hidden_size = lowered.hidden.view.dims[1].coefficient
        self._program = program
        _build(program, lowered, options, meanwhile)

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return int(self._program.threads)

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run."""
        return str(self._program.isa)

    @property
    def native_seconds(self) -> float:
        """Time spent inside native steps so far."""
        return float(self._program.seconds)

    def step(self, batch: StepBatch) -> Float32Array:
        """Run one step; the logits are valid until the next one. Raises BackendError for a batch that cannot be."""
        return self._run(batch, hidden=False)

    def hidden_states(self, batch: StepBatch) -> Float32Array:
        """Run one step up to the head; see `HiddenStatesExecutable`. The result is valid until the next step."""
        if self.lowered.hidden is None:
            raise BackendError("this bundle's graph does not end in a linear layer, so it has no hidden states to give")
        return self._run(batch, hidden=True)

    def _run(self, batch: StepBatch, *, hidden: bool) -> Float32Array:
        if os.getpid() != self._process:
            raise BackendError("a program's threads do not survive a fork; load the bundle in the process that runs it")
        longest = int(batch.context_lengths.max(initial=0))
        if longest > self.options.max_model_len:  # nor do tables of angles have more rows
            raise BackendError(
                f"a sequence of {longest} tokens is longer than max_model_len={self.options.max_model_len}"
            )
        with self._lock:
            try:
                rows: Float32Array = self._program.step(
                    np.ascontiguousarray(batch.token_ids, np.int32),
                    np.ascontiguousarray(batch.positions, np.int32),
                    np.ascontiguousarray(batch.sequence_offsets, np.int32),
                    np.ascontiguousarray(batch.context_lengths, np.int32),
                    np.ascontiguousarray(batch.block_tables, np.int32),
                    np.ascontiguousarray(batch.logit_rows, np.int32),
                    np.ascontiguousarray(batch.prompt_lengths, np.int32),
                    hidden,
                )
            except ValueError as error:
                raise BackendError(str(error)) from error
            return rows

    def set_profiling(self, on: bool) -> None:
        """Measure every operation from the next step on, or stop doing so."""
        self._program.set_profiling(on)

    def profile(self) -> list[OperationProfile]:
        """Return what was measured, in the order of the program."""
        from inferencex.runtime.backends.cpu.listing import OperationProfile  # here, for few programs are measured

        return [OperationProfile(*row) for row in self._program.profile()]

    def profile_lines(self) -> Iterator[str]:
        """Yield a table of what was measured, beside the machine's limits, which takes a moment to measure."""
        from inferencex.runtime.backends.cpu.listing import MachineLimits, profile_lines

        return profile_lines(self.profile(), MachineLimits.measured(self.threads))


def begin_program(threads: int, cpus: list[int], bundle: Bundle | None = None) -> _cpu.Program:
    """Return a program without operations, and have memory made ready for those that an open bundle will become.

    To give a process zeroed memory, and to map files into it, takes as long as lowering a graph does, and needs no
    interpreter. Raises BackendError where there are no threads or no memory.
    """
    with _in_words(threads):
        program = _cpu.Program(threads, cpus)
        if bundle is not None:
            # A part of the machine's memory at the most: what is asked for may still turn out to be too much for it.
            expected = min(sum(stored.nbytes for stored in bundle.stored.values()), machine_memory() // 8)
            _expect(program, expected, bundle.mapped_files())
    return program


def _expect(program: _cpu.Program, nbytes: int, files: Sequence[MappedFile]) -> None:
    """Tell a program of the files with its weights; it keeps them open to read rows of large tables from them."""
    descriptors: list[int | None] = []
    try:
        descriptors.extend(file.open() for file in files)
        opened = [-1 if descriptor is None else descriptor for descriptor in descriptors]
        program.expect(nbytes, [file.data for file in files], opened)
    finally:
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)


def _build(
    program: _cpu.Program,
    lowered: LoweredProgram,
    options: LoweringOptions,
    meanwhile: Callable[[], object] | None,
) -> None:
    threads = int(program.threads)
    with _in_words(threads):
        builder = _Builder(program, lowered, options)
        for instruction in lowered.instructions:
            inputs = [None if view is None else builder.operand(view) for view in instruction.inputs]
            outputs = [None if view is None else builder.operand(view) for view in instruction.outputs]
            if instruction.fallback is not None:
                program.add_fallback(
                    str(instruction.attributes["operator"]), instruction.name, inputs, outputs, instruction.fallback
                )
            else:
                program.add(instruction.kind, instruction.name, inputs, outputs, dict(instruction.attributes))
        places = {name: builder.operand(view) for name, view in lowered.inputs.items()}
        logits, arena_bytes = builder.operand(lowered.logits), lowered.memory.arena_bytes
        hidden = None if lowered.hidden is None else builder.operand(lowered.hidden.view)
        hidden_operations = 0 if lowered.hidden is None else lowered.hidden.instructions

        def prepare() -> None:
            """Repack the weights; this is native code, which needs no interpreter."""
            program.prepare(
                arena_bytes,
                options.max_tokens,
                places,
                logits,
                options.num_blocks,
                options.block_size,
                hidden,
                hidden_operations,
            )

        if meanwhile is None:
            prepare()
            return
        program.lend_processor()
        preparing = Aside(prepare)
    try:
        meanwhile()
    finally:  # native code must not be left alone with an interpreter that ends, whenever the interrupt comes
        try:
            program.take_processor_back()
        finally:
            preparing.wait()
    with _in_words(threads):
        preparing.result()


@contextmanager
def _in_words(threads: int) -> Iterator[None]:
    """Make what the native module raises a BackendError."""
    try:
        yield
    except ValueError as error:  # BlueprintError is one, and so is an unknown INFERENCEX_ISA
        raise BackendError(str(error)) from error
    except (TypeError, OverflowError) as error:  # a number beyond 64 bits
        raise BackendError(f"a size or attribute of an operation is out of range: {str(error)[:300]}") from error
    except RuntimeError as error:
        raise BackendError(f"{threads} threads cannot be started here: {error}; ask for fewer with threads") from error
    except MemoryError as error:
        raise BackendError("not enough memory for the weights, the KV cache and the values of a step") from error


class _Builder:
    """Turns views into operands of the native module, each constant and state once."""

    def __init__(
        self,
        program: _cpu.Program,
        lowered: LoweredProgram,
        options: LoweringOptions,
    ) -> None:
        self._program, self._offsets = program, lowered.memory.offsets
        self._state = lowered.state
        self._pool = program.allocate(lowered.state.nbytes(options.num_blocks))

    def operand(self, view: View) -> _cpu.Operand:
        """Return the operand of a view."""
        storage: Storage = view.storage
        if storage.layer is not None:
            return _cpu.Program.region_operand(self._pool, self._state.offsets[storage.layer])
        offset = view.offset * ITEM_SIZES[view.dtype]
        if storage.array is not None:
            return self._program.constant(view.dtype, view.dims, view.strides, offset, storage.array)
        return _cpu.operand(view.dtype, view.dims, view.strides, self._offsets[storage] + offset)
