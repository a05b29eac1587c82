"""Bundles are found below the roots, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferencex.runtime.server.errors import Forbidden, InvalidRequest
from inferencex.runtime.server.models.paths import BundlePaths


def bundle(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "bundle.json").write_text("{}")
    (folder / "weights.safetensors").write_bytes(b"12345678")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    bundle(root / "a")
    bundle(root / "team" / "b")
    (root / "empty").mkdir()
    bundle(tmp_path / "secret")
    bundle(tmp_path / "models-of-others" / "c")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "inner").symlink_to(root / "team" / "b")
    (root / "loop").symlink_to(root / "loop")
    return root


def test_names_and_paths_below_a_root_are_found(root: Path) -> None:
    paths = BundlePaths([root])
    assert paths.resolve("a") == root / "a"
    assert paths.resolve("team/b") == paths.resolve("inner") == paths.resolve(str(root / "team" / "b"))
    assert paths.resolve("team/../a") == root / "a"


@pytest.mark.parametrize(
    "escape",
    ["link", "../secret", "a/../../secret", "../models-of-others/c", "..", ".", "/etc", "/", "~", "loop/x/../../.."],
)
def test_nothing_outside_of_the_roots_is_opened_or_told_of(root: Path, escape: str) -> None:
    with pytest.raises((Forbidden, InvalidRequest)) as caught:
        BundlePaths([root]).resolve(escape)
    if escape not in ("~", "loop/x/../../.."):
        assert isinstance(caught.value, Forbidden) and "outside" in str(caught.value)
    absent, present = "../nothing", "../secret"
    messages = []
    for name in (absent, present):
        with pytest.raises(Forbidden) as told:
            BundlePaths([root]).resolve(name)
        messages.append(str(told.value).replace(name, ""))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["empty", "nothing", "a/bundle.json", "", "a\0b", "x" * 300, "x" * 5000])
def test_what_is_no_bundle_is_said_to_be_none(root: Path, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BundlePaths([root]).resolve(name)
    assert caught.value.param == "path"


def test_without_roots_nothing_is_loaded(root: Path) -> None:
    with pytest.raises(Forbidden, match="without a model root"):
        BundlePaths([]).resolve(str(root / "a"))


def test_the_bundles_of_all_roots_are_listed_once(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    bundle(other / "a")
    bundle(other / "z")
    bundle(other / "1" / "2" / "3" / "too-deep")
    bundle(other / ".hidden")
    found = BundlePaths([root, other]).available()
    assert [(each.name, each.size) for each in found] == [("a", 10), ("inner", 10), ("team/b", 10), ("z", 10)]
    assert found[0].path == root / "a"
