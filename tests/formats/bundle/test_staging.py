"""A bundle is in place whole or not at all: what is written over, what a run leaves that fails or is killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from inferencex.formats.bundle import Bundle, BundleWriter, Manifest
from inferencex.formats.bundle.layout import HEADER_RESERVE
from inferencex.formats.bundle.staging import scratch_folder
from inferencex.formats.errors import BundleError
from tests.formats.bundle.small import fill, gather_model, plain_weight

MakeBundle = Callable[..., Path]


def hidden_leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_the_staged_bundle_opens_before_it_is_in_place(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer)
        staged = Bundle.open(writer.staged, verify=True)
        assert not (tmp_path / "b").exists()
        np.testing.assert_array_equal(staged.tensor("down"), plain_weight())
        writer.add_report({"seconds": 1.5}, "# Report\n")
        writer.commit()
    assert json.loads((tmp_path / "b" / "report.json").read_text()) == {"seconds": 1.5}
    assert Bundle.open(tmp_path / "b", verify=True).files == staged.files
    assert hidden_leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), BundleWriter(tmp_path / "b") as writer:
        fill(writer)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_leaves_the_old_bundle(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    with pytest.raises(RuntimeError), BundleWriter(path, overwrite=True) as writer:
        fill(writer)
        raise RuntimeError
    Bundle.open(path, verify=True)
    assert hidden_leftovers(tmp_path) == []


def test_overwriting_needs_to_be_asked_for(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    with pytest.raises(BundleError, match="pass --overwrite"):
        BundleWriter(path)
    bundle = None
    with BundleWriter(path, overwrite=True) as writer:
        writer.add_tensor("other", np.ones(2, np.float32), ir.DataType.FLOAT, (2,))
        writer.write_graph(gather_model(other=(ir.DataType.FLOAT, (2,))))
        writer.seal(Manifest())
        bundle = Bundle.open(writer.commit())
    assert list(bundle.stored) == ["other"]
    assert not (path / "config.json").exists()
    assert hidden_leftovers(tmp_path) == []


def test_places_that_are_not_written_over(make_bundle: MakeBundle, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match=r"not a bundle's: thesis\.tex"):
        BundleWriter(documents, overwrite=True)
    bundle = make_bundle()
    (bundle / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"not a bundle's: notes\.txt"):
        BundleWriter(bundle, overwrite=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BundleError, match="is not a folder"):
        BundleWriter(file, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(documents)
    with pytest.raises(BundleError, match="symbolic link"):
        BundleWriter(link, overwrite=True)
    for source in (bundle, bundle / "model.gguf"):
        with pytest.raises(BundleError, match="where the source's files are"):
            BundleWriter(bundle, overwrite=True, source=source)
    assert (documents / "thesis.tex").read_text() == "years of work"


def test_a_folder_with_very_much_in_it_is_refused_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in range(40):
        (tmp_path / "home" / f"{folder:02}").mkdir(parents=True)
        (tmp_path / "home" / f"{folder:02}" / "file").write_text("")
    looked_into: list[object] = []
    scandir = os.scandir

    def count(path: Any) -> Any:
        looked_into.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", count)
    with pytest.raises(BundleError, match=r"not a bundle's: 00/file, 01/file, .*, 04/file, \.\.\.; move"):
        BundleWriter(tmp_path / "home")
    assert len(looked_into) < 10


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b" / "closed").mkdir(parents=True)
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BundleError, match=r"b/closed: cannot be looked into \(Permission denied\)"):
        BundleWriter(tmp_path / "b", overwrite=True)


def test_files_that_appear_while_the_bundle_is_written_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with pytest.raises(BundleError, match=r"not a bundle's: thesis\.tex"), BundleWriter(path, overwrite=True) as writer:
        fill(writer)
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
        writer.commit()
    assert [file.name for file in tmp_path.rglob("*")] == ["b", "thesis.tex"]


def test_an_empty_folder_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer)
        writer.commit()
    Bundle.open(tmp_path / "b")


def test_a_full_disk_is_noticed_first(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"needs .* MiB and .* MiB free"):
        BundleWriter(tmp_path / "deep" / "b", expected_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_RESERVE + 100_000, hard))
    try:
        with (
            pytest.raises(BundleError, match="written: File too large"),
            BundleWriter(tmp_path / "b") as writer,
        ):
            writer.add_tensor("t", np.ones((1000, 1000), np.float32), ir.DataType.FLOAT, (1000, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot be written: File exists"), BundleWriter(tmp_path / "file" / "b"):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.formats.bundle.small import fill
from inferencex.formats.bundle import BundleWriter
with BundleWriter(Path(sys.argv[1]), overwrite=True) as writer:
    fill(writer)
    print("filled", flush=True)
    sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "filled\n"
    return process


def test_what_a_killed_run_leaves_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_writer(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not path.exists()
    assert len(hidden_leftovers(tmp_path)) == 1
    with BundleWriter(path) as writer:
        fill(writer)
        assert len(hidden_leftovers(tmp_path)) == 1
        writer.commit()
    assert hidden_leftovers(tmp_path) == []
    Bundle.open(path, verify=True)


def test_what_is_needed_only_meanwhile_goes_with_what_a_killed_run_leaves(tmp_path: Path) -> None:
    abandoned = tmp_path / ".b.partial-00000000"
    (abandoned / "activations").mkdir(parents=True)
    with scratch_folder(tmp_path / "b") as outer, scratch_folder(tmp_path / "b") as inner:
        (inner / "spilled").write_bytes(b"x")
        assert hidden_leftovers(tmp_path) == sorted([outer.name, inner.name])
    with pytest.raises(KeyboardInterrupt), scratch_folder(tmp_path / "b"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_writer(path)
    (theirs,) = hidden_leftovers(tmp_path)
    with BundleWriter(path) as writer:
        fill(writer)
        writer.commit()
    assert hidden_leftovers(tmp_path) == [theirs]
    process.kill()
    process.communicate()


def test_a_replacement_cut_in_half_is_undone(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    path.rename(tmp_path / ".bundle.replaced-00000000")
    with pytest.raises(RuntimeError), BundleWriter(path):
        raise RuntimeError
    Bundle.open(path, verify=True)
