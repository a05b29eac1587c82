"""Publishing to folders, to file systems of fsspec, and to the hub."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import huggingface_hub
import pytest

from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline.destinations import HubDestination, LocalDestination, destination, shown
from inferencex.recipes.pipeline.hub import transport_error
from inferencex.recipes.pipeline.schedule import StepResult
from inferencex.recipes.provenance.checksums import SUMS_FILE, write_checksums
from inferencex.recipes.provenance.statement import STATEMENT_FILE
from inferencex.recipes.provenance.verify import verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    (path / "inner").mkdir(parents=True)
    (path / "a").write_text("a", encoding="utf-8")
    (path / "inner/b").write_text("b", encoding="utf-8")
    (path / STATEMENT_FILE).write_text("{}", encoding="utf-8")
    write_checksums(path)
    return path


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_local_folder(folder: Path, tmp_path: Path, scheme: str) -> None:
    there = destination(f"{scheme}{tmp_path}/there")
    assert there.checksums() is None
    there.put(folder)
    assert there.checksums() == (folder / SUMS_FILE).read_bytes()
    assert (tmp_path / "there/inner/b").read_text(encoding="utf-8") == "b"
    (folder / "inner/b").unlink()
    (folder / "a").write_text("c", encoding="utf-8")
    write_checksums(folder)
    there.put(folder)
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [SUMS_FILE, "a", STATEMENT_FILE], (
        "nothing is left over"
    )
    assert not list(tmp_path.glob(".there*"))


def test_foreign_files_are_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/thesis.txt").touch()
    with pytest.raises(RecipeError, match=r"were not published there: thesis\.txt"):
        LocalDestination(tmp_path / "there").put(folder)
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="is not a folder"):
        LocalDestination(tmp_path / "file").put(folder)


def test_checksums_of_others_do_not_make_a_folder_ours(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/thesis.txt").touch()
    write_checksums(tmp_path / "there")
    with pytest.raises(RecipeError, match=r"were not published there: SHA256SUMS, thesis\.txt"):
        LocalDestination(tmp_path / "there").put(folder)
    assert (tmp_path / "there/thesis.txt").is_file()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sftp://me:secret@host/a@b", "sftp://...@host/a@b"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("hf://me/model@branch", "hf://me/model@branch"),
        ("published/a@b", "published/a@b"),
    ],
)
def test_passwords_are_not_shown(url: str, words: str) -> None:
    assert shown(url) == words


def test_a_published_folder_is_never_half_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, target: Path) -> None:
        raise OSError("no space")

    LocalDestination(tmp_path / "there").put(folder)
    before = (tmp_path / "there" / SUMS_FILE).read_bytes()
    monkeypatch.setattr("shutil.copyfile", broken)
    with pytest.raises(OSError, match="no space"):
        LocalDestination(tmp_path / "there").put(folder)
    assert (tmp_path / "there" / SUMS_FILE).read_bytes() == before and not list(tmp_path.glob(".there*"))


def test_fsspec(folder: Path) -> None:
    there, files = destination("memory://models/x"), fsspec.filesystem("memory")
    assert there.checksums() is None
    there.put(folder)
    assert files.cat_file("/models/x/inner/b") == b"b" and there.checksums() == (folder / SUMS_FILE).read_bytes()
    (folder / "inner/b").unlink()
    write_checksums(folder)
    there.put(folder)
    assert not files.exists("/models/x/inner/b")


def test_interrupted_upload_is_not_taken_for_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = destination("memory://models/y")
    there.put(folder)

    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError("connection lost")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", broken)
    with pytest.raises(RecipeError, match="memory://models/y: cannot be written: connection lost"):
        there.put(folder)
    assert there.checksums() is None


@pytest.mark.parametrize("last", ["a", "inner/b", SUMS_FILE])
def test_an_interrupted_upload_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    root = f"models/left-{last.replace('/', '-')}"
    there, files = destination(f"memory://{root}"), fsspec.filesystem("memory")
    (folder / "old").touch()
    write_checksums(folder)
    there.put(folder)
    (folder / "old").unlink()
    write_checksums(folder)
    put_file = type(files).put_file

    def broken(self: Any, source: str, target: str, **options: Any) -> None:
        if target.endswith(f"/{last}"):
            raise OSError("connection lost")
        put_file(self, source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "put_file", broken)
        with pytest.raises(RecipeError, match="connection lost"):
            there.put(folder)
    assert there.checksums() is None
    there.put(folder)
    assert {path.removeprefix(f"/{root}/") for path in files.find(f"/{root}")} == {
        "a",
        "inner/b",
        STATEMENT_FILE,
        SUMS_FILE,
    }


def test_a_list_that_was_cut_off_is_no_hindrance(folder: Path) -> None:
    there, files = destination("memory://models/cut"), fsspec.filesystem("memory")
    there.put(folder)
    files.pipe_file(f"/models/cut/{SUMS_FILE}.replacing", b"0123")
    there.put(folder)
    assert not files.exists(f"/models/cut/{SUMS_FILE}.replacing")


def test_missing_credentials_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What S3's library raises then is no OSError."""

    class BotoCoreError(Exception):
        pass

    def refused(*arguments: Any, **options: Any) -> None:
        raise BotoCoreError("Unable to locate credentials")

    library = ModuleType("botocore.exceptions")
    monkeypatch.setattr(library, "BotoCoreError", BotoCoreError, raising=False)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", library)
    there = destination("memory://models/z")
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", refused)
    with pytest.raises(RecipeError, match="memory://models/z: cannot be read: Unable to locate credentials"):
        there.put(folder)


def test_a_file_of_another_machine_is_refused() -> None:
    with pytest.raises(RecipeError, match="names the machine published"):
        destination("file://published/model")


def test_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            calls.append(("create_repo", {"name": name, **options}))

        def create_branch(self, name: str, **options: Any) -> None:
            calls.append(("create_branch", {"name": name, **options}))

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload_folder", options))

    before = folder.parent / "before"
    before.write_text("".join(f"{'0' * 64}  {name}\n" for name in ("a", "old[1]")), encoding="utf-8")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *arguments, **options: str(before))
    HubDestination("hf://me/model@int4").put(folder)
    assert [name for name, _ in calls] == ["create_repo", "create_branch", "upload_folder"]
    assert calls[2][1]["repo_id"] == "me/model" and calls[2][1]["revision"] == "int4"
    assert calls[2][1]["folder_path"] == folder
    assert calls[2][1]["delete_patterns"] == ["SHA256SUMS.minisig", "old[[]1]"], "only what was published there"
    for wrong in ("hf://model", "hf:///model", "hf://a/b/c"):
        with pytest.raises(RecipeError, match="is not of the form"):
            destination(wrong)


def test_hub_that_cannot_be_reached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise transport_error()("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    with pytest.raises(RecipeError, match="check the connection"):
        destination("hf://me/demo").put(folder)


def test_unprintable_names_are_refused() -> None:
    with pytest.raises(RecipeError, match="characters"):
        destination("published/\0")


def test_a_pipeline_publishes_what_can_be_verified(
    run_recipe: Callable[..., dict[str, StepResult]], tmp_path: Path
) -> None:
    results = run_recipe(
        "publish=[{to: 'file://" + str(tmp_path) + "/out/{name}', artifact: gguf}, {to: 'memory://p'}]"
    )
    assert {result.state for result in results.values()} == {"done"}
    assert len(verify(tmp_path / "out/int4").checks) == 2
    files = fsspec.filesystem("memory")
    names = {path.rpartition("/")[2] for path in files.ls("/p", detail=False)}
    assert names == {"README.md", "SHA256SUMS", "bom.cdx.json", "bundle.json", "provenance.json", "weights.bin"}
    assert "mean KL" in files.cat_file("/p/README.md").decode()
    files.rm_file("/p/SHA256SUMS")
    again = {step.partition(":")[0]: result.state for step, result in run_recipe(
        "publish=[{to: 'memory://p'}]").items()}  # fmt: skip
    assert again["publish"] == "done", "what is no longer there is published again"
