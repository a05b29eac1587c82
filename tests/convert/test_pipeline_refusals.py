"""Sources and options that cannot give a right bundle: each is refused by name, and leaves nothing behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import (
    BundleError,
    CaptureError,
    FidelityError,
    InferenceXError,
    OptionError,
    QuantizationError,
    SourceError,
)
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.reference.backend import compile_bundle
from tests.architectures import zoo
from tests.smollm2 import Quiet


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    zoo.tiny_model("llama").save_pretrained(folder)
    return folder


def _convert(source: Path, **options: Any) -> Path:
    output = source.parent / "out"
    scheme = parse_scheme(options.pop("scheme", "none"))
    convert(ConvertOptions(str(source), output, scheme, **options), Quiet())
    return output


def _refused(source: Path, kind: type[InferenceXError], message: str, **options: Any) -> None:
    before = sorted(source.parent.iterdir())
    with pytest.raises(kind, match=message):
        _convert(source, **options)
    assert sorted(source.parent.iterdir()) == before


def _edit_config(source: Path, **values: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _edit_weight(source: Path, part: str, change: Any) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if part in name)
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("length", [2, 3, 17])
def test_contexts_shorter_than_the_text_compared(source: Path, length: int) -> None:
    bundle = Bundle.open(_convert(source, max_model_len=length))
    assert bundle.manifest.architecture["max_model_len"] == length


@pytest.mark.parametrize("length", [1, 0, -4])
def test_contexts_without_room_for_an_answer(source: Path, length: int) -> None:
    _refused(source, InferenceXError, f"--max-model-len {length}: expected at least 2", max_model_len=length)


def test_contexts_beyond_what_a_graph_is_recorded_for(source: Path) -> None:
    _refused(source, OptionError, "--max-model-len 1000000000: expected at most 16777216", max_model_len=10**9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"threads": count}, f"--threads {count}: expected") for count in (0, -3, 10**6)),
        *(({"verify_limit": limit}, f"--verify-limit {limit}: ") for limit in (0.0, -1.0, math.nan, math.inf)),
        ({"seed": 0}, "--seed 0 is for --random-weights"),
        ({"verify_limit": 1.0, "verify": False}, "--verify-limit means nothing with --no-verify"),
    ],
)
def test_options_are_refused_before_any_work(source: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ConvertOptions(str(source), source.parent / "out", parse_scheme("none"), **options)


@pytest.mark.parametrize("model_id", ["", "  "])
def test_no_source_at_all(tmp_path: Path, model_id: str) -> None:
    with pytest.raises(OptionError, match="--model-id is empty"):
        ConvertOptions(model_id, tmp_path / "out", parse_scheme("none"))


def test_a_bundle_inside_its_source(source: Path) -> None:
    before = sorted(source.iterdir())
    for output in (source / "out", source / "deep" / "er" / "out"):
        with pytest.raises(BundleError, match=f"{output}: lies inside the source"):
            convert(ConvertOptions(str(source), output, parse_scheme("none")), Quiet())
    assert sorted(source.iterdir()) == before


def test_manifests_that_promise_more_positions_than_tables_hold(source: Path) -> None:
    bundle = _convert(source, max_model_len=32, verify=False)
    path = bundle / "bundle.json"
    compile_bundle(Bundle.open(bundle), BackendOptions(num_blocks=2))
    manifest = json.loads(path.read_text())
    manifest["architecture"]["max_model_len"] = 33
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"has 32 rows, for sequences of 32 tokens.*max_model_len is 33"):
        compile_bundle(Bundle.open(bundle), BackendOptions(num_blocks=2))


@pytest.mark.parametrize("verify", [True, False])
def test_integers_in_place_of_numbers(source: Path, verify: bool) -> None:
    _edit_weight(source, "q_proj", lambda t: t.to(torch.int32))
    _refused(source, SourceError, r"q_proj.weight \(torch.int32, expected a floating point type\)", verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_values_beyond_float16(source: Path, verify: bool) -> None:
    def grow(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] = -1e6
        return tensor

    _edit_weight(source, "down_proj", grow)
    message = r"down_proj.weight: the value 1e\+06 does not fit float16"
    _refused(source, QuantizationError, message, dtype="float16", verify=verify)


def test_a_model_that_computes_nan_itself(source: Path) -> None:
    _edit_config(source, rms_norm_eps=float("nan"))
    _refused(source, FidelityError, f"{source}: the model's own logits are not finite")


def test_what_cannot_be_recorded_names_the_model(source: Path) -> None:
    _edit_config(source, num_hidden_layers=0)
    _refused(source, CaptureError, f"{source}: ")
    _edit_config(source, num_hidden_layers=2, hidden_act="nosuch")
    _refused(source, CaptureError, f"{source}: ")


@pytest.mark.parametrize("verify", [True, False])
def test_damaged_side_files_are_named_in_the_source(source: Path, verify: bool) -> None:
    (source / "tokenizer.json").write_text("garbage")
    _refused(source, SourceError, f"{source}/tokenizer.json: is not a usable tokenizer", verify=verify)


def test_work_directories_in_the_way_are_refused_before_any_work(source: Path) -> None:
    for place in ("out", "out/work", "source", "source/work"):
        _refused(
            source,
            OptionError,
            "--work-dir .* is or lies|--work-dir .* is --output",
            scheme="gptq-int4",
            work_dir=source.parent / place,
        )
    assert not (source / "work").exists()


def test_windows_that_no_length_fits(source: Path) -> None:
    _refused(
        source,
        OptionError,
        "16 positions, and calibration takes windows of at least 32",
        scheme="gptq-int4",
        max_model_len=16,
    )


def test_quantization_with_every_weight_excluded(source: Path) -> None:
    scheme = parse_scheme("rtn-int4", exclude=["*"])
    with pytest.raises(OptionError, match=r"--exclude '\*' leaves nothing for --quantization rtn-int4"):
        convert(ConvertOptions(str(source), source.parent / "out", scheme), Quiet())
    assert not (source.parent / "out").exists()
