"""What kernels want to know of the device that they are launched on."""

from __future__ import annotations

import functools

import torch

from inferencex.runtime.backends.triton.kernels.variant import Target


@functools.cache
def device_target(device: torch.device) -> Target | None:
    """Return the chip among `TARGETS` whose launch options suit a device; None for the interpreter."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return "gfx942" if properties.gcnArchName.startswith("gfx9") else "gfx1100"
    return "sm_90" if properties.major == 9 else "sm_80"


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; the interpreter's is small, so that tests see few splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Tell whether a device has dots of E4M3 as bundles store it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def is_nvidia(target: Target) -> bool:
    """Tell whether a chip is NVIDIA's: it copies to shared memory on the side, and has more of that than AMD's."""
    return target.startswith("sm")
