"""How many threads to compute with, and on which processors: what this process may use, as Linux says it.

A core that runs two hardware threads is counted once, since both share its vector units. The processors that the
process is bound to and the CPU quotas of its control groups (a container's limit) are respected.

Sources: proc_pid_cgroup(5), proc_pid_mountinfo(5), sched_setaffinity(2); the kernel's documentation of `cpu.max`
(admin-guide/cgroup-v2), `cpu.cfs_quota_us` (scheduler/sched-bwc) and `core_cpus_list` (admin-guide/cputopology).
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from inferencex.formats.records import record

_CPU_FOLDER = "sys/devices/system/cpu"
_NODE_FOLDER = "sys/devices/system/node"
_CGROUP_FOLDER = "sys/fs/cgroup"
_SIBLING_FILES = ("core_cpus_list", "thread_siblings_list")  # the second is the name before Linux 5.3


@record(frozen=True)
class _Hierarchy:
    """A mounted hierarchy of control groups: `top` is the group that the folder `mount` shows."""

    mount: str
    top: str
    version: int


def default_threads(root: Path = Path("/"), affinity: Collection[int] | None = None) -> int:
    """Return how many threads to compute with: physical cores this process may use, at least 1.

    A quota of control groups is rounded down: with one thread more than it pays for, the kernel would stop threads in
    the middle of a step, and all others would wait for them. Without Linux's files: all processors.

    root:     where `/sys` and `/proc` are
    affinity: processors that the process may run on; None asks the system
    """
    allowed = _allowed(affinity)
    if allowed is None:
        return os.cpu_count() or 1
    cores = len({_siblings(root, cpu) for cpu in allowed})
    limit = _quota(root)
    return max(1, cores if limit is None else min(cores, math.floor(limit)))


def pin_order(threads: int, root: Path = Path("/"), affinity: Collection[int] | None = None) -> list[int]:
    """Return the processor to pin each of `threads` threads to; empty where the system has no such thing.

    Every physical core gets a thread before one gets a second; cores of a NUMA node follow each other, so that few
    threads share one node's memory and caches. With more threads than processors the order starts over.
    """
    allowed = _allowed(affinity)
    if allowed is None:
        return []
    nodes = _nodes(root)
    of_core: dict[frozenset[int], int] = {}
    order: list[tuple[int, int, int]] = []
    for cpu in sorted(allowed):
        core = _siblings(root, cpu)
        turn = of_core[core] = of_core.get(core, -1) + 1
        order.append((turn, nodes.get(cpu, 0), cpu))
    cpus = [cpu for _, _, cpu in sorted(order)]
    return [cpus[index % len(cpus)] for index in range(threads)]


def _allowed(affinity: Collection[int] | None) -> frozenset[int] | None:
    """Return the processors that this process may run on, or None where the system does not say."""
    if affinity is not None:
        return frozenset(affinity)
    if sys.platform != "linux":
        return None
    return frozenset(os.sched_getaffinity(0))


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """Return the processors of the physical core that `cpu` belongs to; itself alone where that is not known."""
    for name in _SIBLING_FILES:
        text = _read(root / _CPU_FOLDER / f"cpu{cpu}" / "topology" / name)
        if text is not None and cpu in (cpus := _cpu_list(text)):
            return frozenset(cpus)
    return frozenset((cpu,))


def _nodes(root: Path) -> dict[int, int]:
    """Return the NUMA node of each processor; empty where that is not known."""
    found: dict[int, int] = {}
    for folder in sorted((root / _NODE_FOLDER).glob("node[0-9]*")):
        number = folder.name.removeprefix("node")
        text = _read(folder / "cpulist")
        if number.isdecimal() and text is not None:
            found.update(dict.fromkeys(_cpu_list(text), int(number)))
    return found


def _cpu_list(text: str) -> list[int]:
    """Read a list of processors as the kernel writes it, such as `0-3,8,10-11`."""
    cpus: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _quota(root: Path) -> float | None:
    """Return the processors' worth of time that control groups leave this process, or None without a limit.

    A group is also bound by those that contain it, so that the least one on the way up counts.
    """
    groups = _read(root / "proc/self/cgroup")
    if groups is None:
        return None
    paths = {1: "", 2: ""}
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "cpu" in controllers.split(","):
            paths[1] = path
    limits = [
        limit
        for hierarchy in _hierarchies(root)
        if paths[hierarchy.version]
        for folder in _ancestry(root, hierarchy, paths[hierarchy.version])
        if (limit := _limit(folder, hierarchy.version)) is not None
    ]
    return min(limits, default=None)


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    """List the hierarchies that may limit processor time, from the mounts that the process sees."""
    mounts = _read(root / "proc/self/mountinfo")
    if mounts is None:
        yield _Hierarchy(_CGROUP_FOLDER, "/", 2)
        yield _Hierarchy(f"{_CGROUP_FOLDER}/cpu", "/", 1)
        return
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        place, kind = fields.split(" "), rest.split(" ")
        if len(place) < 5 or len(kind) < 3:
            continue
        top, mount = (_unescape(text) for text in place[3:5])
        if kind[0] == "cgroup2":
            yield _Hierarchy(mount, top, 2)
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            yield _Hierarchy(mount, top, 1)


def _ancestry(root: Path, hierarchy: _Hierarchy, group: str) -> Iterator[Path]:
    """List the folders of a group and of those that contain it, as far up as the mount shows them.

    A container may see its own group at the mount's top while the process's path is told from the host's: then the top
    is all there is to look at.
    """
    mount = root / hierarchy.mount.lstrip("/")
    path, top = PurePosixPath(group), PurePosixPath(hierarchy.top)
    inside = path.relative_to(top) if path.is_relative_to(top) else PurePosixPath()
    if ".." not in inside.parts:
        for below in (inside, *inside.parents):
            if below.parts:
                yield mount / below
    yield mount


def _limit(folder: Path, version: int) -> float | None:
    """Return the limit of one group in processors, or None when it has none."""
    if version == 2:
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    else:
        quota = _read(folder / "cpu.cfs_quota_us") or ""
        period = _read(folder / "cpu.cfs_period_us") or ""
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:  # "max", or -1, says without a limit
        return None
    return int(quota) / int(period)


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo, `\\040` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str | None:
    """Return the text of a small file of the kernel, or None where there is none to read: containers hide some."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
