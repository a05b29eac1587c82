"""Windows to calibrate on: exactly as asked for, apart from those held out, recorded, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.convert.calibrate.data import CalibrationOptions, CalibrationSet, load_calibration
from inferencex.formats.errors import OptionError, SourceError
from inferencex.runtime.text import Tokenizer
from tests.convert.calibrate import tokenizer_files
from tests.convert.calibrate.tokenizer_files import VOCABULARY, numbered_lines


def _load(folder: Path, source: str | Path, *, begins: bool = False, **options: int) -> CalibrationSet:
    files = tokenizer_files.write(folder / f"model-{begins}", begins=begins)
    asked = CalibrationOptions(str(source), **{"samples": 8, "length": 32, "held_out": 4, **options})
    return load_calibration(asked, files, vocab_size=VOCABULARY)


def _text(folder: Path, lines: int = 2000) -> Path:
    path = folder / "text.txt"
    path.write_text(numbered_lines(lines), encoding="utf-8")
    return path


def _decoded(folder: Path, ids: NDArray[np.int64]) -> list[str]:
    tokenizer = Tokenizer.load(folder / "model-False")
    return [tokenizer.decode(row.tolist()) for row in ids]


def test_windows_are_of_the_text_and_all_over_it(tmp_path: Path) -> None:
    path = _text(tmp_path)
    found = _load(tmp_path, path, samples=16)
    assert found.token_ids.shape == (16, 32)
    assert found.held_out.shape == (4, 32)
    assert found.token_ids.dtype == found.held_out.dtype == np.int64
    text = path.read_text()
    places = [text.index(piece) for piece in _decoded(tmp_path, found.token_ids)]
    held = [text.index(piece) for piece in _decoded(tmp_path, found.held_out)]
    assert places == sorted(places)
    assert places[0] < len(text) / 4
    assert places[-1] > len(text) * 3 / 4
    assert len(set(places + held)) == 20


def test_the_record_says_where_they_come_from(tmp_path: Path) -> None:
    found = _load(tmp_path, _text(tmp_path), seed=3)
    assert json.loads(json.dumps(found.source)) == found.source
    assert found.source | {"sha256": "", "files": []} == {
        "name": "text.txt",
        "kind": "local",
        "files": [],
        "seed": 3,
        "samples": 8,
        "length": 32,
        "held_out": 4,
        "prefix": [],
        "sha256": "",
    }
    assert str(tmp_path) not in json.dumps(found.source)
    assert len(found.source["sha256"]) == 64


def test_the_same_seed_gives_the_same_windows(tmp_path: Path) -> None:
    path = _text(tmp_path)
    one, again, other = (_load(tmp_path, path, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.token_ids, again.token_ids)
    assert np.array_equal(one.held_out, again.held_out)
    assert one.source == again.source
    assert one.source["sha256"] != other.source["sha256"]


def test_every_window_begins_as_a_prompt_does(tmp_path: Path) -> None:
    found = _load(tmp_path, _text(tmp_path), begins=True)
    for ids in (found.token_ids, found.held_out):
        assert (ids[:, 0] == 0).all()
        assert (ids[:, 1:] != 0).all()
    assert found.token_ids.shape == (8, 32)
    assert found.source["prefix"] == [0]


def test_chats_are_rendered_and_begin_once(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"the rain {i}"}, {"role": "assistant", "content": f"river {i}"}]}
        for i in range(300)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = _load(tmp_path, path, begins=True)
    assert (found.token_ids[:, 0] == 0).all()
    assert (found.token_ids[:, 1:] != 0).all()
    text = "".join(_decoded(tmp_path, _load(tmp_path, path).token_ids))
    assert "[user] the rain" in text
    assert "\n[assistant] river" in text


def test_chats_need_a_template(tmp_path: Path) -> None:
    files = tokenizer_files.write(tmp_path / "model", chat_template=None)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(OptionError, match="the model has no chat template"):
        load_calibration(CalibrationOptions(str(path)), files, vocab_size=VOCABULARY)


def test_a_short_text_says_what_would_fit(tmp_path: Path) -> None:
    path = _text(tmp_path, lines=20)
    with pytest.raises(OptionError, match=r"found (\d+) tokens, need 2,080 .*--calibration-samples to (\d+)") as caught:
        _load(tmp_path, path, samples=64)
    words = str(caught.value).replace(",", "").split()
    samples = int(words[words.index("--calibration-samples") + 2])
    found = _load(tmp_path, path, samples=samples, held_out=16)
    assert found.token_ids.shape == (samples, 32)
    assert len(found.held_out) == 1
    with pytest.raises(OptionError, match="found"):
        _load(tmp_path, path, samples=samples + 1)


def test_the_length_that_is_offered_fits(tmp_path: Path) -> None:
    path = _text(tmp_path, lines=60)
    with pytest.raises(OptionError, match="or --calibration-length to") as caught:
        _load(tmp_path, path, samples=6, length=400, begins=True)
    length = int(str(caught.value).split("--calibration-length to ")[1].split(",")[0])
    assert _load(tmp_path, path, samples=6, length=length, begins=True).token_ids.shape == (6, length)
    with pytest.raises(OptionError, match="found"):
        _load(tmp_path, path, samples=6, length=length + 1, begins=True)


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "text.txt").write_text(content)
    with pytest.raises(OptionError, match="holds no text"):
        _load(tmp_path, tmp_path / "text.txt")


def test_all_of_a_text_is_used_where_little_is_more_than_enough_characters(tmp_path: Path) -> None:
    """Tokens of many characters: the first estimate of how much to read is too low, and more is read."""
    path = tmp_path / "text.txt"
    path.write_text("the rain in the plain and the river that runs through it\n" * 600)
    found = _load(tmp_path, path, samples=170, held_out=4)
    assert found.token_ids.shape == (170, 32)


def test_builtin_needs_nothing(tmp_path: Path) -> None:
    found = _load(tmp_path, "builtin", samples=32, length=64)
    assert found.token_ids.shape == (32, 64)
    assert found.source["name"] == found.source["kind"] == "builtin"
    assert found.source["python"].startswith("3.")


def test_text_of_the_model_itself(tmp_path: Path) -> None:
    files = tokenizer_files.write(tmp_path / "model", begins=True)

    def sampler(starts: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
        assert seed == 4
        return np.concatenate([starts, np.full((len(starts), length - starts.shape[1]), 7)], axis=1)

    options = CalibrationOptions("self", samples=6, length=32, held_out=3, seed=4)
    found = load_calibration(options, files, vocab_size=VOCABULARY, sampler=sampler)
    assert found.token_ids.shape == (6, 32)
    assert found.held_out.shape == (3, 32)
    assert (found.token_ids[:, 0] == 0).all()
    assert (found.token_ids[:, 1] > 1).all(), "special tokens do not begin a text"
    assert found.source["name"] == found.source["kind"] == "self"
    with pytest.raises(OptionError, match="sampled"):
        load_calibration(options, files, vocab_size=VOCABULARY)


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    found = load_calibration(CalibrationOptions("random", samples=4, length=32), {}, vocab_size=50)
    assert found.token_ids.shape == (4, 32)
    assert found.token_ids.max() < 50
    with pytest.raises(SourceError, match=r"no tokenizer\.json .*--calibration self or random"):
        load_calibration(CalibrationOptions("builtin"), {}, vocab_size=50)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    files = tokenizer_files.write(tmp_path / "model")
    options = CalibrationOptions(str(_text(tmp_path)), samples=8, length=32)
    with pytest.raises(SourceError, match=r"gives the id \d+, and the model knows 100 tokens"):
        load_calibration(options, files, vocab_size=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "--calibration-samples 0"),
        ({"length": 31}, "--calibration-length 31: expected .* from 32"),
        ({"held_out": 0}, "held_out is 0"),
        ({"seed": -1}, "--calibration-seed -1: expected a number from 0"),
        ({"source": ""}, "expected builtin, self, a path"),
        ({"source": "builtin#"}, "expected builtin, self, a path"),
        ({"source": "missing.txt"}, r"missing\.txt: there is no such file"),
        ({"source": "not a dataset"}, "neither a file nor a dataset"),
    ],
)
def test_options_are_checked_before_any_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CalibrationOptions(**options)  # type: ignore[arg-type]


def test_a_column_may_follow_the_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"body": line, "text": "no"} for line in numbered_lines(800).splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = _load(tmp_path, f"{path}#body")
    assert found.source["column"] == "body"
    assert "rain" in "".join(_decoded(tmp_path, found.token_ids))


def test_chats_are_the_same_on_every_day(tmp_path: Path) -> None:
    dated = "[{{ strftime_now('%d %B %Y') }}]{% for m in messages %} {{ m.content }}{% endfor %}\n"
    files = tokenizer_files.write(tmp_path / "model-False", chat_template=dated)
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": f"rain {i}"}]}) for i in range(400)))
    found = load_calibration(CalibrationOptions(str(path), samples=8, length=32), files, vocab_size=VOCABULARY)
    assert "[01 January 2025]" in "".join(_decoded(tmp_path, found.token_ids))


def test_the_files_of_a_checkpoint_may_lie_apart(tmp_path: Path) -> None:
    """A tokenizer made from an older form of it lies in a folder of its own."""
    files = tokenizer_files.write(tmp_path / "model")
    (tmp_path / "apart").mkdir()
    files["tokenizer_config.json"] = files["tokenizer_config.json"].rename(tmp_path / "apart" / "settings.json")
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": f"rain {i}"}]}) for i in range(400)))
    found = load_calibration(CalibrationOptions(str(path), samples=8, length=32), files, vocab_size=VOCABULARY)
    assert found.token_ids.shape == (8, 32)
