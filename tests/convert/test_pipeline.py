"""Conversions from end to end on tiny models: every format, tied or not, with what must hold of the result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from inferencex.convert import fidelity
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BundleError, CaptureError, FidelityError, OptionError, QuantizationError
from tests.architectures import zoo
from tests.smollm2 import Quiet

IDS = [3, 7, 200, 41, 5, 99, 100, 7, 8]


def _checkpoint(folder: Path, name: str = "llama", **overrides: object) -> torch.nn.Module:
    """Save a tiny random model as its authors would, and return it."""
    model = zoo.tiny_model(name, **overrides)
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder)
    return model


def _convert(source: Path, output: Path, scheme: str = "none", *, dtype: str = "auto", **options: object) -> Path:
    quantization = {
        k: options.pop(k) for k in ("group_size", "symmetric", "lm_head", "embedding", "exclude") if k in options
    }
    parsed = parse_scheme(scheme, **quantization)  # type: ignore[arg-type]
    convert(ConvertOptions(str(source), output, parsed, dtype=dtype, **options), Quiet())  # type: ignore[arg-type]
    return output


def _files(bundle: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in bundle.iterdir()
        if not file.name.startswith("report.")
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("lm_head", "embedding"), [(None, None), ("int8", None), (None, "int8"), ("int8", "int8"), ("int4", "int4")]
)
def test_heads_and_embeddings(tmp_path: Path, tied: bool, lm_head: str | None, embedding: str | None) -> None:
    """A tied head and embedding stay one tensor, whichever is quantized, and the config says what is stored."""
    _checkpoint(tmp_path / "source", "qwen2", tie_word_embeddings=tied)
    bundle = Bundle.open(
        _convert(tmp_path / "source", tmp_path / "out", "rtn-int8", lm_head=lm_head, embedding=embedding), verify=True
    )
    assert json.loads((bundle.path / "config.json").read_text())["tie_word_embeddings"] is tied
    values = [name for name in bundle.stored if "embed_tokens" in name or "lm_head" in name]
    tensors = [name for name in values if not name.endswith((".scales", ".zero_points"))]
    assert len(tensors) == (1 if tied else 2)
    quantized = [name for name in tensors if name in bundle.manifest.quantization]
    asked = {"lm_head": lm_head, "embed_tokens": embedding}
    expected = bool(lm_head or embedding) if tied else sum(1 for precision in asked.values() if precision)
    assert len(quantized) == expected


@pytest.mark.parametrize(
    ("scheme", "options", "limit"),
    [
        ("none", {}, 1e-9),
        ("none", {"dtype": "bfloat16"}, 1e-3),
        ("none", {"dtype": "float16"}, 1e-4),
        ("rtn-int8", {}, 1e-2),
        ("rtn-int8", {"symmetric": False, "group_size": 32}, 1e-2),
        ("rtn-int4", {}, 0.6),
        ("rtn-int4", {"symmetric": True, "group_size": 20}, 0.6),
        ("rtn-int4-g32", {"exclude": ["*.1.*"]}, 0.6),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_every_format_stays_the_same_model(
    tmp_path: Path, name: str, scheme: str, options: dict[str, object], limit: float
) -> None:
    model = _checkpoint(tmp_path / "source", name)
    bundle = _convert(tmp_path / "source", tmp_path / "out", scheme, **options)
    source = torch.from_numpy(zoo.reference_logits(model, IDS))
    result = fidelity.compare_logits(source, fidelity.bundle_logits(bundle, IDS), torch.tensor(IDS))
    assert result.mean_kl < limit
    report = json.loads((bundle / "report.json").read_text())
    assert report["fidelity"]["mean_kl"] < limit
    assert "## Against the source" in (bundle / "report.md").read_text()


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "source", "qwen3_moe")
    one = _convert(tmp_path / "source", tmp_path / "one", "rtn-int4", threads=1)
    two = _convert(tmp_path / "source", tmp_path / "two", "rtn-int4", threads=3)
    assert _files(one) == _files(two)


def test_biases_are_where_the_source_has_them(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "with", "qwen2")
    _checkpoint(tmp_path / "without", "llama")
    counts = {}
    for name in ("with", "without"):
        bundle = Bundle.open(_convert(tmp_path / name, tmp_path / f"{name}.bundle"))
        counts[name] = sum(1 for n in bundle.model.graph if n.op_type == "Gemm" and len(n.inputs) == 3)
    assert counts == {"with": 2, "without": 0}  # one merged projection in each of two layers


def test_a_wrong_bundle_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not the source's are noticed by reading the bundle back, whatever wrote them."""
    from inferencex.convert.pack import WeightPacker

    _checkpoint(tmp_path / "source")
    right = WeightPacker.evaluate

    def wrong(self: WeightPacker, value: object) -> torch.Tensor:
        tensor = right(self, value)  # type: ignore[arg-type]
        return tensor.flip(0) if "down_proj" in str(getattr(value, "name", "")) else tensor

    monkeypatch.setattr(WeightPacker, "evaluate", wrong)
    with pytest.raises(FidelityError, match="mean KL"):
        _convert(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("stop", ["capture", "quantize", "write", "verify"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, stop: str) -> None:
    class Interrupting(Quiet):
        def stage(self, name: str) -> None:
            if name == stop:
                raise KeyboardInterrupt

    _checkpoint(tmp_path / "source")
    options = ConvertOptions(str(tmp_path / "source"), tmp_path / "out", parse_scheme("rtn-int4"))
    with pytest.raises(KeyboardInterrupt):
        convert(options, Interrupting())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(options, Quiet())
    Bundle.open(tmp_path / "out", verify=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", ["none", "rtn-int8"])
def test_weights_that_are_not_numbers_are_named(tmp_path: Path, scheme: str, value: float) -> None:
    model = _checkpoint(tmp_path / "source")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.down_proj"):
        _convert(tmp_path / "source", tmp_path / "out", scheme)


def test_a_model_that_cannot_be_captured_says_why(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "source", "lfm2")
    with pytest.raises(CaptureError, match="Conv"):
        _convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_random_weights_from_a_config_alone(tmp_path: Path) -> None:
    for name in ("llama", "mixtral"):
        folder = tmp_path / name
        folder.mkdir()
        zoo.tiny_config(name).save_pretrained(folder)
        first = _convert(folder, tmp_path / f"{name}.1", "rtn-int4", random_weights=True, seed=1)
        again = _convert(folder, tmp_path / f"{name}.2", "rtn-int4", random_weights=True, seed=1)
        other = _convert(folder, tmp_path / f"{name}.3", "rtn-int4", random_weights=True, seed=2)
        weights = "weights-00001-of-00001.safetensors"
        assert _files(first) == _files(again)
        assert _files(first)[weights] != _files(other)[weights]


def test_side_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "source")
    odd = b'{\r\n "eos_token_id" : [ 2 , 5 ]}\n\n'
    (tmp_path / "source" / "generation_config.json").write_bytes(odd)
    (tmp_path / "source" / "chat_template.jinja").write_bytes(b"{{ messages }}\n\xc3\xa4")
    bundle = _convert(tmp_path / "source", tmp_path / "out")
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (bundle / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "source")
    bundle = _convert(tmp_path / "source", tmp_path / "out")
    before = _files(bundle)
    with pytest.raises(BundleError, match="overwrite"):
        _convert(tmp_path / "source", tmp_path / "out", "rtn-int8")
    assert _files(bundle) == before
    _convert(tmp_path / "source", tmp_path / "out", "rtn-int8", overwrite=True)
    assert _files(bundle) != before
    with pytest.raises(BundleError):
        _convert(tmp_path / "source", tmp_path / "source", overwrite=True)


def test_patterns_that_match_nothing_are_refused(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "source")
    with pytest.raises(OptionError, match="down_prj"):
        _convert(tmp_path / "source", tmp_path / "out", "rtn-int8", exclude=["*down_prj*"])


def test_ragged_groups_are_decided_and_said_before_work(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "source", intermediate_size=86)
    bundle = _convert(tmp_path / "source", tmp_path / "out", "rtn-int4", group_size=48)
    notes = json.loads((bundle / "report.json").read_text())["notes"]
    assert any("86 input channels" in note and "last group has 38" in note for note in notes)
    opened = Bundle.open(bundle)
    for name, entry in opened.manifest.quantization.items():
        assert np.isfinite(opened.quantized(name).dequantize()).all()
        assert entry.group_size == 48
