"""Memory and load of GPUs, read when metrics are asked for: NVML for NVIDIA, the kernel's files for AMD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_AMD = "0x1002"  # PCI vendor


@dataclass(frozen=True)
class GpuReading:
    """One GPU: its number, bytes of its memory that anyone uses, and the part of the time it computes, 0 to 1."""

    gpu: str
    memory_used: int
    utilization: float


class GpuReader(Protocol):
    """A way to read GPUs."""

    def read(self) -> Sequence[GpuReading]:
        """Return how each GPU stands; empty where there is none."""
        ...


class NoGpus:
    """A machine without GPUs."""

    def read(self) -> Sequence[GpuReading]:
        """Return nothing: what is not there has no load, not a load of 0."""
        return ()


class NvidiaGpus:
    """GPUs that NVML knows. Raises ImportError without `nvidia-ml-py`, and `NVMLError` without a driver."""

    def __init__(self) -> None:
        self._nvml: Any = import_module("pynvml")
        self._nvml.nvmlInit()

    def read(self) -> Sequence[GpuReading]:
        """Ask the driver; a GPU that it says nothing of (a partition, say) is left out."""
        nvml, readings = self._nvml, []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                used = nvml.nvmlDeviceGetMemoryInfo(handle).used
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            except nvml.NVMLError:
                continue
            readings.append(GpuReading(str(index), int(used), busy))
        return readings

    @classmethod
    def found(cls) -> NvidiaGpus | None:
        """Return a reader, or None where there is no driver or no package to ask it with."""
        try:
            nvml: Any = import_module("pynvml")
        except ImportError:
            return None
        try:
            return cls()
        except nvml.NVMLError:
            return None


class AmdGpus:
    """GPUs that the `amdgpu` kernel driver knows, which says of them in files what rocm-smi shows."""

    def __init__(self, drm: Path = Path("/sys/class/drm")) -> None:
        cards = [card for card in drm.glob("card*/device") if _text(card / "vendor") == _AMD]
        self._cards = sorted(cards, key=lambda card: card.parent.name)

    def __bool__(self) -> bool:
        return bool(self._cards)

    def read(self) -> Sequence[GpuReading]:
        """Read the driver's files."""
        readings = []
        for index, card in enumerate(self._cards):
            used, busy = _text(card / "mem_info_vram_used"), _text(card / "gpu_busy_percent")
            if used.isdigit() and busy.isdigit():
                readings.append(GpuReading(str(index), int(used), int(busy) / 100))
        return readings


def find_gpus() -> GpuReader:
    """Return a reader of this machine's GPUs."""
    nvidia = NvidiaGpus.found()
    if nvidia is not None:
        return nvidia
    amd = AmdGpus()
    return amd if amd else NoGpus()


class GpuCollector(Collector):
    """Offers a reader's numbers as metrics. Without a GPU they have no samples."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values."""
        return _families(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as the GPUs stand now."""
        return _families(self._reader.read())


def _families(readings: Sequence[GpuReading]) -> Iterator[Metric]:
    memory = GaugeMetricFamily("inferencex_gpu_memory_used_bytes", "Memory of a GPU that is in use", labels=["gpu"])
    load = GaugeMetricFamily(
        "inferencex_gpu_utilization", "Part of the time that a GPU computes, 0 to 1", labels=["gpu"]
    )
    for reading in readings:
        memory.add_metric([reading.gpu], reading.memory_used)
        load.add_metric([reading.gpu], reading.utilization)
    yield memory
    yield load


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # no such card, or a driver that does not say
        return ""
