"""Datasets of the hub, with a stand-in for the package that streams them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from inferencex.convert.calibrate import hub_dataset
from inferencex.convert.calibrate.documents import Reading
from inferencex.convert.calibrate.hub_dataset import HubDataset
from inferencex.formats.errors import OptionError

ROWS = {
    (None, "train"): [{"text": f"train {i}"} for i in range(50)],
    (None, "test_sft"): [{"messages": [{"role": "user", "content": "hi"}]}],
    ("en", "train"): [{"text": "english"}],
    ("en", "validation"): [{"text": "validation"}],
    ("other", "train"): [{"id": 1, "body": "words"}],
}


class _Stream:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def shuffle(self, seed: int, buffer_size: int) -> _Stream:
        assert buffer_size > 0
        turn = seed % len(self.rows)
        return _Stream(self.rows[turn:] + self.rows[:turn])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.fixture(autouse=True)
def datasets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package `datasets` that knows one dataset, and fails as the real one does."""
    package, exceptions = ModuleType("datasets"), ModuleType("datasets.exceptions")
    package.__spec__ = ModuleSpec("datasets", None)

    class DatasetsError(Exception):
        pass

    def load_dataset(name_or_path: str, name: str | None, split: str, streaming: bool) -> _Stream:
        assert streaming
        if name_or_path != "some/data":
            raise ConnectionError(f"Couldn't reach '{name_or_path}' on the Hub\nmore lines")
        if name not in {config for config, _ in ROWS}:
            raise ValueError(f"BuilderConfig '{name}' not found. Available: ['en', 'other']")
        if (name, split) not in ROWS:
            raise ValueError(f"Bad split: {split}. Available splits: ['train']")
        return _Stream(ROWS[name, split])

    exceptions.DatasetsError = DatasetsError  # type: ignore[attr-defined]
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)
    return package


def _texts(name: str, column: str | None = None, seed: int = 0) -> list[str]:
    reading = Reading(lambda messages: f"chat of {len(messages)}", seed)
    return [d.text for d in HubDataset(name, column).documents(reading)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("some/data", "train 0"),
        ("some/data:en", "english"),
        ("some/data:en:validation", "validation"),
        ("some/data::train", "train 0"),
        ("some/data:test_sft", "chat of 1"),
        ("some/data::test_sft", "chat of 1"),
    ],
)
def test_configurations_and_splits(name: str, expected: str) -> None:
    assert _texts(name)[0] == expected


def test_the_seed_decides_the_order_and_only_what_is_used_is_read() -> None:
    assert _texts("some/data", seed=7)[0] == "train 7"
    assert len(list(islice(HubDataset("some/data").documents(Reading(str)), 3))) == 3


def test_columns() -> None:
    assert _texts("some/data:other", "body") == ["words"]
    assert HubDataset("some/data:other", "body").facts() == {"column": "body"}
    with pytest.raises(OptionError, match=r"some/data:other, row 1 .* columns are 'id', 'body'.*SOURCE#COLUMN"):
        _texts("some/data:other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/data", "cannot be read .Couldn't reach 'no/data' on the Hub.; .*local file, or builtin"),
        ("some/data:nl", r"BuilderConfig 'nl' not found.*; Bad split: nl"),
        ("some/data:en:dev", "Bad split: dev"),
        ("some/data:nl:train", "BuilderConfig 'nl' not found"),
    ],
)
def test_what_the_hub_does_not_have(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        _texts(name)


@pytest.mark.parametrize("name", ["a/b/c", "some data", "a:b:c:d", "", "http://x/y"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(OptionError, match=r"neither a file nor a dataset; expected builtin"):
        HubDataset(name)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_dataset, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"needs the package datasets; install inferencex\[datasets\]"):
        HubDataset("some/data")


def test_a_dataset_of_empty_rows_ends(datasets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_dataset, "_MOST_EMPTY", 20)
    datasets.load_dataset = lambda *args, **kwargs: _Stream([{"text": ""}] * 30)  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="its first 20 rows hold no text"):
        _texts("some/data")
