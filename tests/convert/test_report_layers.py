"""Layers in the report: what is said of each, and the plot of their errors."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.convert.error_plot import Panel, Point, small_multiples
from inferencex.convert.layer_report import LayerReport, bits_per_weight, error_plot, layer_tables

SVG = "{http://www.w3.org/2000/svg}"
QKV = "+".join(f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv")
DOWN = LayerReport("model.layers.3.mlp.down_proj.weight", (64, 128), "awq+gptq", "int4-g64", 4.3125, 0.09, 0.08, 0.05)


def _layers(blocks: int) -> list[LayerReport]:
    layers = []
    for block in range(blocks):
        name = f"model.layers.{block}.mlp.down_proj.weight"
        layers.append(replace(DOWN, name=name, output_error_rtn=0.08 + 0.001 * block, output_error=0.05))
        layers.append(replace(DOWN, name=QKV.replace(".3.", f".{block}."), output_error_rtn=0.2, output_error=0.1))
    return layers


@pytest.mark.parametrize(
    ("name", "block", "kind"),
    [
        (DOWN.name, 3, "mlp.down_proj"),
        (QKV, 3, "self_attn.q_proj+k_proj+v_proj"),
        ("transformer.h.11.attn.c_attn.weight", 11, "attn.c_attn"),
        ("model.layers.2.mlp.experts.gate_up_proj", 2, "mlp.experts.gate_up_proj"),
        ("lm_head.weight", None, "lm_head"),
    ],
)
def test_names_say_block_and_kind(name: str, block: int | None, kind: str) -> None:
    layer = replace(DOWN, name=name)
    assert (layer.block, layer.kind) == (block, kind)


def test_bits_are_weighed_by_size() -> None:
    small, large = (
        replace(DOWN, shape=(10, 10), bits_per_weight=8.0),
        replace(DOWN, shape=(3, 10, 10), bits_per_weight=4),
    )
    assert bits_per_weight([small, large]) == pytest.approx(5.0)


def test_tables_have_means_by_kind_and_every_weight() -> None:
    layers = [*_layers(4), replace(DOWN, name="lm_head.weight", output_error_rtn=None, output_error=None, method="rtn")]
    layers[0] = replace(layers[0], tokens=12_345, remark="3 experts saw no token")
    text = "\n".join(layer_tables(layers))
    assert "| mlp.down_proj | 4 | awq+gptq | int4-g64 | 4.312 | 9.00 % | 8.15 % | 5.00 % |" in text
    assert "| lm_head | 1 | rtn | int4-g64 | 4.312 | 9.00 % |  |  |" in text
    assert "| 12,345 | 3 experts saw no token |" in text
    assert all(f"| `{layer.name}` |" in text for layer in layers)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {9, 11}


def test_means_before_and_after_are_of_the_same_weights() -> None:
    layers = [replace(DOWN, output_error_rtn=0.2, output_error=0.1), replace(DOWN, output_error_rtn=None)]
    assert "| 20.00 % | 10.00 % |" in layer_tables(layers)[4]


def test_the_plot_is_an_image_with_axes_and_values() -> None:
    drawn = error_plot(_layers(12), 'model <a> & "b"')
    assert drawn is not None
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    texts = ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]
    assert 'model <a> & "b"' in texts
    assert texts.count("block") == texts.count("relative output error, %") == 2
    assert "self_attn.q_proj+k_proj+v_proj: mean 20.00 % → 10.00 %" in texts
    assert {"0", "5", "10", "15", "20"} <= set(texts)
    assert any("RTN" in text and "stored" in text for text in texts)
    points = [node.findtext(f"{SVG}title") for node in root.iter(f"{SVG}circle")]
    assert len(points) == 12 * 2 * 2
    assert "model.layers.3.mlp.down_proj.weight: RTN 8.3 %" in points
    assert "prefers-color-scheme: dark" in str(root.findtext(f"{SVG}style"))


def test_without_measurements_there_is_no_plot() -> None:
    assert error_plot([replace(DOWN, output_error=None)], "t") is None
    assert error_plot([], "t") is None


VALUES = st.none() | st.floats(0, 1e4) | st.just(float("nan")) | st.just(float("inf"))


@given(
    panels=st.lists(st.lists(st.builds(Point, st.integers(0, 200), VALUES, VALUES, st.text()), max_size=6), max_size=5)
)
def test_whatever_is_plotted_stays_inside_the_page(panels: list[list[Point]]) -> None:
    # XML has no form for some characters, and names of weights have none of them.
    clean = [[replace(p, name=re.sub(r"[^\x20-\ud7ff]", "", p.name)) for p in panel] for panel in panels]
    drawn = small_multiples("t", [Panel("p", points) for points in clean], x_label="x", y_label="y", before="b")
    root = ElementTree.fromstring(drawn)
    for group in root.iter(f"{SVG}g"):
        for circle in group.iter(f"{SVG}circle"):
            assert 56 <= float(circle.get("cx", "nan")) <= 408
            assert 26 <= float(circle.get("cy", "nan")) <= 136
    assert "nan" not in drawn.lower().replace("nan %", "")
