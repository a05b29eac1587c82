"""What this machine has for running bundles, and for each backend whether it can run here, and why not."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from inferencex.formats.errors import BackendError, InferenceXError
from inferencex.runtime.backends import backend_names, load_backend
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.cpu.threads import default_threads

_PACKAGES = {
    "numpy": "the runtime",
    "tokenizers": "the runtime",
    "torch": "inferencex[convert], [cuda] and [rocm]",
    "triton": "inferencex[cuda] and [rocm]",
    "transformers": "inferencex[convert]",
    "fastapi": "inferencex[serve]",
    "llguidance": "inferencex[serve]",
    "lm_eval": "inferencex[eval]",
}


@dataclass(frozen=True)
class Finding:
    """Something about this machine.

    what:   its name
    state:  what was found
    is_good: whether it is as it has to be; None for what only informs
    """

    what: str
    state: str
    is_good: bool | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All findings, by what they are about."""

    machine: list[Finding] = field(default_factory=list)
    drivers: list[Finding] = field(default_factory=list)
    devices: list[Finding] = field(default_factory=list)
    packages: list[Finding] = field(default_factory=list)
    backends: list[Finding] = field(default_factory=list)

    def sections(self) -> Iterator[tuple[str, list[Finding]]]:
        """Yield titles and their findings."""
        yield "Machine", self.machine
        yield "Drivers of GPUs", self.drivers
        yield "GPUs that torch can use", self.devices
        yield "Packages", self.packages
        yield "Backends, in the order that auto tries them", self.backends


def diagnose(bundle: Path | None = None, root: Path = Path("/")) -> Diagnosis:
    """Look at this machine, and whether each backend runs here (a bundle, if given). `root` has /proc and /sys."""
    return Diagnosis(
        machine=list(_machine(root)),
        drivers=list(_drivers(root)),
        devices=list(_devices()),
        packages=list(_packages()),
        backends=list(_backends(bundle)),
    )


def _machine(root: Path) -> Iterator[Finding]:
    yield Finding(
        "system", f"{platform.system()} {platform.release()}, {platform.machine()}, Python {sys.version.split()[0]}"
    )
    model = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    yield Finding("processor", model[1] if model else platform.processor() or platform.machine())
    yield Finding("kernels of the CPU", f"{', '.join(_cpu.available_isas())}; {_cpu.chosen_isa()} is used")
    yield Finding(
        "threads", f"{default_threads()} physical cores may be used by this process, of {os.cpu_count()} processors"
    )
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if total:
        yield Finding("memory", f"{int(total[1]) * 1024 / 1e9:.1f} GB")


def _drivers(root: Path) -> Iterator[Finding]:
    nvidia = re.search(r"Module\b.*?\s(\d+\.\d[\d.]*)", _text(root / "proc/driver/nvidia/version"))
    amd = _text(root / "sys/module/amdgpu/version").strip()
    if nvidia:
        yield Finding("NVIDIA", nvidia[1], True)
    elif (root / "dev/nvidiactl").exists() or (root / "dev/dxg").exists():
        yield Finding("NVIDIA", "a device is there, its driver does not say which version it is")
    else:
        yield Finding("NVIDIA", "none (no /proc/driver/nvidia/version)")
    if (root / "dev/kfd").exists():
        yield Finding("AMD", f"amdgpu {amd or 'of the kernel'}, with /dev/kfd", True)
    else:
        yield Finding(
            "AMD", "amdgpu is loaded, but there is no /dev/kfd, which ROCm needs" if amd else "none (no /dev/kfd)"
        )


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        yield Finding("none", "torch and triton are needed to use any; install inferencex[cuda] or inferencex[rocm]")
        return
    from inferencex.runtime.backends.device_names import DeviceName
    from inferencex.runtime.backends.triton.devices import find_devices, reason_for_none

    devices = find_devices()
    for device in devices:
        memory = f", {device.memory / 1e9:.1f} GB" if device.memory else ""
        types = str(device.compute_dtype).removeprefix("torch.")
        yield Finding(str(device), f"activations are {types} unless asked otherwise{memory}", True)
    if not devices:
        yield Finding("none", reason_for_none(DeviceName("auto")))


def _packages() -> Iterator[Finding]:
    yield Finding("inferencex", _version("inferencex") or "not installed as a package")
    for name, of in _PACKAGES.items():
        found = _version(name.replace("_", "-"))
        yield Finding(name, found or f"not installed; part of {of}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends(bundle: Path | None) -> Iterator[Finding]:
    for name in backend_names():
        try:
            reasons = load_backend(name).supports(Path() if bundle is None else bundle)
        except BackendError as error:
            yield Finding(name, f"no: {error}", False)
            continue
        except InferenceXError as error:
            yield Finding(name, f"the bundle cannot be read: {error}", False)
            continue
        yield Finding(name, f"no: {'; '.join(reasons)}" if reasons else "yes", not reasons)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
