from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from inferencex.convert.source.hub import TransportError
from inferencex.convert.source.open import open_checkpoint
from inferencex.formats.errors import SourceError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the network forbidden."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot_download = huggingface_hub.snapshot_download

    def with_cache(*args: Any, **kwargs: Any) -> Any:
        return snapshot_download(*args, cache_dir=folder, **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", with_cache)
    return folder


def put_in_cache(cache: Path, source: Path, *, ref: str = "main") -> Path:
    repository = cache / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(source, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / ref).write_text(COMMIT)
    return snapshot


def test_cached_model_opens_offline(cache: Path, llama_directory: Path) -> None:
    put_in_cache(cache, llama_directory)
    checkpoint = open_checkpoint("someone/tiny")
    assert checkpoint.kind == "hub" and checkpoint.revision == COMMIT
    assert checkpoint.provenance()["id"] == "someone/tiny"
    assert set(checkpoint.tensors) == {"a", "b"}


def test_revision_is_a_branch_or_a_commit(cache: Path, llama_directory: Path) -> None:
    put_in_cache(cache, llama_directory, ref="v2")
    assert open_checkpoint("someone/tiny", revision="v2").revision == COMMIT
    assert open_checkpoint("someone/tiny", revision=COMMIT).revision == COMMIT
    with pytest.raises(SourceError, match=r"HF_HUB_OFFLINE is set, and the cache .* does not hold it"):
        open_checkpoint("someone/tiny")


def test_offline_and_not_cached(cache: Path) -> None:
    with pytest.raises(SourceError, match=r"someone/tiny at revision v1: HF_HUB_OFFLINE is set.*download it first"):
        open_checkpoint("someone/tiny", revision="v1")


def test_interrupted_download_is_named(cache: Path, sharded_directory: Path) -> None:
    snapshot = put_in_cache(cache, sharded_directory)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match="not there: model-00002"):
        open_checkpoint("someone/tiny")


class FakeHub:
    """Stands in for `snapshot_download`, over a folder of files."""

    def __init__(self, files: Path, destination: Path) -> None:
        self.files, self.destination = files, destination
        self.fetched: set[str] = set()

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: Sequence[str]) -> str:
        assert repo_id == "someone/tiny"
        target = self.destination / COMMIT
        for path in self.files.rglob("*"):
            name = path.relative_to(self.files).as_posix()
            if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                self.fetched.add(name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / name)
        return str(target)


@pytest.fixture
def hub(llama_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    for name in ["tokenizer.json", "LICENSE", "code.py", "pytorch_model.bin", "onnx/model.onnx", "original/model.pth"]:
        (llama_directory / name).parent.mkdir(exist_ok=True)
        (llama_directory / name).write_text("{}")
    fake = FakeHub(llama_directory, tmp_path / "fetched")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_only_needed_files_are_fetched(hub: FakeHub) -> None:
    open_checkpoint("someone/tiny", allow_pickle=True)
    assert hub.fetched == {"config.json", "tokenizer.json", "LICENSE", "model.safetensors"}


def test_code_is_fetched_only_when_trusted(hub: FakeHub) -> None:
    open_checkpoint("someone/tiny", trust_remote_code=True)
    assert "code.py" in hub.fetched


def test_random_weights_fetch_no_weights(hub: FakeHub) -> None:
    checkpoint = open_checkpoint("someone/tiny", random_weights=True, seed=7)
    assert hub.fetched == {"config.json", "tokenizer.json", "LICENSE"}
    assert checkpoint.kind == "random" and checkpoint.provenance()["seed"] == 7


def test_pickles_are_fetched_only_on_request_and_where_there_is_nothing_else(hub: FakeHub) -> None:
    (hub.files / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, hub.files / "pytorch_model.bin")
    with pytest.raises(SourceError, match="no weights"):
        open_checkpoint("someone/tiny")
    assert "pytorch_model.bin" not in hub.fetched
    assert set(open_checkpoint("someone/tiny", allow_pickle=True).tensors) == {"a"}


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (GatedRepoError("gated", response=RESPONSE), "someone/tiny at revision v9: access is gated.*hf auth login"),
        (RepositoryNotFoundError("none", response=RESPONSE), "not found on the hub.*HF_TOKEN"),
        (RevisionNotFoundError("none", response=RESPONSE), "no revision 'v9'"),
        (LocalEntryNotFoundError("none"), "the hub cannot be reached"),
        (HfHubHTTPError("busy", response=RESPONSE), "refused the download"),
        (ConnectionError("reset"), "download failed"),
        (TransportError("timed out"), "download failed"),
    ],
)
def test_hub_failures_say_what_to_do(failure: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(SourceError, match=message):
        open_checkpoint("someone/tiny", revision="v9")
