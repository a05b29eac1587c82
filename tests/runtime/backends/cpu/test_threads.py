"""The choice of threads, on machines that are made of files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from inferencex.runtime.backends.cpu import threads
from inferencex.runtime.backends.cpu.threads import default_threads, pin_order

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "33 25 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def add_cores(root: Path, cores: list[list[int]], name: str = "core_cpus_list") -> None:
    for core in cores:
        for cpu in core:
            listed = ",".join(map(str, core))
            write(root, {f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": listed})


def add_nodes(root: Path, *lists: str) -> None:
    write(root, {f"sys/devices/system/node/node{index}/cpulist": text for index, text in enumerate(lists)})


def add_groups(root: Path, cgroup: str, mountinfo: str | None, files: dict[str, str]) -> None:
    write(root, {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    if mountinfo is not None:
        write(root, {"proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mountinfo}"})


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_a_core_count_once(tmp_path: Path, name: str) -> None:
    add_cores(tmp_path, [[0, 4], [1, 5], [2, 6], [3, 7]], name)
    assert default_threads(tmp_path, range(8)) == 4


def test_ranges_of_siblings(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    write(tmp_path, {topology.format(cpu): "0-1" if cpu < 2 else "2-3" for cpu in range(4)})
    assert default_threads(tmp_path, range(4)) == 2


def test_only_processors_of_the_process_count(tmp_path: Path) -> None:
    add_cores(tmp_path, [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert default_threads(tmp_path, {1, 5, 6}) == 2


def test_without_topology_every_processor_is_a_core(tmp_path: Path) -> None:
    assert default_threads(tmp_path, {0, 1, 2}) == 3


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_quota_of_version_2(tmp_path: Path, cpu_max: str, expected: int) -> None:
    add_groups(tmp_path, "0::/box", V2_MOUNT, {"box/cpu.max": cpu_max})
    assert default_threads(tmp_path, range(8)) == expected


def test_the_least_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "slice/cpu.max": "300000 100000",
        "slice/box/cpu.max": "max 100000",
        "slice/box/leaf/cpu.max": "500000 100000",
        "other/cpu.max": "100000 100000",
    }
    add_groups(tmp_path, "0::/slice/box/leaf", V2_MOUNT, files)
    assert default_threads(tmp_path, range(8)) == 3


def test_a_container_sees_its_group_at_the_top(tmp_path: Path) -> None:
    add_groups(tmp_path, "0::/", V2_MOUNT, {"cpu.max": "200000 100000"})
    assert default_threads(tmp_path, range(8)) == 2


def test_a_group_outside_of_what_is_mounted_falls_back_to_the_top(tmp_path: Path) -> None:
    add_groups(tmp_path, "0::/../../host", V2_MOUNT, {"cpu.max": "200000 100000"})
    assert default_threads(tmp_path, range(8)) == 2


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("350000", 3)])
def test_quota_of_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"cpu,cpuacct/box/cpu.cfs_quota_us": quota, "cpu,cpuacct/box/cpu.cfs_period_us": "100000"}
    add_groups(tmp_path, "5:memory:/elsewhere\n4:cpu,cpuacct:/box\n0::/box", V1_MOUNT.format(top="/"), files)
    assert default_threads(tmp_path, range(8)) == expected


def test_version_1_mounted_at_the_container_s_group(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    add_groups(tmp_path, "4:cpu,cpuacct:/docker/abc", V1_MOUNT.format(top="/docker/abc"), files)
    assert default_threads(tmp_path, range(8)) == 2


def test_without_mounts_the_usual_place_is_looked_at(tmp_path: Path) -> None:
    add_groups(tmp_path, "0::/box", None, {"box/cpu.max": "200000 100000"})
    assert default_threads(tmp_path, range(8)) == 2


def test_spaces_in_mount_points(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040groups")
    add_groups(tmp_path, "0::/", mount, {"my groups/cpu.max": "200000 100000"})
    assert default_threads(tmp_path, range(8)) == 2


@pytest.mark.parametrize("text", ["", "junk", "100000", "100000 0", "-5 100000", "9 9 9"])
def test_files_that_make_no_sense_limit_nothing(tmp_path: Path, text: str) -> None:
    add_groups(tmp_path, "0::/\nnonsense", V2_MOUNT + "\nshort line", {"cpu.max": text})
    assert default_threads(tmp_path, range(8)) == 8


def test_systems_without_affinity_use_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert default_threads() == 10
    assert pin_order(4) == []


def test_this_machine() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
    if sys.platform == "linux":
        assert set(pin_order(64)) == os.sched_getaffinity(0) or len(os.sched_getaffinity(0)) > 64


def test_pins_go_to_each_core_first_and_node_by_node(tmp_path: Path) -> None:
    add_cores(tmp_path, [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]])
    add_nodes(tmp_path, "0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15")
    assert pin_order(4, tmp_path, range(16)) == [0, 2, 4, 6]
    assert pin_order(10, tmp_path, range(16)) == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10]
    assert pin_order(16, tmp_path, range(16))[8:] == [8, 10, 12, 14, 9, 11, 13, 15]


def test_pins_stay_within_the_process_and_start_over(tmp_path: Path) -> None:
    add_cores(tmp_path, [[0, 2], [1, 3]])
    assert pin_order(5, tmp_path, {2, 1, 3}) == [1, 2, 3, 1, 2]


def test_node_folders_sort_by_number(tmp_path: Path) -> None:
    add_nodes(tmp_path, *(str(11 - index) for index in range(12)))
    assert pin_order(12, tmp_path, range(12)) == list(range(11, -1, -1))


def test_lists_of_the_kernel() -> None:
    assert threads._cpu_list("0-2,5,7-8") == [0, 1, 2, 5, 7, 8]
    assert threads._cpu_list("") == []
