"""Where exports may go, and what is left when they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.manifest import parse_manifest
from inferencex.formats.errors import BundleError, ExportError, OptionError
from inferencex.formats.export import export_bundle
from inferencex.formats.export.destination import staged_file, staged_folder
from tests.formats.export.conftest import Bundles


def test_an_export_is_replaced_only_when_asked(bundles: Bundles, tmp_path: Path) -> None:
    path, out = bundles("llama", "rtn-int4-g32", symmetric=False), tmp_path / "out"
    done = export_bundle(path, "awq", out)
    assert done.nbytes == sum(file.stat().st_size for file in out.iterdir())
    record = json.loads((out / "export.json").read_text())
    assert record["format"] == "awq" and set(record["files"]) == {f.name for f in out.iterdir()} - {"export.json"}
    with pytest.raises(ExportError, match="--overwrite"):
        export_bundle(path, "gptq", out)
    export_bundle(path, "gptq", out, overwrite=True)
    assert json.loads((out / "export.json").read_text())["format"] == "gptq"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_files_of_others_are_not_replaced(bundles: Bundles, tmp_path: Path) -> None:
    path, out = bundles("llama", "rtn-int4-g32", symmetric=False), tmp_path / "out"
    export_bundle(path, "awq", out)
    (out / "mine.txt").write_text("x")
    with pytest.raises(ExportError, match=r"mine\.txt"):
        export_bundle(path, "awq", out, overwrite=True)
    (tmp_path / "model.gguf").write_text("not a model")
    with pytest.raises(ExportError, match="no GGUF file"):
        export_bundle(path, "gguf", tmp_path / "model.gguf", overwrite=True)
    with pytest.raises(ExportError, match="this format is one file"):
        export_bundle(path, "gguf", out)


@pytest.mark.parametrize("inside", [".", "sub", ".."])
def test_bundles_are_not_written_over(bundles: Bundles, inside: str) -> None:
    path = bundles("llama", "rtn-int4-g32", symmetric=False)
    with pytest.raises(ExportError, match="the bundle"):
        export_bundle(path, "awq", path / inside, overwrite=True)


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "out", {}) as folder:
        (folder / "part").write_text("x")
        raise RuntimeError
    with pytest.raises(RuntimeError), staged_file(tmp_path / "out.gguf") as file:
        file.write_text("x")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_unknown_formats_and_damaged_bundles(bundles: Bundles, tmp_path: Path) -> None:
    path = bundles("llama", "rtn-int4-g32", symmetric=False)
    with pytest.raises(OptionError, match="'exl2' is not one of awq"):
        export_bundle(path, "exl2", tmp_path / "out")
    with pytest.raises(BundleError):
        export_bundle(tmp_path / "none", "awq", tmp_path / "out")


def test_bundles_that_do_not_say_what_they_are_made_of(bundles: Bundles, tmp_path: Path) -> None:
    import shutil

    path = shutil.copytree(bundles("llama", "rtn-int4-g32", symmetric=False), tmp_path / "old")
    document = json.loads((path / "bundle.json").read_text())
    made_of = document.pop("made_of")
    (path / "bundle.json").write_text(json.dumps(document))
    assert Bundle.open(path).manifest.made_of == {}
    with pytest.raises(ExportError, match="convert it again"):
        export_bundle(path, "awq", tmp_path / "out")
    name = next(iter(Bundle.open(path).manifest.quantization))
    document["made_of"] = {**made_of, name: {"parts": [], "computed_by": ["Mul"]}}
    (path / "bundle.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match="by Mul, which cannot be undone"):
        export_bundle(path, "awq", tmp_path / "out")


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {"parts": []},
        {"parts": {}, "computed_by": []},
        {"parts": [], "computed_by": [1]},
        {"parts": [{}], "computed_by": []},
        {"parts": [{"parameter": "x", "start": -1, "rows": 1, "transposed": False, "added": 0.0}], "computed_by": []},
        {"parts": [{"parameter": "x", "start": 0, "rows": 1, "transposed": 0, "added": 0.0}], "computed_by": []},
    ],
)
def test_wrong_records_are_refused(entry: object) -> None:
    parts = ("source", "architecture", "scheme", "quantization", "tools", "files")
    document = {"format_version": 1, **{part: {} for part in parts}, "made_of": {"w": entry}}
    with pytest.raises(BundleError, match="made_of"):
        parse_manifest(json.dumps(document).encode())
