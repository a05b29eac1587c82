"""The file of tuned configurations between processes, and where there is no home for it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferencex.runtime.backends.triton.tuning.cache import TuningCache, cache_path
from inferencex.runtime.backends.triton.tuning.config import Config

_PUTS = """
import sys
from pathlib import Path
from inferencex.runtime.backends.triton.tuning.cache import TuningCache
from inferencex.runtime.backends.triton.tuning.config import Config
cache = TuningCache.read("device", Path(sys.argv[1]))
print("read", flush=True)
sys.stdin.readline()
for number in range(40):
    cache.put("kernel", f"{sys.argv[2]} {number}", Config.of(4, 2, BLOCK=32))
"""


def test_processes_that_tune_at_once_keep_what_each_has_found(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PUTS, str(path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("one", "two", "three")
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "read\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert len(TuningCache.read("device", path).configurations) == 120


def test_what_is_locked_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS, where homes of clusters are, locks nothing else."""
    modes = []
    lock = fcntl.flock

    def observed(file: int, operation: int) -> None:
        modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", observed)
    TuningCache("device", tmp_path / "device.json").put("kernel", "shape", Config.of(BLOCK=32))
    assert modes == [os.O_RDWR]


def test_what_was_measured_is_kept_where_nothing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "device.json"
    TuningCache("device", path).put("kernel", "shape", Config.of(BLOCK=32))
    assert TuningCache.read("device", path).get("kernel", "shape") == Config.of(BLOCK=32)
    assert "nothing locks it" in caplog.text


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as numbers that no user has, and kernels ask for configurations at every launch."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert f"cache-{os.getuid()}" in cache_path("device").parts
