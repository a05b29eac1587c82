"""A compact tokenizer.json is the same tokenizer in fewer bytes, or the file as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from inferencex.convert.compact_tokenizer import compact_tokenizer

_PARTS = st.lists(st.sampled_from(["a", "b", " ", "#version", "\n", "ü", "▁", '"']), min_size=1, max_size=3).map(
    "".join
)


def _trained(path: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat, and the dog saw that"] * 3, trainer)
    tokenizer.save(str(path), pretty=True)
    return tokenizer


def test_the_tokenizer_is_the_same_and_the_file_smaller(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = _trained(path)
    compact = compact_tokenizer(path)
    assert len(compact) < len(path.read_bytes()) / 2
    model = json.loads(compact)["model"]
    assert all(isinstance(merge, str) for merge in model["merges"]) and list(model["vocab"]) == sorted(model["vocab"])
    again = tokenizers.Tokenizer.from_buffer(compact)
    assert again.to_str() == tokenizer.to_str()
    assert again.encode("the cat<end> ü").ids == tokenizer.encode("the cat<end> ü").ids


@given(merges=st.lists(st.tuples(_PARTS, _PARTS), max_size=4))
def test_no_merge_is_lost_whatever_its_parts_are(tmp_path_factory: pytest.TempPathFactory, merges: Any) -> None:
    path = tmp_path_factory.mktemp("merges") / "tokenizer.json"
    vocab = {text: None for first, second in merges for text in (first, second, first + second)}
    entries = {text: place for place, text in enumerate(vocab)}
    tokenizers.Tokenizer(models.BPE(vocab=entries, merges=merges)).save(str(path))
    compact = tokenizers.Tokenizer.from_buffer(compact_tokenizer(path))
    assert compact.to_str() == tokenizers.Tokenizer.from_file(str(path)).to_str()


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram([("<unk>", 0.0), ("a", -1.25e-7), ("ab", -3.3333333333333335)], unk_id=0, byte_fallback=False),
        models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"),
        models.WordLevel({"a": 0, "ü": 1}, unk_token="a"),
    ],
)
def test_other_models_are_only_written_without_spaces(tmp_path: Path, model: Any) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path), pretty=True)
    compact = compact_tokenizer(path)
    assert len(compact) < len(path.read_bytes())
    assert tokenizers.Tokenizer.from_buffer(compact).to_str() == tokenizers.Tokenizer.from_file(str(path)).to_str()


def test_a_file_that_json_reads_otherwise_stays_as_it_is(tmp_path: Path) -> None:
    """A vocabulary with the same entry twice: what a JSON library makes of it is its own choice."""
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(path), pretty=False)
    path.write_text(path.read_text().replace('"a":0', '"a":0,"a":7'))
    compact = compact_tokenizer(path)
    assert tokenizers.Tokenizer.from_buffer(compact).to_str() == tokenizers.Tokenizer.from_file(str(path)).to_str()
