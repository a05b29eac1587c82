"""A calibrated conversion gives the same bytes whatever interrupts it and however many threads work on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from inferencex.convert.calibrate.data import CalibrationOptions
from inferencex.convert.pipeline import ConvertOptions, Silent, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.errors import OptionError, QuantizationError
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

_SAMPLES = CalibrationOptions("random", samples=8, length=32, held_out=1)
_ARTIFACTS = ("weights-00001-of-00001.safetensors", "model.onnx", "bundle.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("llama")
    model.save_pretrained(folder)  # type: ignore[operator]
    tiny_config("llama").save_pretrained(folder)
    return folder


def _options(checkpoint: Path, output: Path, scheme: str = "awq+gptq-int4-g16", **changes: object) -> ConvertOptions:
    plain = ConvertOptions(
        str(checkpoint), output, parse_scheme(scheme), calibration=_SAMPLES, verify=False, max_model_len=64
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def _artifacts(bundle: Path) -> dict[str, bytes]:
    return {name: (bundle / name).read_bytes() for name in _ARTIFACTS}


@pytest.fixture(scope="module")
def uninterrupted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    bundle = tmp_path_factory.mktemp("uninterrupted") / "bundle"
    convert(_options(checkpoint, bundle), Silent())
    return _artifacts(bundle)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_byte(
    threads: int, checkpoint: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    convert(_options(checkpoint, tmp_path / "bundle", threads=threads), Silent())
    assert _artifacts(tmp_path / "bundle") == uninterrupted


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_finished_blocks_are_taken_as_they_are(
    kept: int, checkpoint: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    convert(_options(checkpoint, tmp_path / "first", work_dir=work), Silent())
    blocks = sorted(work.glob("block-*.safetensors"))
    assert len(blocks) == 2
    for block in blocks[kept:]:
        block.unlink()
    before = {block: block.stat().st_mtime_ns for block in blocks[:kept]}
    convert(_options(checkpoint, tmp_path / "second", work_dir=work), Silent())
    assert _artifacts(tmp_path / "second") == uninterrupted
    assert {block: block.stat().st_mtime_ns for block in blocks[:kept]} == before


_SLOW_RUN = """
import sys, time
from inferencex.convert.calibrate.work_dir import WorkDir
save = WorkDir.save
def slow(self, index, block):
    save(self, index, block)
    print("saved", index, flush=True)
    time.sleep(60)
WorkDir.save = slow
from inferencex.convert.cli import main
sys.argv = ["inferencex-convert", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_continues(
    how: signal.Signals, checkpoint: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    work, output = tmp_path / "work", tmp_path / "bundle"
    arguments = [
        *("--model-id", str(checkpoint), "-o", str(output), "--quantization", "awq+gptq-int4-g16", "--no-verify"),
        *("--calibration", "random", "--calibration-samples", "8", "--calibration-length", "32"),
        *("--max-model-len", "64", "--work-dir", str(work)),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_RUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whatever started the tests may ignore Ctrl-C; the conversion should not inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saved 0\n"
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert not output.exists()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert f"finished blocks are in {work}; the same command goes on from there" in " ".join(errors.split())
    assert [path.name for path in sorted(work.glob("block-*"))] == ["block-00000.safetensors"]
    leftovers = [path.name for path in tmp_path.iterdir() if path.name not in ("work",)]
    assert how == signal.SIGKILL or leftovers == []
    held_out_apart = replace(_SAMPLES, held_out=CalibrationOptions().held_out)
    convert(_options(checkpoint, output, work_dir=work, calibration=held_out_apart), Silent())
    plain = _artifacts(output)
    weights = _ARTIFACTS[0]
    assert plain[weights] == _weights_alone(checkpoint, tmp_path, held_out_apart)


def _weights_alone(checkpoint: Path, folder: Path, calibration: CalibrationOptions) -> bytes:
    convert(_options(checkpoint, folder / "alone", calibration=calibration), Silent())
    return _artifacts(folder / "alone")[_ARTIFACTS[0]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scheme": "gptq-int4-g16"}, "plans"),
        ({"scheme": "awq+gptq-int4-g32"}, "plans"),
        ({"calibration": replace(_SAMPLES, seed=1)}, "calibration"),
        ({"calibration": replace(_SAMPLES, samples=9)}, "calibration"),
    ],
    ids=["method", "group size", "seed", "samples"],
)
def test_a_directory_of_another_conversion_is_refused(
    changes: dict[str, object], named: str, checkpoint: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    convert(_options(checkpoint, tmp_path / "first", work_dir=work), Silent())
    before = {path: path.stat().st_mtime_ns for path in work.iterdir()}
    with pytest.raises(OptionError, match=f"different conversion: {named}"):
        convert(_options(checkpoint, tmp_path / "second", work_dir=work, **changes), Silent())
    assert {path: path.stat().st_mtime_ns for path in work.iterdir()} == before
    assert not (tmp_path / "second").exists()


def test_a_changed_checkpoint_is_another_conversion(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    work = tmp_path / "work"
    convert(_options(copy, tmp_path / "first", work_dir=work), Silent())
    os.utime(copy / "model.safetensors", ns=(time.time_ns(), time.time_ns()))
    with pytest.raises(OptionError, match="files"):
        convert(_options(copy, tmp_path / "second", work_dir=work), Silent())


def test_a_directory_with_other_files_is_refused_and_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("precious")
    with pytest.raises(OptionError, match=r"thesis\.txt"):
        convert(_options(checkpoint, tmp_path / "bundle", work_dir=work), Silent())
    assert [path.name for path in work.iterdir()] == ["thesis.txt"]


def test_a_damaged_block_is_named(checkpoint: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    convert(_options(checkpoint, tmp_path / "first", work_dir=work), Silent())
    block = work / "block-00001.safetensors"
    block.write_bytes(block.read_bytes()[:-100])
    with pytest.raises(QuantizationError, match=r"block-00001\.safetensors"):
        convert(_options(checkpoint, tmp_path / "second", work_dir=work), Silent())
