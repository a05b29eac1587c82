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

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BackendError, InferenceXError
from inferencex.runtime.backends import automatic_backends, backend_names, load_backend
from inferencex.runtime.backends.device_names import HIDING, DeviceName

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
    yield from _kernels()
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if total:
        yield Finding("memory", f"{int(total[1]) * 1024 / 1e9:.1f} GB")


def _kernels() -> Iterator[Finding]:
    try:
        from inferencex.runtime.backends.cpu.native import _cpu
        from inferencex.runtime.backends.cpu.threads import default_threads
    except ImportError as error:  # a machine whose kernels do not load is one that this is asked about
        yield Finding("kernels of the CPU", f"cannot be loaded: {error}; install inferencex anew", False)
        return
    yield Finding("kernels of the CPU", f"{', '.join(_cpu.available_isas())}; {_cpu.chosen_isa()} is used")
    yield Finding(
        "threads", f"{default_threads()} physical cores may be used by this process, of {os.cpu_count()} processors"
    )


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
    for name in (*HIDING, "TRITON_INTERPRET"):
        if name in os.environ:
            yield Finding(name, repr(os.environ[name]))


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        yield Finding("none", "torch and triton are needed to use any; install inferencex[cuda] or inferencex[rocm]")
        return
    try:
        from inferencex.runtime.backends.triton.devices import find_devices, reason_for_none
    except (ImportError, OSError) as error:
        yield Finding(
            "none", f"torch and triton are there and cannot be loaded: {type(error).__name__}: {error}", False
        )
        return
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
        found = _version(name.replace("_", "-")) or (_version("triton-rocm") if name == "triton" else None)
        yield Finding(name, found or f"not installed; part of {of}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends(bundle: Path | None) -> Iterator[Finding]:
    unreadable = None if bundle is None else _why_unreadable(bundle)
    for name in backend_names():
        try:
            reasons = load_backend(name).supports(Path() if bundle is None else bundle)
        except (BackendError, ImportError) as error:
            yield Finding(name, f"no: {error}", False)
            continue
        if unreadable is not None:
            reasons = [*reasons, f"the bundle cannot be read: {unreadable}"]
        runs = "yes" if name in automatic_backends() else f"yes, where --backend {name} asks for it"
        yield Finding(name, f"no: {'; '.join(reasons)}" if reasons else runs, not reasons)


def _why_unreadable(bundle: Path) -> str | None:
    try:
        Bundle.open(bundle)
    except InferenceXError as error:
        return str(error)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
