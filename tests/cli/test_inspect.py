"""`inferencex inspect` on a converted model, and the graph in the eyes of ONNX's own tools."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

from inferencex.cli.inspect import app, describe
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from inferencex.formats.dialect import register
from inferencex.formats.errors import OptionError
from tests.architectures import zoo
from tests.smollm2 import Quiet


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    zoo.tiny_model("qwen2").save_pretrained(folder / "source")
    convert(ConvertOptions(str(folder / "source"), folder / "out", parse_scheme("rtn-int4-g32")), Quiet())
    return folder / "out"


def test_tables_name_operators_weights_and_files(bundle: Path) -> None:
    result = CliRunner().invoke(app, [str(bundle), "--verify"])
    assert result.exit_code == 0, result.output
    for text in ("inferencex::Attention", "rotary embeddings", "int4 g32 asymmetric", "hashes verified", "model.onnx"):
        assert text in result.output


def test_json_adds_up(bundle: Path) -> None:
    facts = json.loads(CliRunner().invoke(app, [str(bundle), "--json"]).output)
    opened = Bundle.open(bundle)
    assert facts == json.loads(json.dumps(describe(opened)))
    assert sum(kind["bytes"] for kind in facts["weights"].values()) == sum(t.nbytes for t in opened.stored.values())
    assert facts["operators"]["before"]["MatMul"] > 0 and "MatMul" not in facts["operators"]["after"]
    assert facts["operators"]["after"]["Gemm"] == 9  # two layers of four linears, and the head


def test_graph_lists_every_node(bundle: Path) -> None:
    output = CliRunner().invoke(app, [str(bundle), "--graph"]).output
    assert all(str(node.outputs[0].name) in output for node in Bundle.open(bundle).model.graph)


@pytest.mark.parametrize("listing", ["--graph", "--program"])
def test_json_refuses_what_it_does_not_hold(bundle: Path, listing: str) -> None:
    result = CliRunner().invoke(app, [str(bundle), "--json", listing])
    assert isinstance(result.exception, OptionError) and listing in str(result.exception)


def test_the_graph_passes_the_checker_and_loads(bundle: Path) -> None:
    register()
    onnx.checker.check_model(str(bundle / "model.onnx"), full_check=True)
    model = onnx.load(str(bundle / "model.onnx"))
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 23, "inferencex": 1}
    assert not any(str(Path.home()) in text for text in (model.doc_string, str(model.metadata_props)))
