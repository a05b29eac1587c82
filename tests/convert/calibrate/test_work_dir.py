"""Directories for finished blocks: which are refused before any work, and which blocks are not believed."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir, check_work_dir
from inferencex.formats.errors import OptionError, QuantizationError


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("precious")
    (tmp_path / "nothing").symlink_to(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("bundle", "is --output, lies in it or holds it"),
        ("bundle/work", "is --output, lies in it or holds it"),
        (".", "is --output, lies in it or holds it"),
        ("notes/../bundle", "is --output, lies in it or holds it"),
        ("model", "is or lies in the model's folder"),
        ("model/work", "is or lies in the model's folder"),
        ("nothing", "is a symbolic link to nothing"),
        ("notes", r"files that are not of a conversion \(thesis\.txt\)"),
        ("notes/thesis.txt", "is a file; give a directory"),
        ("notes/thesis.txt/work", r"thesis\.txt is a file"),
    ],
)
def test_places_that_cannot_be_used(work: str, message: str, places: Path) -> None:
    before = sorted(places.rglob("*"))
    with pytest.raises(OptionError, match=message):
        check_work_dir(places / work, output=places / "bundle", source=places / "model")
    assert sorted(places.rglob("*")) == before


@pytest.mark.parametrize("work", ["empty", "new", "new/deep", "bundle.work"])
def test_places_that_can(work: str, places: Path) -> None:
    check_work_dir(places / work, output=places / "bundle", source=places / "model")
    WorkDir(places / work, {}).close()
    check_work_dir(places / work, output=places / "bundle", source=places / "model")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_place_that_is_closed(places: Path) -> None:
    (places / "empty").chmod(0o500)
    with pytest.raises(OptionError, match="empty cannot be written to"):
        check_work_dir(places / "empty" / "work", output=places / "bundle", source=None)


def test_a_block_under_another_blocks_name(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "work", {})
    work.save(1, FinishedBlock(plain={"norm": np.ones(2, np.float32)}))
    (tmp_path / "work" / "block-00001.safetensors").rename(tmp_path / "work" / "block-00002.safetensors")
    with pytest.raises(QuantizationError, match=r"block-00002\.safetensors: holds what was finished as block-00001"):
        work.load(2)
    work.close()


def test_the_innermost_difference_is_named(tmp_path: Path) -> None:
    def asked(group: int) -> dict[str, object]:
        return {"plans": [["embed", None], ["layers.0.q_proj", {"type": "int4", "group": group}]]}

    WorkDir(tmp_path / "work", asked(64)).close()
    with pytest.raises(OptionError, match=r"plans differ \(plans\[layers\.0\.q_proj\]\[1\]\.group was 64, is 32\)"):
        WorkDir(tmp_path / "work", asked(32))


def test_a_block_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "work", {})
    block = FinishedBlock(plain={"norm": np.ones(1 << 16, np.float32)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        with pytest.raises(QuantizationError, match=r"block-00000\.safetensors: cannot be written \(.*goes on"):
            work.save(0, block)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [".lock", "work.json"]
    work.close()
