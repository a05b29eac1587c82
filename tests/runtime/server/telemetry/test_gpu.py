"""GPUs are read from where their drivers say it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from inferencex.runtime.server.telemetry.gpu import AmdGpus, GpuCollector, GpuReading, NoGpus, NvidiaGpus, find_gpus


def card(drm: Path, number: int, **files: str) -> None:
    folder = drm / f"card{number}" / "device"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_amd_gpus_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    card(tmp_path, 0, vendor="0x8086")
    card(tmp_path, 1, vendor="0x1002", mem_info_vram_used="12345", gpu_busy_percent="37")
    card(tmp_path, 2, vendor="0x1002", mem_info_vram_used="1")
    gpus = AmdGpus(tmp_path)
    assert gpus and gpus.read() == [GpuReading("0", 12345, 0.37)]
    assert not AmdGpus(tmp_path / "none")


class _NVMLError(Exception):
    pass


def nvml(failing: bool = False) -> SimpleNamespace:
    def init() -> None:
        if failing:
            raise _NVMLError("no driver")

    def utilization(handle: int) -> SimpleNamespace:
        if handle == 1:
            raise _NVMLError("not supported")
        return SimpleNamespace(gpu=80)

    return SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1 << 30),
        nvmlDeviceGetUtilizationRates=utilization,
    )


def test_nvidia_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert list(find_gpus().read()) == [GpuReading("0", 1 << 30, 0.8)]


def test_without_a_driver_or_its_package_there_are_no_nvidia_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(failing=True))
    assert NvidiaGpus.found() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvidiaGpus.found() is None


def test_readings_become_metrics() -> None:
    class Two:
        def read(self) -> list[GpuReading]:
            return [GpuReading("0", 10, 0.5), GpuReading("1", 20, 0.0)]

    registry = CollectorRegistry()
    registry.register(GpuCollector(Two()))
    assert registry.get_sample_value("inferencex_gpu_memory_used_bytes", {"gpu": "1"}) == 20
    assert registry.get_sample_value("inferencex_gpu_utilization", {"gpu": "1"}) == 0.0
    assert list(NoGpus().read()) == []
