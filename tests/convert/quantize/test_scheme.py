from __future__ import annotations

import pytest

from inferencex.convert.quantize import TensorScheme, available_schemes, parse_scheme
from inferencex.convert.quantize.scheme import ActivationScheme
from inferencex.formats.errors import OptionError
from inferencex.formats.packing import PER_CHANNEL


def test_available() -> None:
    types = ["int3", "int4", "int5", "int6", "int8", "fp8", "nvfp4", "mxfp4"]
    named = ["fp8", "fp8-weight", "int8-dynamic", "nvfp4", "mxfp4"]
    assert {"none", *(f"rtn-{kind}" for kind in types), *named} <= set(available_schemes())
    for name in available_schemes():
        parse_scheme(name)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("rtn-int4", {}, TensorScheme("int4", 64, False)),
        ("rtn-int4-g128", {}, TensorScheme("int4", 128, False)),
        ("rtn-int4-g128", {"group_size": 128}, TensorScheme("int4", 128, False)),
        ("rtn-int4", {"group_size": 32, "symmetric": True}, TensorScheme("int4", 32, True)),
        ("rtn-int4", {"group_size": -1}, TensorScheme("int4", PER_CHANNEL, False)),
        ("rtn-int8", {}, TensorScheme("int8", PER_CHANNEL, True)),
        ("rtn-int8", {"group_size": 64, "symmetric": False}, TensorScheme("int8", 64, False)),
        ("rtn-int3", {}, TensorScheme("int3", 64, False)),
        ("rtn-int3-g32", {"symmetric": True}, TensorScheme("int3", 32, True)),
        ("rtn-int5", {}, TensorScheme("int5", 64, False)),
        ("gptq-int6", {"symmetric": True}, TensorScheme("int6", 64, True)),
        ("fp8", {}, TensorScheme("fp8", PER_CHANNEL, True, ActivationScheme("fp8"))),
        ("fp8", {"static_activations": True}, TensorScheme("fp8", PER_CHANNEL, True, ActivationScheme("fp8", True))),
        ("fp8-weight", {"group_size": 128}, TensorScheme("fp8", 128, True)),
        ("rtn-fp8", {}, TensorScheme("fp8", PER_CHANNEL, True)),
        ("int8-dynamic", {}, TensorScheme("int8", PER_CHANNEL, True, ActivationScheme("int8"))),
        ("nvfp4", {}, TensorScheme("nvfp4", 16, True)),
        ("rtn-mxfp4", {"group_size": 32}, TensorScheme("mxfp4", 32, True)),
        ("none", {}, None),
    ],
)
def test_linears(name: str, options: dict[str, int], expected: TensorScheme | None) -> None:
    assert parse_scheme(name, **options).linear == expected


def test_names_are_complete() -> None:
    assert parse_scheme("rtn-int4").name == "rtn-int4-g64"
    assert parse_scheme("rtn-int8").name == "rtn-int8"
    assert parse_scheme("rtn-int4-g7").method == "rtn"
    assert parse_scheme("rtn-int3").name == "rtn-int3-g64"
    for name in ("fp8", "fp8-weight", "int8-dynamic", "nvfp4", "rtn-mxfp4"):
        assert parse_scheme(name).name == name
    assert parse_scheme("fp8-weight", group_size=128).name == "fp8-weight-g128"
    assert parse_scheme("fp8-weight-g128").linear == TensorScheme("fp8", 128, True)
    assert parse_scheme("fp8-g128").name == "fp8-g128"
    assert parse_scheme("none").method == "none"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtn-int7", r"'rtn-int7' is not one of none, .*rtn-int8.*; did you mean 'rtn-int\d'"),
        ("fp8-weights", "did you mean 'fp8-weight'"),
        ("int8-dynamic-g64", "go with weights that have a scale a channel, not groups of 64"),
        ("fp8-dynamic", "is not one of"),
        ("rnt-int4", "did you mean 'rtn-int4'"),
        ("rnt-int4-g128", "did you mean 'rtn-int4'"),
        ("awx-int4", "is not one of none, "),
        ("awq+gptx-int4", "is not one of"),
        ("int5", "is not one of"),
        ("", "is not one of"),
        ("rtn-int4-64", "is not one of"),
        ("rtn-int4-g", "is not one of"),
        ("rtn-int4-g-1", "is not one of"),
        ("rtn-int4-g99999999999999", "is not one of"),
        ("rtn-int4-g0", "group size 0 is neither positive nor -1"),
        ("RTN-INT4", "is not one of"),
        ("awq", r"'awq' is a method without a type; give one, such as awq-int\d, or a budget"),
        ("smoothquant", r"such as smoothquant-int8$"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_scheme(name)


def test_options_that_contradict() -> None:
    with pytest.raises(OptionError, match="says groups of 128, --group-size says 64"):
        parse_scheme("rtn-int4-g128", group_size=64)
    with pytest.raises(OptionError, match="--group-size and --symmetric/--asymmetric mean nothing"):
        parse_scheme("none", group_size=64, symmetric=True)
    with pytest.raises(OptionError, match="--exclude means nothing"):
        parse_scheme("none", exclude=["*"])
    assert parse_scheme("none", exclude=["*"], lm_head="int8").exclude == ("*",)
    for name in ("nvfp4", "rtn-mxfp4", "rtn-nvfp4-g32"):
        with pytest.raises(OptionError, match="has groups of"):
            parse_scheme(name, group_size=None if "-g" in name else 64)
    with pytest.raises(OptionError, match="fp8 has no zero points"):
        parse_scheme("fp8", symmetric=False)
    with pytest.raises(OptionError, match="a scale a token go with weights that have a scale a channel"):
        parse_scheme("int8-dynamic", group_size=64)
    with pytest.raises(OptionError, match="symmetric weights only"):
        parse_scheme("int8-dynamic", symmetric=False)
    for name in ("none", "rtn-int8", "fp8-weight"):
        with pytest.raises(OptionError, match="activations"):
            parse_scheme(name, static_activations=True)
    with pytest.raises(OptionError, match="group size -2"):
        parse_scheme("rtn-int4", group_size=-2)


def test_heads_and_embeddings() -> None:
    scheme = parse_scheme("rtn-int4", group_size=32, symmetric=True, lm_head="int8", embedding="int4")
    assert scheme.lm_head == TensorScheme("int8", PER_CHANNEL, True)
    assert scheme.embedding == TensorScheme("int4", 32, True), "what is left open is taken from the linears"
    assert parse_scheme("rtn-int4", lm_head="int4-g16").lm_head == TensorScheme("int4", 16, False)
    assert parse_scheme("rtn-int4", lm_head="none").lm_head == "none"
    assert parse_scheme("rtn-int4").lm_head is None
    assert parse_scheme("none", lm_head="int8").lm_head == TensorScheme("int8", PER_CHANNEL, True)
    assert parse_scheme("fp8", lm_head="fp8").lm_head == TensorScheme("fp8", PER_CHANNEL, True)
    assert parse_scheme("rtn-int8", embedding="nvfp4").embedding == TensorScheme("nvfp4", 16, True)


@pytest.mark.parametrize("text", ["int7", "fp16", "int4-gx", "int4g64", "", "None"])
def test_precisions_that_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"--lm-head .* is not one of none, int3, int4, int5, int6, int8, "):
        parse_scheme("rtn-int4", lm_head=text)
    with pytest.raises(OptionError, match="--embedding"):
        parse_scheme("rtn-int4", embedding=text)


def test_json() -> None:
    scheme = parse_scheme("rtn-int4", lm_head="int8", exclude=["*.k_proj.weight"])
    assert scheme.to_json() == {
        "name": "rtn-int4-g64",
        "method": "rtn",
        "linear": "int4, groups of 64, asymmetric",
        "lm_head": "int8, per channel, symmetric",
        "embedding": None,
        "exclude": ["*.k_proj.weight"],
    }
