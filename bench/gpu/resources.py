"""Compile every kernel for every chip, without one at hand, and say what registers and memory it takes.

`python -m bench.gpu.resources` writes docs/gpu-kernels.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from inferencex.runtime.backends.triton import kernels
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, KernelVariant, Target

PAGE = Path(__file__).parents[2] / "docs" / "gpu-kernels.md"

_CHIPS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10, "gfx1100": 64 << 10}
"""Bytes of shared memory (AMD: LDS) that one block may have."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    registers: of a thread (AMD: vector registers)
    shared:    bytes of shared memory of a block
    spilled:   bytes of a thread's registers that went to memory, its stack included
    """

    kernel: str
    target: Target
    registers: int
    shared: int
    spilled: int


def kernel_modules() -> list[str]:
    """Return the modules of kernels that have variants."""
    names = [f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    return [name for name in names if hasattr(importlib.import_module(name), "variants")]


def variants_of(module: str) -> list[KernelVariant]:
    """Return the variants of a module's kernels."""
    make: Callable[[], list[KernelVariant]] = importlib.import_module(module).variants
    return make()


def compiled(variant: KernelVariant, target: Target) -> Any:
    """Return what Triton compiles a variant for a chip to. Raises what its compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in variant.constants]
    if missing:
        raise ValueError(f"{variant.name}: {missing} have neither a type nor a value")
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(variant.kernel, signature, dict(variant.constants), divisible)
    return compile(
        source,
        target=GPUTarget(*_CHIPS[target]),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )


def compile_variant(variant: KernelVariant, target: Target) -> Resources:
    """Compile a variant for a chip. Raises what Triton's compiler does."""
    found = compiled(variant, target)
    shared = int(found.metadata.shared)
    if _CHIPS[target][0] == "hip":
        text = found.asm["amdgcn"]
        # Scratch is spilled registers and arrays that no registers could hold: both are to be avoided.
        return Resources(
            variant.name, target, _number(r"\.vgpr_count:\s+(\d+)", text), shared,
            4 * (_number(r"\.vgpr_spill_count:\s+(\d+)", text) + _number(r"\.sgpr_spill_count:\s+(\d+)", text))
            + _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        )  # fmt: skip
    usage = _resource_usage(found.asm["cubin"])
    return Resources(
        variant.name, target, _number(r"REG:(\d+)", usage), shared,
        _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
    )  # fmt: skip


def _resource_usage(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern!r}")
    return int(found[1])


def compile_module(module: str) -> list[Resources]:
    """Compile all variants of a module's kernels for the chips that they are launched on."""
    return [compile_variant(variant, target) for variant in variants_of(module) for target in variant.targets]


def page_lines(results: Sequence[Resources], versions: str) -> Iterator[str]:
    """Yield docs/gpu-kernels.md."""
    yield "# What the GPU kernels are compiled to"
    yield ""
    yield f"Command: `python -m bench.gpu.resources`, with {versions}; no GPU is needed. Each cell has the registers of"
    yield "a thread and the KiB of shared memory of a block, for the launch options used where nothing was tuned. A"
    yield "dash: the variant is not launched on that chip. No kernel spills registers to memory, which the test"
    yield "`tests/runtime/backends/triton/test_ahead_of_time.py` checks. [gpu.md](gpu.md) says what the kernels do."
    yield ""
    yield f"| kernel | {' | '.join(TARGETS)} |"
    yield f"|---|{'--:|' * len(TARGETS)}"
    for name, group in groupby(results, key=lambda one: one.kernel):
        by_target = {one.target: one for one in group}
        yield f"| {name} | {' | '.join(_cell(by_target.get(target)) for target in TARGETS)} |"


def _cell(found: Resources | None) -> str:
    if found is None:
        return "-"
    spilled = f", **{found.spilled} B spilled**" if found.spilled else ""
    return f"{found.registers}, {found.shared / 1024:.1f}{spilled}"


def _compiled(modules: Iterable[str], processes: int) -> list[Resources]:
    with ProcessPoolExecutor(processes) as pool:
        return [one for results in pool.map(compile_module, modules) for one in results]


def main() -> int:
    """Compile, write the page, and fail when anything spills or takes more memory than its chip has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    import triton

    results = _compiled(kernel_modules(), arguments.processes)
    arguments.output.write_text("\n".join(page_lines(results, f"Triton {triton.__version__}")) + "\n")
    bad = [one for one in results if one.spilled or one.shared > SHARED_LIMITS[one.target]]
    for one in bad:
        print(
            f"{one.kernel} on {one.target}: {one.spilled} bytes spilled, {one.shared} of shared memory", file=sys.stderr
        )
    print(f"{len(results)} compilations, {len(bad)} that spill or do not fit; wrote {arguments.output}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
