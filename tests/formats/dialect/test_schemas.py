import re

import onnx
import pytest
from onnx.defs import OpSchema

from inferencex.formats import dialect
from inferencex.formats.dialect.schemas import schemas
from inferencex.runtime.backends.reference.operators import OPERATORS as TORCH_OPERATORS
from tests.formats.dialect.nodes import Shape, model_of

ATTENTION = {"layer": 0, "num_heads": 4, "num_kv_heads": 2, "scale": 0.5}
QKV: dict[str, Shape | None] = {"q": ["T", 32], "k": ["T", 16], "v": ["T", 12]}


@pytest.mark.parametrize("schema", schemas().values(), ids=lambda schema: schema.name)
def test_everything_is_documented(schema: OpSchema) -> None:
    assert len((schema.doc or "").splitlines()) >= 3
    for parameter in (*schema.inputs, *schema.outputs):
        assert parameter.description, f"{schema.name}.{parameter.name}"
    for name, attribute in schema.attributes.items():
        assert attribute.description, f"{schema.name}.{name}"


@pytest.mark.parametrize("schema", schemas().values(), ids=lambda schema: schema.name)
def test_every_name_is_explained_by_the_text(schema: OpSchema) -> None:
    words = set(re.findall(r"\w+", schema.doc or ""))
    explained_elsewhere = {"y", "epsilon", "num_heads", "num_kv_heads", "layer"}
    if "GatedActivation" in words:  # its attributes are those of another operator
        explained_elsewhere |= set(schemas()["GatedActivation"].attributes)
    names = {p.name for p in (*schema.inputs, *schema.outputs)} | set(schema.attributes)
    assert names - words <= explained_elsewhere


def test_every_operator_has_both_implementations() -> None:
    assert {op.__name__ for op in dialect.OPERATORS} == set(schemas())
    in_torch = {name for domain, name in TORCH_OPERATORS if domain == dialect.DOMAIN}
    assert in_torch | {"Attention"} == set(schemas())


def test_registering_twice_is_harmless() -> None:
    dialect.register()
    dialect.register()
    assert onnx.defs.get_schema("Attention", dialect.VERSION, dialect.DOMAIN).doc == schemas()["Attention"].doc


def test_the_checker_accepts_every_optional_input() -> None:
    for sinks in (None, [4]):
        for slopes in (None, [4]):
            model = model_of("Attention", {**QKV, "sinks": sinks, "slopes": slopes}, ATTENTION)
            onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("missing", sorted(ATTENTION))
def test_the_checker_refuses_a_missing_attribute(missing: str) -> None:
    attributes = {name: value for name, value in ATTENTION.items() if name != missing}
    with pytest.raises(onnx.checker.ValidationError, match=missing):
        onnx.checker.check_model(model_of("Attention", QKV, attributes))


def test_the_checker_refuses_an_unknown_attribute() -> None:
    with pytest.raises(onnx.checker.ValidationError, match="windows"):
        onnx.checker.check_model(model_of("Attention", QKV, {**ATTENTION, "windows": 3}))


def test_the_checker_refuses_an_attribute_of_another_type() -> None:
    with pytest.raises(onnx.checker.ValidationError, match="window"):
        onnx.checker.check_model(model_of("Attention", QKV, {**ATTENTION, "window": 3.0}))


def test_the_checker_refuses_a_missing_input() -> None:
    with pytest.raises(onnx.checker.ValidationError, match="input size 2"):
        onnx.checker.check_model(model_of("Attention", {"q": ["T", 32], "k": ["T", 16]}, ATTENTION))


def test_the_checker_refuses_mixed_types() -> None:
    mixed = model_of("GatedActivation", {"x": ["T", 8]}, {"activation": "silu"}, dtypes={"x": onnx.TensorProto.INT64})
    with pytest.raises(onnx.shape_inference.InferenceError, match="unsupported type"):
        onnx.checker.check_model(mixed, full_check=True)
