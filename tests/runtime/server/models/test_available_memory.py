"""The tightest limit counts, wherever it is written down."""

from __future__ import annotations

from pathlib import Path

from inferencex.runtime.server.models.available_memory import available_memory

GIB = 1 << 30


def system(root: Path, available: int, group: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {available // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(group)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_this_machine_has_memory() -> None:
    memory = available_memory()
    assert 0 < memory.available <= memory.total


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    system(tmp_path, 8 * GIB, "0::/\n")
    memory = available_memory(tmp_path)
    assert (memory.available, memory.total) == (8 * GIB, 64 * GIB) and "machine" in memory.limit


def test_the_group_or_one_around_it_decides(tmp_path: Path) -> None:
    system(tmp_path, 32 * GIB, "0::/pod/container\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "pod", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"inactive_file {GIB}")
    write(groups / "pod/container", memory__max="max", memory__current=GIB, memory__stat="anon 5")
    memory = available_memory(tmp_path)
    assert (memory.available, memory.total) == (2 * GIB, 4 * GIB)
    assert memory.limit.endswith("pod/memory.max")
    write(groups / "pod/container", memory__max=2 * GIB, memory__current=GIB)
    assert available_memory(tmp_path).available == GIB


def test_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    system(tmp_path, 32 * GIB, "0::/host/name/of/it\n")
    write(tmp_path / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert available_memory(tmp_path).available == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    system(tmp_path, 32 * GIB, "12:cpu,cpuacct:/x\n7:memory:/docker/abc\n0::/system\n")
    groups = tmp_path / "sys/fs/cgroup/memory"
    write(groups, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert "machine" in available_memory(tmp_path).limit
    write(
        groups / "docker/abc",
        memory__limit_in_bytes=6 * GIB,
        memory__usage_in_bytes=5 * GIB,
        memory__stat=f"cache 1\ntotal_inactive_file {2 * GIB}",
    )
    memory = available_memory(tmp_path)
    assert (memory.available, memory.total) == (3 * GIB, 6 * GIB)
