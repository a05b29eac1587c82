"""How much memory this process may still take: what the machine has, less where a container has a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferencex.runtime.backends.cpu.memory_limits import machine_memory

_UNLIMITED = 1 << 60  # version 1 of control groups writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that can still be taken, what there is in all, and who sets that limit."""

    available: int
    total: int
    limit: str


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """Return the tightest of the machine's memory and the limits of the control groups that the process is in.

    Pages of files that nobody writes to count as available: the kernel drops them when it needs room. `root` is where
    /proc and /sys are.
    """
    found = [_of_machine(root / "proc/meminfo")]
    found += _of_groups_v2(root) or _of_groups_v1(root)
    return min(found, key=lambda memory: memory.available)


def _of_machine(meminfo: Path) -> AvailableMemory:
    lines = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    total = _kilobytes(lines.get("MemTotal"))
    if total is None:  # not Linux
        total = machine_memory()
    available = _kilobytes(lines.get("MemAvailable"))
    return AvailableMemory(total if available is None else available, total, "the machine's memory")


def _of_groups_v2(root: Path) -> list[AvailableMemory]:
    mount = root / "sys/fs/cgroup"
    group = next((line[3:] for line in _own_groups(root) if line.startswith("0::")), None)
    if group is None:
        return []
    found = []
    for folder in _upwards(mount, group):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            held = used - _statistic(folder / "memory.stat", "inactive_file")
            found.append(AvailableMemory(max(limit - held, 0), limit, f"the limit of {folder / 'memory.max'}"))
    return found


def _of_groups_v1(root: Path) -> list[AvailableMemory]:
    mount = root / "sys/fs/cgroup/memory"
    lines = (line.split(":", 2) for line in _own_groups(root))
    group = next((parts[2] for parts in lines if len(parts) == 3 and "memory" in parts[1].split(",")), None)
    if group is None:
        return []
    found = []
    for folder in _upwards(mount, group):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            held = used - _statistic(folder / "memory.stat", "total_inactive_file")
            path = folder / "memory.limit_in_bytes"
            found.append(AvailableMemory(max(limit - held, 0), limit, f"the limit of {path}"))
    return found


def _own_groups(root: Path) -> list[str]:
    return _read(root / "proc/self/cgroup").splitlines()


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of a group and of those around it. In a container only the mount itself may be there."""
    folder = mount / group.strip("/")
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount


def _kilobytes(text: str | None) -> int | None:
    """Return the bytes of a value such as ` 123 kB`."""
    if text is None or not text.split() or not text.split()[0].isdigit():
        return None
    return int(text.split()[0]) * 1024


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max`, and where there is no such file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        parts = line.split()
        if len(parts) == 2 and parts[0] == name and parts[1].isdigit():
            return int(parts[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or a file that this process may not see: then it says nothing
        return ""
