"""Where folders are published: a local folder, a repository of the hub, or what fsspec reaches (S3, memory, ...).

`SHA256SUMS` is what makes a published folder complete: it comes last, and says what is there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from inferencex.formats.bundle.staging import Staging
from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline.hashing import visible_files
from inferencex.recipes.pipeline.hub import transport_error
from inferencex.recipes.provenance.checksums import SUMS_FILE, parse_checksums

_HUB = "hf://"


class Destination(Protocol):
    """A place for one folder."""

    def checksums(self) -> bytes | None:
        """Return the checksum file that is there; None where nothing, or nothing complete, is."""
        ...

    def put(self, folder: Path) -> None:
        """Make the place hold the folder's files and no others of ours. Raises RecipeError naming what went wrong."""
        ...


def destination(url: str) -> Destination:
    """Return the destination that a recipe names. Raises RecipeError for one that cannot be."""
    if not url.isprintable():
        raise RecipeError(f"{url!r}: has characters that no place to publish to can have")
    if url.startswith(_HUB):
        return HubDestination(url)
    if url.startswith("file://"):
        return LocalDestination(Path(unquote(urlsplit(url).path)))
    if "://" in url:
        return FsspecDestination(url)
    return LocalDestination(Path(url).expanduser())


class LocalDestination:
    """A folder on this machine, which takes its place in one step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checksums(self) -> bytes | None:
        """See `Destination`."""
        sums = self.path / SUMS_FILE
        return sums.read_bytes() if sums.is_file() else None

    def put(self, folder: Path) -> None:
        """See `Destination`; a folder with files that nobody published is left alone."""
        self._refuse_foreign()
        staging = Staging(self.path)
        try:
            for file in visible_files(folder):
                target = staging.path / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            staging.commit()
        except BaseException:
            staging.discard()
            raise

    def _refuse_foreign(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir() or self.path.is_symlink():
            raise RecipeError(f"{self.path}: exists and is not a folder; publish to another one")
        present = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if not path.is_dir()}
        sums = self.checksums()
        known = set() if sums is None else {*parse_checksums(sums, str(self.path / SUMS_FILE)), SUMS_FILE}
        foreign = sorted(name for name in present - known if not name.startswith(SUMS_FILE + "."))
        if foreign:
            raise RecipeError(
                f"{self.path}: holds files that were not published there: {', '.join(foreign[:5])}; move them, or "
                "publish to another folder"
            )


class FsspecDestination:
    """A folder of a file system that fsspec knows: s3://, gs://, memory:// and others."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise RecipeError(f"{url}: needs the package fsspec; run: pip install 'inferencex[pipeline]'") from error
        self.url = url
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise RecipeError(f"{url}: {error}") from error
        self._root = root.rstrip("/")

    def checksums(self) -> bytes | None:
        """See `Destination`."""
        try:
            data = self._system.cat_file(f"{self._root}/{SUMS_FILE}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecipeError(f"{self.url}: cannot be read: {error}") from error
        return bytes(data)

    def put(self, folder: Path) -> None:
        """See `Destination`; until it is done there are no checksums, so that nobody takes it for complete."""
        names = [file.relative_to(folder).as_posix() for file in visible_files(folder)]
        old = self.checksums()
        stale = set() if old is None else set(parse_checksums(old, f"{self.url}/{SUMS_FILE}")) - set(names)
        try:
            if old is not None:
                self._system.rm_file(f"{self._root}/{SUMS_FILE}")
            for name in sorted(names, key=lambda name: name == SUMS_FILE):
                target = f"{self._root}/{name}"
                self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(folder / name), target)
            for name in sorted(stale):
                if self._system.exists(f"{self._root}/{name}"):
                    self._system.rm_file(f"{self._root}/{name}")
        except OSError as error:
            raise RecipeError(f"{self.url}: cannot be written: {error}") from error


class HubDestination:
    """A model repository of the Hugging Face hub; one commit holds the whole folder."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._id, _, branch = url.removeprefix(_HUB).partition("@")
        self._branch = branch or None
        if self._id.count("/") != 1 or not all(self._id.split("/")):
            raise RecipeError(f"{url}: is not of the form hf://OWNER/NAME or hf://OWNER/NAME@BRANCH")

    def checksums(self) -> bytes | None:
        """See `Destination`."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

        try:
            return Path(hf_hub_download(self._id, SUMS_FILE, revision=self._branch)).read_bytes()
        except (EntryNotFoundError, RepositoryNotFoundError):
            return None
        except (transport_error(), OSError) as error:
            raise RecipeError(f"{self.url}: the hub does not answer: {error}") from error

    def put(self, folder: Path) -> None:
        """See `Destination`."""
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            api.create_repo(self._id, exist_ok=True)
            if self._branch is not None:
                api.create_branch(self._id, branch=self._branch, exist_ok=True)
            api.upload_folder(
                repo_id=self._id,
                folder_path=folder,
                revision=self._branch,
                commit_message="Publish with inferencex pipeline",
                delete_patterns="*",
            )
        except (transport_error(), OSError) as error:
            raise RecipeError(
                f"{self.url}: the hub did not take the upload ({error}); check the connection, HF_TOKEN and that it "
                "may write there"
            ) from error
