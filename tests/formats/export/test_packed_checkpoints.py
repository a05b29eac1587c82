"""AWQ, GPTQ and compressed-tensors: what is in the files, decoded by the formats' own definitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export import export_bundle
from tests.formats.export import decoders, models
from tests.formats.export.conftest import Bundles

MODULES = [
    f"model.layers.1.{part}"
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(bundles: Bundles, tmp_path: Path, symmetric: bool) -> None:
    path = bundles("llama", "rtn-int4-g32", symmetric=symmetric)
    export_bundle(path, "awq", tmp_path / "out")
    found, config = decoders.tensors(tmp_path / "out"), decoders.config(tmp_path / "out")
    settings = config["quantization_config"]
    assert (settings["quant_method"], settings["version"], settings["bits"]) == ("awq", "gemm", 4)
    assert settings["zero_point"] is True and settings["modules_to_not_convert"] == ["lm_head"]
    for module in MODULES:
        expected = models.weight(Bundle.open(path), f"{module}.weight")
        assert np.array_equal(decoders.awq(found, module, settings["group_size"]), expected), module
    assert not {name for name in found if name.endswith("_proj.weight")}


@pytest.mark.parametrize(
    ("quantization", "symmetric", "bits"),
    [("rtn-int4-g32", True, 4), ("rtn-int4-g32", False, 4), ("rtn-int8", True, 8), ("rtn-int8-g32", False, 8)],
)
def test_gptq(bundles: Bundles, tmp_path: Path, quantization: str, symmetric: bool, bits: int) -> None:
    path = bundles("llama", quantization, symmetric=symmetric)
    export_bundle(path, "gptq", tmp_path / "out")
    found = decoders.tensors(tmp_path / "out")
    settings = decoders.config(tmp_path / "out")["quantization_config"]
    assert (settings["bits"], settings["sym"], settings["desc_act"]) == (bits, symmetric, False)
    first = settings["checkpoint_format"] == "gptq"
    assert first or not symmetric
    for module in MODULES:
        expected = models.weight(Bundle.open(path), f"{module}.weight")
        assert np.array_equal(decoders.gptq(found, module, bits, first=first), expected), module


@pytest.mark.parametrize(
    ("quantization", "symmetric", "bits"),
    [("rtn-int4-g32", True, 4), ("rtn-int4-g32", False, 4), ("rtn-int8", True, 8), ("rtn-int8-g32", False, 8)],
)
def test_pack_quantized(bundles: Bundles, tmp_path: Path, quantization: str, symmetric: bool, bits: int) -> None:
    path = bundles("llama", quantization, symmetric=symmetric)
    export_bundle(path, "compressed-tensors", tmp_path / "out")
    found = decoders.tensors(tmp_path / "out")
    settings = decoders.config(tmp_path / "out")["quantization_config"]
    assert (settings["format"], settings["quantization_status"]) == ("pack-quantized", "compressed")
    (group,) = settings["config_groups"].values()
    assert group["targets"] == ["Linear"] and settings["ignore"] == ["lm_head"]
    assert (group["weights"]["num_bits"], group["weights"]["symmetric"]) == (bits, symmetric)
    assert group["weights"]["strategy"] == ("channel" if quantization == "rtn-int8" else "group")
    for module in MODULES:
        expected = models.weight(Bundle.open(path), f"{module}.weight")
        assert np.array_equal(decoders.pack_quantized(found, module, bits), expected), module


@pytest.mark.parametrize(
    ("quantization", "name", "inputs"),
    [
        ("int8-dynamic", "int-quantized", "int"),
        ("fp8", "float-quantized", "float"),
        ("fp8-weight", "float-quantized", None),
    ],
)
def test_weights_of_eight_bits(
    bundles: Bundles, tmp_path: Path, quantization: str, name: str, inputs: str | None
) -> None:
    path = bundles("llama", quantization)
    export_bundle(path, "compressed-tensors", tmp_path / "out")
    found = decoders.tensors(tmp_path / "out")
    settings = decoders.config(tmp_path / "out")["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert settings["format"] == name
    assert (None if group["input_activations"] is None else group["input_activations"]["type"]) == inputs
    for module in MODULES:
        expected = models.weight(Bundle.open(path), f"{module}.weight")
        assert np.allclose(decoders.scaled(found, module), expected, rtol=1e-7, atol=0), module


@pytest.mark.parametrize("quantization", ["nvfp4", "mxfp4"])
def test_floats_of_four_bits(bundles: Bundles, tmp_path: Path, quantization: str) -> None:
    path = bundles("llama", quantization)
    export_bundle(path, "compressed-tensors", tmp_path / "out")
    found = decoders.tensors(tmp_path / "out")
    settings = decoders.config(tmp_path / "out")["quantization_config"]
    assert settings["format"] == f"{quantization}-pack-quantized"
    for module in MODULES:
        expected = models.weight(Bundle.open(path), f"{module}.weight")
        assert np.allclose(decoders.float4(found, module), expected, rtol=1e-6, atol=0), module


def test_plain_weights_keep_their_values(bundles: Bundles, tmp_path: Path) -> None:
    path = bundles("gemma", "rtn-int4-g32")
    export_bundle(path, "compressed-tensors", tmp_path / "out")
    found, opened = decoders.tensors(tmp_path / "out"), Bundle.open(path)
    name = "model.layers.0.input_layernorm.weight"
    scale = np.concatenate(
        [opened.tensor(stored) for stored, o in opened.manifest.made_of.items() if o.parts[0].parameter == name]
    )
    assert np.array_equal(found[name].float().numpy() + np.float32(1), scale)
    embedding = opened.tensor("model.embed_tokens.weight").astype(np.float32)
    assert np.array_equal(found["model.embed_tokens.weight"].float().numpy(), embedding)


def test_weights_in_several_formats(bundles: Bundles, tmp_path: Path) -> None:
    options = {"lm_head": "int8", "exclude": ["*down_proj*"], "overrides": {"tie_word_embeddings": False}}
    path = bundles("llama", "rtn-int4-g32", **options)
    export_bundle(path, "compressed-tensors", tmp_path / "ct")
    settings = decoders.config(tmp_path / "ct")["quantization_config"]
    assert len(settings["config_groups"]) == 2
    targets = [group["targets"] for group in settings["config_groups"].values()]
    assert ["lm_head"] in targets and all("Linear" not in names for names in targets)
    assert settings["ignore"] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    done = export_bundle(path, "gptq", tmp_path / "gptq")
    settings = decoders.config(tmp_path / "gptq")["quantization_config"]
    assert set(settings["dynamic"]) == {rf"-:^model\.layers\.{n}\.mlp\.down_proj$" for n in (0, 1)}
    assert any("lm_head.weight" in note and "float32" in note for note in done.notes)
    head = decoders.tensors(tmp_path / "gptq")["lm_head.weight"]
    assert np.array_equal(head.double().numpy(), Bundle.open(path).quantized("lm_head.weight").dequantize())


@pytest.mark.parametrize(
    ("quantization", "options", "format_name", "expected"),
    [
        ("rtn-int8", {}, "awq", "has 8 bits, awq has 4"),
        ("rtn-int4-g40", {}, "awq", "in groups of 40"),
        ("rtn-int4-g40", {}, "gptq", "in groups of 40"),
        ("rtn-int4-g40", {}, "compressed-tensors", "in groups of 40"),
        ("none", {}, "awq", "has no quantized linear"),
        ("fp8-weight", {}, "gptq", "e4m3 floats, gptq holds integers"),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    bundles: Bundles,
    tmp_path: Path,
    quantization: str,
    options: dict[str, object],
    format_name: str,
    expected: str,
) -> None:
    path = bundles("llama", quantization, **options)
    with pytest.raises(ExportError, match=expected):
        export_bundle(path, format_name, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_experts_are_refused(bundles: Bundles, tmp_path: Path) -> None:
    path = bundles("mixtral", "rtn-int4-g32")
    with pytest.raises(ExportError, match="several experts in one tensor"):
        export_bundle(path, "compressed-tensors", tmp_path / "out")
