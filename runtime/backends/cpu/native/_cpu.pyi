"""Programs of the CPU backend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy import float32, int32
from numpy.typing import NDArray

Size = tuple[int, int]
"""A coefficient, and what it is multiplied with: 0 nothing, 1 the step's tokens, 2 its logit rows."""
AttributeValue = int | float | str | list[int]
_Int32 = NDArray[int32]

class BlueprintError(ValueError):
    """An operation was given operands or attributes that it cannot work with."""

class Operand:
    """Elements in the arena or in memory that outlives the program."""

class Region:
    """Memory of a program that outlives its steps."""

    bytes: int

class Program:
    """Operations in order, and the threads that execute them. `isa` None: the fastest kernels of the machine."""

    threads: int
    isa: str
    seconds: float
    memory_bytes: int
    scratch_bytes: int

    def __init__(self, threads: int, cpus: Sequence[int] = (), isa: str | None = None) -> None: ...
    def expect(
        self,
        bytes: int,
        sources: Sequence[NDArray[Any]],
        descriptors: Sequence[int] = (),
        most_mapped: int = 512 << 20,
    ) -> None:
        """Have the pages of `sources`, mapped files with the weights, and of `bytes` to repack them to, made ready.

        A thread does so until the first operation is added. When the weights are repacked, a thread gives back the
        pages of the sources, and what is free of the heap. What the sources have beyond `most_mapped` bytes is given
        back as soon as it is repacked. `descriptors` of the same files, or -1, are duplicated: rows of large tables are
        read from them. Raises BlueprintError for arrays that can be written to, and for more or fewer descriptors than
        files.
        """

    def constant(
        self, dtype: str, dims: Sequence[Size], strides: Sequence[Size], offset: int, array: NDArray[Any]
    ) -> Operand:
        """Return an operand in an array, from byte `offset` on; the program keeps the array."""

    def allocate(self, bytes: int) -> Region:
        """Reserve zeroed memory."""

    @staticmethod
    def region_operand(region: Region, offset: int = 0, bytes: int | None = None) -> Operand:
        """Return an operand that is a region, or `bytes` of it from `offset` on. Raises BlueprintError."""

    def add(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Operand | None],
        outputs: Sequence[Operand | None],
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """Append an operation. Raises BlueprintError."""

    def add_fallback(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Operand | None],
        outputs: Sequence[Operand | None],
        function: Callable[[Sequence[NDArray[Any] | None], Sequence[NDArray[Any] | None]], None],
    ) -> None:
        """Append a function that is called with the arrays of the step's inputs and outputs, and fills the latter."""

    def prepare(
        self,
        arena_bytes: int,
        max_tokens: int,
        inputs: Mapping[str, Operand],
        logits: Operand,
        num_blocks: int,
        block_size: int,
        hidden: Operand | None = None,
        hidden_operations: int = 0,
    ) -> None:
        """Allocate what steps need and repack the weights; nothing may be added any more.

        The first `hidden_operations` operations compute `hidden`, rows that a step may return instead of the logits.
        """

    def lend_processor(self) -> None:
        """Let the thread that calls `prepare` wait, so that another one has a processor for its work beside it."""

    def take_processor_back(self) -> None:
        """Let it wait no longer. To be called whatever became of the work."""

    def step(
        self,
        token_ids: _Int32,
        positions: _Int32,
        sequence_offsets: _Int32,
        context_lengths: _Int32,
        block_tables: _Int32,
        logit_rows: _Int32,
        prompt_lengths: _Int32,
        hidden: bool = False,
    ) -> NDArray[float32]:
        """Run a step and return a view of its logits, or of its hidden states, whose operations alone run then.

        Raises ValueError for a batch that contradicts itself.
        """

    def run(
        self,
        tokens: int = 1,
        rows: int = 1,
        positions: _Int32 | None = None,
        sequence_offsets: _Int32 | None = None,
        context_lengths: _Int32 | None = None,
        block_tables: _Int32 | None = None,
    ) -> None:
        """Run every operation once."""

    def set_profiling(self, on: bool) -> None:
        """Time every operation, or stop doing so."""

    def profile(self) -> list[tuple[str, str, int, float, float, float]]:
        """Return kind, name, calls, seconds, bytes and arithmetic operations of every operation."""

def operand(dtype: str, dims: Sequence[Size], strides: Sequence[Size], offset: int) -> Operand:
    """Return an operand in the arena, from byte `offset` on."""

def available_isas() -> list[str]:
    """Return the instruction sets whose kernels this machine runs, fastest first."""

def chosen_isa() -> str:
    """Return the one that is used. Raises ValueError when INFERENCEX_ISA names one that this machine lacks."""

def operation_kinds() -> list[str]:
    """Return the kinds of operations there are."""

def state_bytes(
    num_blocks: int, block_size: int, num_kv_heads: int, key_width: int, value_width: int, kv_dtype: str
) -> int:
    """Return the bytes of one layer's state. Raises BlueprintError."""

def block_layout(features: int, group: int, whole: bool = False) -> tuple[int, int]:
    """Return blocks and bytes of a row of quantized activations."""

def measure_integer_peak(threads: int) -> float:
    """Return the INT8 operations a second that this machine reaches at best."""

def measure_bandwidth(threads: int, bytes: int) -> float:
    """Return the bytes a second that this machine reads at best."""
