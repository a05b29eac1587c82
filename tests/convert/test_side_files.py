"""Side files that no runtime could read are found before the conversion starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from inferencex.convert.side_files import check_side_files
from inferencex.formats.errors import SourceError


def _files(folder: Path, **texts: str) -> dict[str, Path]:
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return {path.name: path for path in folder.iterdir() if path.is_file()}


def test_sound_files_pass(tmp_path: Path) -> None:
    check_side_files(_files(tmp_path, tokenizer_config__json="{}", chat_template__jinja="{{ messages }}"))


def test_a_model_without_a_tokenizer_passes(tmp_path: Path) -> None:
    check_side_files({"config.json": tmp_path / "config.json"})


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"]
)
def test_a_damaged_file_is_named_where_it_is(tmp_path: Path, name: str, text: str) -> None:
    files = _files(tmp_path, **{name.replace(".", "__"): text})
    with pytest.raises(SourceError) as caught:
        check_side_files(files)
    assert str(tmp_path / name) in str(caught.value)
    assert "convert the model again" not in str(caught.value)


def test_a_default_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="temperature is -1"):
        check_side_files(_files(tmp_path, generation_config__json='{"do_sample": true, "temperature": -1}'))
