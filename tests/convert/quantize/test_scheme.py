from __future__ import annotations

import pytest

from inferencex.convert.quantize import TensorScheme, available_schemes, parse_scheme
from inferencex.formats.errors import OptionError
from inferencex.formats.packing import PER_CHANNEL


def test_available() -> None:
    assert available_schemes() == ["none", "rtn-int4", "rtn-int8"]
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
        ("none", {}, None),
    ],
)
def test_linears(name: str, options: dict[str, int], expected: TensorScheme | None) -> None:
    assert parse_scheme(name, **options).linear == expected


def test_names_are_complete() -> None:
    assert parse_scheme("rtn-int4").name == "rtn-int4-g64"
    assert parse_scheme("rtn-int8").name == "rtn-int8"
    assert parse_scheme("rtn-int4-g7").method == "rtn"
    assert parse_scheme("none").method == "none"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtn-int5", r"'rtn-int5' is not one of none, rtn-int4, rtn-int8; did you mean 'rtn-int\d'"),
        ("rnt-int4", "did you mean 'rtn-int4'"),
        ("rnt-int4-g128", "did you mean 'rtn-int4'"),
        ("awq-int4", "is not one of none, rtn-int4, rtn-int8"),
        ("awq+gptq-int4", "is not one of"),
        ("int4", "is not one of"),
        ("", "is not one of"),
        ("rtn-int4-64", "is not one of"),
        ("rtn-int4-g", "is not one of"),
        ("rtn-int4-g-1", "is not one of"),
        ("rtn-int4-g99999999999999", "is not one of"),
        ("rtn-int4-g0", "group size 0 is neither positive nor -1"),
        ("RTN-INT4", "is not one of"),
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


@pytest.mark.parametrize("text", ["int3", "fp8", "int4-gx", "int4g64", "", "None"])
def test_precisions_that_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"--lm-head .* is not one of none, int4, int8"):
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
