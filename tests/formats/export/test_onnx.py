"""ONNX exports: the plain graph run by onnx itself, and both graphs by ONNX Runtime where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from inferencex.formats.errors import ExportError
from inferencex.formats.export import export_bundle
from tests.formats.export import models
from tests.formats.export.conftest import Bundles

OTHER = models.IDS[::-1]
FAMILIES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "rtn-int4-g32", {}, {"symmetric": False}),
    ("llama", "rtn-int4-g32", {}, {"symmetric": True}),
    ("llama", "rtn-int8", {"attention_bias": True, "tie_word_embeddings": True}, {"embedding": "int8"}),
    ("llama", "rtn-int4-g40", {}, {"embedding": "int8"}),
    ("qwen3", "none", {}, {}),
    ("gemma2", "rtn-int8", {"sliding_window": 4, "query_pre_attn_scalar": 16}, {}),
    ("gpt_neox", "rtn-int8", {}, {}),
    ("bloom", "rtn-int8", {}, {}),
]


def _ids(rows: list[list[int]]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize(("name", "quantization", "overrides", "options"), FAMILIES)
def test_plain_graph(
    bundles: Bundles,
    tmp_path: Path,
    name: str,
    quantization: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
) -> None:
    path = bundles(name, quantization, overrides=overrides, **options)
    export_bundle(path, "onnx", tmp_path / "out")
    file = tmp_path / "out" / "full_sequence.onnx"
    onnx.checker.check_model(str(file))
    assert {entry.domain for entry in onnx.load(file, load_external_data=False).opset_import} <= {"", "ai.onnx"}
    ids = _ids([models.IDS, OTHER])
    try:
        import onnxruntime
    except ModuleNotFoundError:
        (logits,) = ReferenceEvaluator(onnx.load(file)).run(None, {"input_ids": ids})
    else:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {"input_ids": ids})
    for row, token_ids in zip(logits, (models.IDS, OTHER), strict=True):
        expected = models.computed(path, token_ids)
        assert np.abs(models.log_softmax(row) - expected).max() < 1e-3


def _exact(folder: Path) -> None:
    """Let products with integer weights be computed in float32, so that only mistakes remain."""
    file = folder / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    file.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(("name", "quantization", "overrides", "options"), FAMILIES[:6])
def test_genai(
    bundles: Bundles,
    tmp_path: Path,
    name: str,
    quantization: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    path = bundles(name, quantization, overrides=overrides, **options)
    if name == "gemma2":
        pytest.skip("its layers see windows of different lengths, which is tested by the plain graph")
    export_bundle(path, "onnx", tmp_path / "out")
    _exact(tmp_path / "out")
    model = og.Model(str(tmp_path / "out"))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=64, do_sample=False)
    generator = og.Generator(model, settings)
    generator.append_tokens(np.array(models.IDS[:8], dtype=np.int32))
    rows = [generator.get_logits()[0, -1]]
    for token in models.IDS[8:]:
        generator.append_tokens(np.array([token], dtype=np.int32))
        rows.append(generator.get_logits()[0, -1])
    expected = models.computed(path)[7:]
    assert np.abs(models.log_softmax(np.stack(rows)) - expected).max() < 1e-3


def test_graphs_share_their_weights(bundles: Bundles, tmp_path: Path) -> None:
    path = bundles("llama", "rtn-int4-g32", symmetric=False)
    export_bundle(path, "onnx", tmp_path / "out")
    places: list[dict[str, str]] = []
    for name in ("model.onnx", "full_sequence.onnx"):
        model = onnx.load(tmp_path / "out" / name, load_external_data=False)
        places.append(
            {
                tensor.name: next(entry.value for entry in tensor.external_data if entry.key == "offset")
                for tensor in model.graph.initializer
                if tensor.external_data
            }
        )
    weights = {name.removesuffix(".blocks") for name in places[0] if name.endswith(".blocks")}
    assert len(weights) == 8
    assert all(places[0][f"{name}.blocks"] == places[1][f"{name}.values"] for name in weights)


def test_configuration_of_genai(bundles: Bundles, tmp_path: Path) -> None:
    export_bundle(bundles("llama", "rtn-int8"), "onnx", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    decoder = config["model"]["decoder"]
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"], decoder["head_size"]) == (4, 2, 16)
    assert (config["model"]["type"], config["model"]["vocab_size"]) == ("llama", models.VOCAB)
    inputs = {value.name for value in onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.input}
    assert {"past_key_values.1.value", "input_ids", "attention_mask", "position_ids"} <= inputs


def test_alibi_gets_the_plain_graph_alone(bundles: Bundles, tmp_path: Path) -> None:
    done = export_bundle(bundles("bloom", "rtn-int8"), "onnx", tmp_path / "out")
    assert not (tmp_path / "out" / "model.onnx").exists()
    assert any("ALiBi" in note for note in done.notes)


def test_experts_are_refused(bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="Experts has no form"):
        export_bundle(bundles("mixtral", "rtn-int4-g32"), "onnx", tmp_path / "out")
    assert not list(tmp_path.iterdir())
