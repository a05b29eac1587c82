"""What is wrong with a recipe is said with file, line and column, before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferencex.formats.errors import OptionError, RecipeError
from inferencex.recipes.pipeline.graph import build_graph, read_pipeline

GOOD = """\
name: demo
source: {model: somewhere/model}
conversions:
  - name: a
    options: {quantization: rtn-int4, group_size: 32, exclude: ["*down*"], verify: false, dequantize: true}
  - name: b
    matrix: {quantization: [none, int8-dynamic], dtype: [float32, bfloat16]}
gates:
  - name: quality
    recipe: smoke
    of: [b-*]
    baseline: a
exports:
  - {format: gguf, of: [a]}
publish:
  - to: out/{name}
    artifact: bundle
"""


def steps(text: str, tmp_path: Path, *settings: str) -> list[str]:
    path = tmp_path / "demo.yaml"
    path.write_text(text, encoding="utf-8")
    recipe, yaml = read_pipeline(path, settings)
    return [step.id for step in build_graph(recipe, yaml, tmp_path).steps]


def test_graph(tmp_path: Path) -> None:
    found = steps(GOOD, tmp_path)
    names = ["b-float32-none", "b-float32-int8-dynamic", "b-bfloat16-none", "b-bfloat16-int8-dynamic"]
    assert found[:5] == ["convert:a", *(f"convert:{name}" for name in names)]
    assert found[5:10] == [*(f"evaluate:{name}:quality" for name in names), "export:a:gguf"]
    assert len(found) == 15 and all(step.startswith("publish:") for step in found[10:])


def test_options_become_arguments(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(GOOD, encoding="utf-8")
    recipe, yaml = read_pipeline(path)
    step = build_graph(recipe, yaml, tmp_path).steps[0]
    assert step.arguments == [  # type: ignore[attr-defined]
        "--dequantize", "--exclude=*down*", "--group-size=32", "--quantization=rtn-int4", "--no-verify"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("group_size: 32", "group_sizes: 32", "5:39", "did you mean group-size?"),
        ("group_size: 32", "group_size: many", "5:51", "expected a whole number"),
        ("verify: false", "verify: 3", "5:84", "expected true or false"),
        ("rtn-int4", "rtn-int4x", "5:29", "rtn-int4x"),
        ("dequantize: true", "output: x", "5:91", "the pipeline sets this option itself"),
        ("source: {model: somewhere/model}", "source: {modle: x}", "2:1", "source.model is missing"),
        ("source: {model: somewhere/model}", "source: {modle: x}", "2:10", "modle is not known here"),
        ("source: {model: somewhere/model}", "source: {model: 3}", "2:17", "should be a valid string"),
        ("name: b", "name: a/b", "6:11", "should match pattern"),
        ("name: b\n    matrix", "name: a\n    options: {}\n  - name: a\n    matrix2", "9:5", "matrix2 is not known"),
        ("dtype: [float32, bfloat16]", "dtypes: [x]", "7:50", "no such option"),
        ("recipe: smoke", "recipe: nowhere.yaml", "10:13", "nowhere.yaml"),
        ("of: [b-*]", "of: [c]", "11:10", "no conversion is named c; there are a, b-float32-none"),
        ("baseline: a", "baseline: nothing", "12:15", "neither source, nor a conversion"),
        ("format: gguf", "format: ggml", "14:14", "there is no format ggml; known are"),
        ("out/{name}", "out", "16:9", "published to twice"),
        ("out/{name}", "out/{nam}", "16:9", "only {name} and {recipe}"),
        ("out/{name}", "hf://owner/{name}/x", "16:9", "is not of the form hf://OWNER/NAME"),
        ("out/{name}", "nowhere://{name}", "16:9", "nowhere"),
        ("artifact: bundle", "artifact: onnx", "17:15", "a is not exported to onnx"),
        ("artifact: bundle", "sign: key", "17:11", "inferencex sign makes one"),
        ("name: demo", "name: demo\nname: twice", "2:1", "name is given twice"),
    ],
)
def test_errors_say_where(old: str, new: str, place: str, words: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(RecipeError) as caught:
        steps(GOOD.replace(old, new, 1), tmp_path)
    assert f"{tmp_path / 'demo.yaml'}:{place}: " in str(caught.value) and words in str(caught.value)


def test_settings(tmp_path: Path) -> None:
    found = steps(GOOD, tmp_path, "gates=[]", "conversions.b.matrix.dtype=[float32]", "publish=[]")
    assert found == ["convert:a", "convert:b-float32-none", "convert:b-float32-int8-dynamic", "export:a:gguf"]
    with pytest.raises(RecipeError, match=r"^--set conversions\.a\.options\.group_size=x: group_size: is 'x'"):
        steps(GOOD, tmp_path, "conversions.a.options.group_size=x")
    with pytest.raises(OptionError, match=r"the list has no entry c; give an index below 2 or one of the names a, b"):
        steps(GOOD, tmp_path, "conversions.c.options={}")


def test_a_matrix_of_thousands_is_refused(tmp_path: Path) -> None:
    sizes = ", ".join(str(size) for size in range(16, 300))
    with pytest.raises(RecipeError, match="more than 200 conversions"):
        steps(GOOD, tmp_path, f"conversions.b.matrix.group_size=[{sizes}]")
