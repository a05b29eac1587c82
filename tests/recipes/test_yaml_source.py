"""YAML with the place of everything in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from inferencex.formats.errors import OptionError, RecipeError
from inferencex.recipes.yaml_source import MAX_SIZE, parse_yaml, read_yaml


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int
    inner: list[Inner]


def test_places() -> None:
    source = parse_yaml("number: 3\ninner:\n  - name: x\n  - {name: y}\n", "f.yaml")
    assert source.document == {"number": 3, "inner": [{"name": "x"}, {"name": "y"}]}
    assert source.where(()) == "f.yaml:1:1" and source.where(("number",)) == "f.yaml:1:9"
    assert source.where(("number",), key=True) == "f.yaml:1:1"
    assert source.where(("inner", 1, "name")) == "f.yaml:4:12"
    assert source.where(("inner", 1, "a union's tag", "name")) == "f.yaml:4:12", "parts that are not there are passed"
    assert source.where(("inner", 7)) == "f.yaml:3:3", "or else what is around it"
    assert str(source.error(("inner", 0), "is wrong")) == "f.yaml:3:5: is wrong"


def test_everything_wrong_is_told_at_its_place() -> None:
    source = parse_yaml("nummer: 3\ninner:\n  - name: [1]\n  - {}\n", "f.yaml")
    with pytest.raises(RecipeError) as caught:
        source.validate(Outer)
    lines = str(caught.value).splitlines()
    assert "f.yaml:1:1: number is missing" in lines
    assert "f.yaml:1:1: nummer is not known here; known are number, inner" in lines
    assert any(line.startswith("f.yaml:3:11: inner.0.name is [1]: ") for line in lines)
    assert "f.yaml:4:5: inner.1.name is missing" in lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "f.yaml:1:5: is not YAML"),
        ("a: 1\na: 2", "f.yaml:2:1: a is given twice"),
        ("a: &x [*x]", "nests or repeats too much"),
        ("a: &a [" + "1, " * 2000 + "]\nb: [" + "*a, " * 20 + "]", "nests or repeats too much"),
        ("[" * 40 + "]" * 40, "nests or repeats too much"),
        ("1: 2", "f.yaml:1:1: the key '1' is not a text"),
        ("? [a]\n: 2", "is not a text"),
        ("a: !!python/object/apply:os.system [id]", "f.yaml:1:4: the tag"),
        ("a: 1\n---\nb: 1", "f.yaml:2:1: is not YAML"),
        ("a: \x00", "is not YAML"),
        ("a: &x\n  <<: 3", "f.yaml:2"),
        ("a: &a {<<: *a}", "nests or repeats too much"),
        ("a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 9}]}}\n" for i in range(1, 9)),
         "nests or repeats too much"),
        ("a: " + "9" * 5000, "f.yaml:1:4: '999"),
        ("a: 0x_", "f.yaml:1:4: '0x_' cannot be read as YAML's int"),
        ("a: !!bool maybe", "f.yaml:1:4: 'maybe' cannot be read as YAML's bool"),
        ("a: !!int ''", "f.yaml:1:4: '' cannot be read as YAML's int"),
    ],
)  # fmt: skip
def test_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "f.yaml")
    assert words in str(caught.value)


def test_dates_stay_texts_and_anchors_work() -> None:
    assert parse_yaml("a: 2026-01-01\nb: &x {c: 1}\nd: *x\ne: {<<: *x, f: 2}", "f").document == {
        "a": "2026-01-01", "b": {"c": 1}, "d": {"c": 1}, "e": {"c": 1, "f": 2}
    }  # fmt: skip
    assert parse_yaml("a: 2026-13-45", "f").document == {"a": "2026-13-45"}


def test_own_keys_go_before_merged_ones_and_earlier_before_later() -> None:
    source = parse_yaml("a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  <<: [*a, *b]\n  x: 5\n", "f.yaml")
    assert source.document["c"] == {"x": 5, "y": 2, "z": 4}
    assert source.where(("c", "x")) == "f.yaml:5:6" and source.where(("c", "z")) == "f.yaml:2:17"


def test_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_yaml(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4")
    with pytest.raises(RecipeError, match="is not UTF-8"):
        read_yaml(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"a" * (MAX_SIZE + 1))
    with pytest.raises(RecipeError, match="the limit for a recipe"):
        read_yaml(tmp_path / "large.yaml")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(RecipeError, match=r"empty.yaml:1:1: "):
        read_yaml(tmp_path / "empty.yaml").validate(Outer)


def test_settings() -> None:
    source = parse_yaml("number: 3\ninner:\n  - name: x\n", "f.yaml")
    changed = source.with_values(["number=4", "inner.x.name=y", "inner.0.more=[1]"])
    assert changed.document == {"number": 4, "inner": [{"name": "y", "more": [1]}]}
    assert source.document["number"] == 3, "the source stays as it is"
    assert changed.where(("number",)) == "--set number=4"
    assert parse_yaml("tasks:\n  piqa:\n", "f").with_values(["tasks.piqa.limit=5"]).document["tasks"]["piqa"] == {
        "limit": 5
    }
    for wrong, words in (
        ("number", "key=value"),
        ("=3", "key=value"),
        ("number=[", "is not YAML"),
        ("number=" + "[" * 5000, "is not YAML"),
        ("number={x: 1, x: 2}", "x is given twice"),
        ("number=!!bool maybe", "cannot be read"),
        ("number.x=3", "number is 3, which has no x"),
        ("inner.5=3", "no entry 5"),
    ):
        with pytest.raises(OptionError, match=words.replace("[", r"\[")):
            source.with_values([wrong])


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, "f.yaml")
    except RecipeError as error:
        assert str(error).startswith("f.yaml")
