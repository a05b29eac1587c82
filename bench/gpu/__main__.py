"""Check the numbers of every kernel on this GPU, time each, then a whole model; print a short table.

Without a GPU, and with TRITON_INTERPRET=1, the same runs on tiny shapes in Triton's interpreter: then the times mean
nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.cases import EIGHT_BILLION, TINY, Case, Sizes, all_cases
from bench.gpu.limits import Limits, seconds
from bench.gpu.model import make_bundle, measure
from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.device_names import DeviceName
from inferencex.runtime.backends.triton.devices import Device, choose_device

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check(case: Case) -> float:
    """Return the largest difference of a kernel from its formula, as a part of the formula's largest magnitude."""
    expected = case.expected().to(torch.float32)
    found = case.run() if case.numbers is None else case.numbers(case.run())
    difference = (found.to(torch.float32) - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1e-30))


def kernels(console: Console, device: Device, sizes: Sizes, dtype: torch.dtype, limits: Limits) -> int:
    """Check and time all kernels; returns how many give wrong numbers."""
    on_gpu = device.kind != "interpreter"
    table = Table(title=f"Kernels on {device}, {str(dtype).removeprefix('torch.')}", title_justify="left")
    for column in ("kernel", "error", "time", "of the limit", "predicted (H200)"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    wrong = 0
    for case in all_cases(sizes, device.torch_device, dtype):
        error = check(case)
        is_right = error <= case.tolerance
        wrong += not is_right
        time = seconds(case.run, device.torch_device) if on_gpu else 0.0
        need = case.operations / limits.matmul if case.bound == "matmul" else case.nbytes / limits.bandwidth
        table.add_row(
            case.name,
            f"{error:.1e}" if is_right else f"[red]{error:.1e}, more than {case.tolerance:.0e}[/red]",
            f"{time * 1e6:.1f} us" if on_gpu else "-",
            f"{need / time:.0%} {case.bound}" if on_gpu else "-",
            "" if case.predicted is None else f">= {case.predicted:.0%}",
        )
    console.print(table)
    return wrong


def whole_model(
    console: Console,
    device: Device,
    dtype: torch.dtype,
    sizes: Sizes,
    layers: int,
    folder: Path,
    steps: int,
    limits: Limits,
) -> None:
    """Time decoding and reading prompts of a model of random weights."""
    on_gpu = device.kind != "interpreter"
    table = Table(title=f"Random model of {layers} layers, INT4 in groups of 64", title_justify="left")
    for column in ("step", "tokens/s", "ms a step", "of bandwidth"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for measured in measure(make_bundle(sizes, layers, folder), sizes, steps, device, dtype):
        share = measured.bytes_per_step * measured.steps_per_second / limits.bandwidth
        is_decode = measured.name.startswith("decode")
        table.add_row(
            measured.name,
            f"{measured.tokens_per_second:.0f}" if on_gpu else "-",
            f"{1e3 / measured.steps_per_second:.2f}" if on_gpu else "-",
            f"{share:.0%}" if on_gpu and is_decode else "-",
        )
    console.print(table)


def main() -> int:
    """Run; the exit status is 1 when a kernel gives wrong numbers."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cuda, rocm, or one by its number")
    parser.add_argument("--dtype", choices=_DTYPES, help="of activations (default: what the device prefers)")
    parser.add_argument("--layers", type=int, help="of the random model (32; 2 in the interpreter)")
    parser.add_argument("--steps", type=int, help="decoded in each measurement (64; 2 in the interpreter)")
    parser.add_argument("--folder", type=Path, help="where the random model is kept (default: it is not)")
    parser.add_argument("--no-model", action="store_true", help="only the kernels")
    arguments = parser.parse_args()
    console = Console()
    try:
        device = choose_device(DeviceName.parse(arguments.device))
    except BackendError as error:
        console.print(f"{error}\nWith TRITON_INTERPRET=1 tiny shapes run in the interpreter.", markup=False)
        return 2
    on_gpu = device.kind != "interpreter"
    if on_gpu:
        torch.cuda.set_device(device.torch_device)  # kernels are launched on the current device
    dtype = device.compute_dtype if arguments.dtype is None else _DTYPES[arguments.dtype]
    limits = Limits.measured(device.torch_device, dtype)
    sizes = EIGHT_BILLION if on_gpu else TINY
    if on_gpu:
        console.print(f"copies reach {limits.bandwidth / 1e12:.2f} TB/s, products {limits.matmul / 1e12:.0f} TFLOP/s")
    else:
        console.print("no GPU: tiny shapes in Triton's interpreter, whose times mean nothing")
    wrong = kernels(console, device, sizes, dtype, limits)
    if not arguments.no_model:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if arguments.folder is None else arguments.folder
            layers = arguments.layers or (32 if on_gpu else 2)
            steps = arguments.steps or (64 if on_gpu else 2)
            whole_model(console, device, dtype, sizes, layers, folder, steps, limits)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
