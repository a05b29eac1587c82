"""What a recipe's source is, exactly: its files and their hashes, and on the hub the commit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from inferencex.formats.errors import RecipeError, SourceError
from inferencex.recipes.pipeline.hashing import HashCache, json_digest, visible_files
from inferencex.recipes.pipeline.hub import transport_error
from inferencex.recipes.pipeline.recipe import Source

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class ResolvedSource:
    """A source whose content is known.

    model:     what inferencex convert is given as --model-id
    name:      what others are told: of a path on this machine the last part
    revision:  the commit, for a model of the hub
    files:     sha256 by name
    nbytes:    size of the weights
    """

    model: str
    name: str
    revision: str | None
    files: dict[str, str] = field(repr=False)
    nbytes: int

    @property
    def digest(self) -> str:
        """Hash of everything that bundles are made of; where the files lie is not part of it."""
        return json_digest(self.files)


def resolve(source: Source, hashes: HashCache) -> ResolvedSource:
    """Find the source, downloading what is on the hub into the hub's cache, and hash its files.

    Raises SourceError or OptionError as inferencex convert does.
    """
    path = local_path(source)
    if path is not None:
        return _of_files(source.model, None, path, hashes)
    from inferencex.convert.source.hub import download, is_hub_id

    if not is_hub_id(source.model):
        raise SourceError(f"{source.model}: no such file or directory, nor an id of a model on the hub")
    snapshot = download(
        source.model,
        revision=source.revision,
        weights=not source.random_weights,
        allow_pickle=source.allow_pickle,
        with_code=source.trust_remote_code,
    )
    return _of_files(source.model, snapshot.revision, snapshot.directory, hashes)


def expected_bytes(source: Source) -> int | None:
    """Return the size of the source's weights without downloading anything; None where that is not known."""
    path = local_path(source)
    if path is not None:
        return _nbytes(_files(path))
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError:
        return None
    try:
        info = HfApi().model_info(source.model, revision=source.revision, files_metadata=True, timeout=10)
    except (transport_error(), OSError, ValueError):
        return None  # not reachable: a plan is shown all the same
    sizes = [file.size or 0 for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
    return sum(sizes) or None


def local_path(source: Source) -> Path | None:
    """Return where a source on this machine is; None for one of the hub."""
    path = Path(source.model).expanduser()
    if path.exists():
        return path
    if "/" in source.model:
        return None
    from inferencex.convert.source.open import ALIASES, bundled_file  # brings torch

    return bundled_file(source.model) if source.model in ALIASES else None


def _of_files(model: str, revision: str | None, path: Path, hashes: HashCache) -> ResolvedSource:
    files = _files(path)
    if not files:
        raise RecipeError(f"{path}: is an empty folder; name the folder of a checkpoint")
    root = path if path.is_dir() else path.parent
    named = {file.relative_to(root).as_posix(): hashes.digest(file) for file in files}
    name = model if revision is not None else Path(model).expanduser().resolve().name
    return ResolvedSource(model, name, revision, named, _nbytes(files))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return visible_files(path)
    part = _PART.search(path.name)
    if part is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: part.start()]}-*-of-{part.group(1)}.gguf"))


def _nbytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS)
