"""The devices that kernels can run on here, and what each can do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends.device_names import HIDING, DeviceName, kernels_are_interpreted

_OLDEST_COMPUTE_CAPABILITY = (7, 5)  # that Triton compiles for
_BFLOAT16_COMPUTE_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Device:
    """Where a bundle runs.

    kind:          cuda, rocm, or interpreter: Triton's, on the CPU, for tests
    index:         its number, as torch counts
    name:          what its maker calls it
    architecture:  sm_90, gfx942, ...
    memory:        bytes
    """

    kind: Literal["cuda", "rocm", "interpreter"]
    index: int
    name: str
    architecture: str
    memory: int

    @property
    def torch_device(self) -> torch.device:
        """The device in torch's words, which calls AMD's cuda as well."""
        return torch.device("cpu") if self.kind == "interpreter" else torch.device("cuda", self.index)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of activations where nobody asks for one: that of the matrix units with the widest range."""
        if self.kind == "interpreter":
            return torch.float32
        if self.kind == "cuda" and _capability(self.index) < _BFLOAT16_COMPUTE_CAPABILITY:
            return torch.float16
        return torch.bfloat16

    def __str__(self) -> str:
        return (
            self.name if self.kind == "interpreter" else f"{self.kind}:{self.index} {self.name} ({self.architecture})"
        )


def find_devices() -> list[Device]:
    """Return the GPUs that this torch can use; the interpreter instead, where the environment asks for it.

    A driver that does not work is none; `reason_for_none` says what it says.
    """
    if kernels_are_interpreted():
        return [Device("interpreter", 0, "Triton's interpreter", "interpreter", 0)]
    if not torch.cuda.is_available() or _driver_error() is not None:
        return []
    return [device for index in range(torch.cuda.device_count()) if (device := _gpu(index)) is not None]


def choose_device(asked: DeviceName) -> Device:
    """Return the device that a name means, the first of its kind if it has no index.

    Raises OptionError for the CPU where kernels are not interpreted, BackendError where there is no such device.
    """
    found = find_devices()
    fitting = _fitting(found, asked)
    if fitting:
        return fitting[0]
    if asked.kind == "cpu":
        raise OptionError(f"device={str(asked)!r}: kernels of this backend run on GPUs; give auto, cuda or rocm")
    there = ", ".join(map(str, found)) or "none"
    what = "GPU" if asked.kind == "auto" else f"device {asked}"
    raise BackendError(f"no {what} is usable here; found: {there}. {reason_for_none(asked)}")


def devices_of_ranks(asked: DeviceName, size: int) -> list[Device]:
    """Return a device for each of the processes that run a model together: the first ones of the kind.

    The interpreter serves them all. Raises OptionError for a single device by its number, BackendError for too few.
    """
    if asked.index is not None:
        raise OptionError(
            f"device={str(asked)!r} is one GPU, and tensor_parallel_size={size} takes one for each rank, from number 0 "
            f"on; give device {asked.kind}, and choose GPUs by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES"
        )
    first = choose_device(asked)
    if first.kind == "interpreter":
        return [first] * size
    fitting = _fitting(find_devices(), asked)
    if len(fitting) < size:
        raise BackendError(
            f"tensor_parallel_size={size} takes {size} GPUs, one for each rank, and {len(fitting)} can be used here: "
            f"{', '.join(map(str, fitting))}; lower tensor_parallel_size to {len(fitting)}"
        )
    return fitting[:size]


def _fitting(found: list[Device], asked: DeviceName) -> list[Device]:
    return [
        device
        for device in found
        if (device.kind == "interpreter" and not asked.is_gpu)
        or ((device.kind == asked.kind or asked.kind == "auto") and asked.index in (None, device.index))
    ]


def reason_for_none(asked: DeviceName) -> str:
    """Say what stands in the way of using a GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"This torch ({torch.__version__}) is built for the CPU alone, and pip keeps it; uninstall it, and install "
            "inferencex[cuda] or inferencex[rocm] with the build of torch that fits the driver (docs/gpu.md)"
        )
    built_for = "rocm" if torch.version.hip is not None else "cuda"
    if asked.is_gpu and asked.kind != built_for:
        return f"This torch ({torch.__version__}) is built for {built_for}; {asked.kind} needs another build"
    error = _driver_error()
    if error is not None:
        hidden = ", ".join(f"{name}={os.environ[name]!r}" for name in HIDING if name in os.environ)
        text = f"torch {torch.__version__} cannot use a GPU: {error}"
        return f"{text} ({hidden} chooses which there are)" if hidden else text
    count = torch.cuda.device_count()
    lacking = [_too_old(index) for index in range(count) if _gpu(index) is None]
    return "; ".join(lacking) or f"torch counts {count}, from 0 on"


def _driver_error() -> str | None:
    """Begin to use the driver, and return what it has against that; None for nothing."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return next((line for line in str(error).splitlines() if line), type(error).__name__)
    return None


def _gpu(index: int) -> Device | None:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        architecture = properties.gcnArchName.split(":")[0]
        return Device("rocm", index, properties.name, architecture, properties.total_memory)
    if _capability(index) < _OLDEST_COMPUTE_CAPABILITY:
        return None
    architecture = f"sm_{properties.major}{properties.minor}"
    return Device("cuda", index, properties.name, architecture, properties.total_memory)


def _too_old(index: int) -> str:
    found, oldest = (".".join(map(str, version)) for version in (_capability(index), _OLDEST_COMPUTE_CAPABILITY))
    return (
        f"cuda:{index} {torch.cuda.get_device_properties(index).name} has compute capability {found}, and kernels need "
        f"{oldest}"
    )


def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
