"""Programs and profiles as text: what `inferencex inspect --program` and `inferencex-run --profile` print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from inferencex.formats.records import record
from inferencex.runtime.backends.cpu.lowering import Instruction, LoweredProgram
from inferencex.runtime.backends.cpu.lowering.views import View
from inferencex.runtime.backends.cpu.native import _cpu

_HIDDEN_ATTRIBUTES = {"block_stride", "max_tokens", "max_seqs", "max_context", "num_blocks", "block_size"}
_HEADER = (
    f"{'operation':24} {'count':>5} {'calls':>7} {'seconds':>9} {'share':>6} {'us/call':>9} {'GB/s':>7} "
    f"{'Gop/s':>8} {'limit':>6}"
)
_BANDWIDTH_SAMPLE = 256 << 20  # bytes a thread reads: more than caches hold


def program_lines(lowered: LoweredProgram) -> Iterator[str]:
    """Yield a line for each operation, then what memory the values take.

    Operands are `%N` for the N-th value of the program, `weights` for constants, `state L` for a layer's keys and
    values; places in the arena are in bytes.
    """
    names: dict[int, str] = {}
    for name, view in lowered.inputs.items():
        names[id(view.storage)] = name
    for place, instruction in enumerate(lowered.instructions):
        for output in instruction.outputs:
            if output is not None:
                names.setdefault(id(output.storage), f"%{len(names)}")
        results = ", ".join(_operand(view, names, lowered) for view in instruction.outputs if view is not None)
        operands = ", ".join("-" if view is None else _operand(view, names, None) for view in instruction.inputs)
        yield f"{place:4} {results or '()'} = {_kind(instruction)}({operands}){_attributes(instruction)}"
    arena, saved = lowered.memory.arena_bytes / 1e6, lowered.memory.saved_bytes / 1e6
    yield (
        f"{len(lowered.instructions)} operations; values take {arena:.1f} MB in a step of the largest size, "
        f"{saved:.1f} MB less than side by side"
    )


def _kind(instruction: Instruction) -> str:
    return f"onnx.reference {instruction.attributes['operator']}" if instruction.fallback else instruction.kind


def _attributes(instruction: Instruction) -> str:
    shown = {key: value for key, value in instruction.attributes.items() if key not in _HIDDEN_ATTRIBUTES}
    shown.pop("operator", None)
    text = ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown.items()
    )
    return f" {{{text}}}" if text else ""


def _operand(view: View, names: dict[int, str], lowered: LoweredProgram | None) -> str:
    shape = f"{view.dtype}[{','.join(map(str, view.dims))}]"
    if view.storage.layer is not None:
        return f"state {view.storage.layer}"
    if view.storage.array is not None:
        return f"weights {shape}"
    place = f"@{lowered.memory.offsets[view.storage]}" if lowered is not None else ""
    offset = f"+{view.offset}" if view.offset else ""
    return f"{names[id(view.storage)]}{offset} {shape}{place}"


@record(frozen=True)
class OperationProfile:
    """What one operation of a program did, in all steps since profiling was switched on.

    kind, name:  what it is, and the value of the graph that it computes
    calls:       steps
    seconds:     from barrier to barrier
    bytes:       moved to and from memory, as far as the operation knows
    operations:  multiplications and additions
    """

    kind: str
    name: str
    calls: int
    seconds: float
    bytes: float
    operations: float


@record(frozen=True)
class MachineLimits:
    """What the machine does at best: INT8 operations and bytes read from memory, a second, with all threads."""

    integer_operations: float
    bytes: float

    @classmethod
    def measured(cls, threads: int) -> MachineLimits:
        """Measure them; takes about half a second."""
        return cls(_cpu.measure_integer_peak(threads), _cpu.measure_bandwidth(threads, _BANDWIDTH_SAMPLE))


def profile_lines(profile: Sequence[OperationProfile], limits: MachineLimits) -> Iterator[str]:
    """Yield a table of operations by kind, those that take longest first.

    `limit` is the share of its time that an operation would need at least: for its bytes at the measured bandwidth
    or for its operations at the measured INT8 peak, whichever takes longer. Caches make more than 100 % possible.
    """
    kinds: dict[str, list[OperationProfile]] = defaultdict(list)
    for operation in profile:
        kinds[operation.kind].append(operation)
    total = sum(operation.seconds for operation in profile)
    yield _HEADER
    for kind, operations in sorted(kinds.items(), key=lambda item: -sum(op.seconds for op in item[1])):
        yield _row(kind, operations, total, limits)
    yield _row("all", profile, total, limits)
    peak, bandwidth = limits.integer_operations / 1e9, limits.bytes / 1e9
    yield f"limits of this machine: {bandwidth:.1f} GB/s read, {peak:.0f} Gop/s of INT8"


def _row(name: str, operations: Sequence[OperationProfile], total: float, limits: MachineLimits) -> str:
    seconds = sum(op.seconds for op in operations)
    calls = sum(op.calls for op in operations)
    moved, arithmetic = sum(op.bytes for op in operations), sum(op.operations for op in operations)
    least = max(moved / limits.bytes, arithmetic / limits.integer_operations)
    per = 1 / seconds if seconds else 0.0
    share = seconds / total if total else 0.0
    return (
        f"{name:24} {len(operations):5} {calls:7} {seconds:9.4f} {share:6.1%} {1e6 * seconds / max(calls, 1):9.2f} "
        f"{moved * per / 1e9:7.1f} {arithmetic * per / 1e9:8.1f} {least * per:6.0%}"
    )
