"""Where folders are published: a local folder, a repository of the hub, or what fsspec reaches (S3, memory, ...).

`SHA256SUMS` is what makes a published folder complete: it comes last, and says what is there.
"""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from inferencex.formats.bundle.staging import Staging
from inferencex.formats.errors import BundleError, RecipeError
from inferencex.recipes.pipeline.hashing import visible_files
from inferencex.recipes.pipeline.hub import transport_error
from inferencex.recipes.provenance.checksums import SIGNATURE_FILE, SUMS_FILE, checksums_text, parse_checksums
from inferencex.recipes.provenance.statement import STATEMENT_FILE

_HUB = "hf://"
_REPLACING_FILE = f"{SUMS_FILE}.replacing"
_CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("aiohttp", "ClientError"),
)


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
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise RecipeError(
                f"{url}: names the machine {parts.netloc}; a path on this one is file:///{parts.netloc}/..."
            )
        return LocalDestination(Path(unquote(parts.path)))
    if "://" in url:
        return FsspecDestination(url)
    return LocalDestination(Path(url).expanduser())


def shown(url: str) -> str:
    """Return a destination for logs and reports: without the user and password that a URL may hold."""
    user, at, _ = urlsplit(url).netloc.rpartition("@") if "://" in url else ("", "", "")
    return url.replace(f"{user}{at}", "...@", 1) if at else url


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
        listed = {} if sums is None else parse_checksums(sums, str(self.path / SUMS_FILE))
        # Others write checksums too: what was published has a statement among them.
        known = {*listed, SUMS_FILE, SIGNATURE_FILE} if STATEMENT_FILE in listed else set()
        foreign = sorted(present - known)
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
        self.url = shown(url)
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise RecipeError(f"{self.url}: {error}") from error
        self._root = root.rstrip("/")

    def checksums(self) -> bytes | None:
        """See `Destination`."""
        return self._read(SUMS_FILE)

    def _read(self, name: str) -> bytes | None:
        try:
            data = self._system.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        except _client_errors() as error:
            raise RecipeError(f"{self.url}: cannot be read: {error}") from error
        return bytes(data)

    def put(self, folder: Path) -> None:
        """See `Destination`; until it is done there are no checksums, so that nobody takes it for complete."""
        names = [file.relative_to(folder).as_posix() for file in visible_files(folder)]
        old = self.checksums()
        ours = {} if old is None else parse_checksums(old, f"{self.url}/{SUMS_FILE}")
        interrupted = self._read(_REPLACING_FILE)
        if interrupted is not None:
            with suppress(BundleError):  # cut off while it was written, which is before anything was changed
                ours |= parse_checksums(interrupted, f"{self.url}/{_REPLACING_FILE}")
        stale = set(ours) - set(names)
        ours |= parse_checksums((folder / SUMS_FILE).read_bytes(), str(folder / SUMS_FILE))
        if SIGNATURE_FILE not in names:
            stale.add(SIGNATURE_FILE)
        try:
            # What was there and what will be: the run after an interrupted one knows what to remove.
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(f"{self._root}/{_REPLACING_FILE}", checksums_text(ours).encode())
            if old is not None:
                self._system.rm_file(f"{self._root}/{SUMS_FILE}")
            for name in names:
                if name != SUMS_FILE:
                    self._put_file(folder, name)
            for name in sorted(stale):
                if self._system.exists(f"{self._root}/{name}"):
                    self._system.rm_file(f"{self._root}/{name}")
            self._system.rm_file(f"{self._root}/{_REPLACING_FILE}")
            self._put_file(folder, SUMS_FILE)
        except _client_errors() as error:
            raise RecipeError(f"{self.url}: cannot be written: {error}") from error

    def _put_file(self, folder: Path, name: str) -> None:
        target = f"{self._root}/{name}"
        self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._system.put_file(str(folder / name), target)


def _client_errors() -> tuple[type[Exception], ...]:
    """Return what file systems of fsspec raise for a place that cannot be reached, or no credentials for it."""
    loaded = [(sys.modules.get(module), name) for module, name in _CLIENT_ERRORS]
    return (OSError, *(getattr(module, name) for module, name in loaded if module is not None))


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
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            return Path(hf_hub_download(self._id, SUMS_FILE, revision=self._branch)).read_bytes()
        except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
            return None
        except (transport_error(), OSError) as error:
            raise RecipeError(f"{self.url}: the hub does not answer: {error}") from error

    def put(self, folder: Path) -> None:
        """See `Destination`; what is there and was not published there stays."""
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            api.create_repo(self._id, exist_ok=True)
            if self._branch is not None:
                api.create_branch(self._id, branch=self._branch, exist_ok=True)
            old = self.checksums()
            before = {} if old is None else parse_checksums(old, f"{self.url}/{SUMS_FILE}")
            stale = {*before, SIGNATURE_FILE} - {path.relative_to(folder).as_posix() for path in visible_files(folder)}
            api.upload_folder(
                repo_id=self._id,
                folder_path=folder,
                revision=self._branch,
                commit_message="Publish with inferencex pipeline",
                delete_patterns=[_pattern(name) for name in sorted(stale)],
            )
        except (transport_error(), OSError) as error:
            raise RecipeError(
                f"{self.url}: the hub did not take the upload ({error}); check the connection, HF_TOKEN and that it "
                "may write there"
            ) from error


def _pattern(name: str) -> str:
    """Return a pattern that matches `name` and nothing else."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)
