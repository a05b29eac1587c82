"""Checkpoints on the Hugging Face hub: fetch only the files that are needed, through the hub's own cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from inferencex.convert.source.directory import CODE_FILES, PICKLE_FILES, SAFETENSORS_FILES, SIDE_FILES
from inferencex.formats.errors import SourceError

# Base of the errors of the HTTP client that this version of huggingface_hub uses (httpx or its successor).
TransportError: type[Exception] = HfHubHTTPError.__bases__[0]

# A pattern's `*` also matches "/", so each starts at the repository's root with a fixed part.
SAFETENSORS_PATTERNS = (*SAFETENSORS_FILES, "model-*-of-*.safetensors")
PICKLE_PATTERNS = (*PICKLE_FILES, "pytorch_model-*-of-*.bin")


@dataclass(frozen=True)
class Snapshot:
    """One revision's files on this machine; `revision` is the full commit hash."""

    directory: Path
    revision: str


def is_hub_id(model_id: str) -> bool:
    """Whether `model_id` could be the id of a model on the hub: NAME or NAMESPACE/NAME."""
    try:
        validate_repo_id(model_id)
    except HFValidationError:
        return False
    return True


def download(model_id: str, *, revision: str | None, weights: bool, allow_pickle: bool, with_code: bool) -> Snapshot:
    """Bring the files of `model_id` into the hub's cache, with a progress bar, and return where they are.

    Fetches config, tokenizer and licence files; safetensors if `weights`; pickles only when there are no
    safetensors and `allow_pickle`; Python code only if `with_code`. Raises SourceError saying what to do.
    """
    side = [*SIDE_FILES, *(CODE_FILES if with_code else ())]
    snapshot = _fetch(model_id, revision, [*side, *(SAFETENSORS_PATTERNS if weights else ())])
    has_safetensors = any((snapshot.directory / file).exists() for file in SAFETENSORS_FILES)
    if weights and allow_pickle and not has_safetensors:
        return _fetch(model_id, revision, [*side, *PICKLE_PATTERNS])
    return snapshot


def _fetch(model_id: str, revision: str | None, patterns: list[str]) -> Snapshot:
    wanted = model_id if revision is None else f"{model_id} at revision {revision}"
    try:
        directory = Path(huggingface_hub.snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise SourceError(
            f"{wanted}: access is gated; accept its terms on https://huggingface.co/{model_id}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model_id}: the hub has no revision {revision!r} of it; check --revision") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{model_id}: not found on the hub, nor a path on this machine; check the spelling, or set HF_TOKEN if the "
            "repository is private"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise SourceError(
            f"{wanted}: {why}, and the cache {constants.HF_HUB_CACHE} does not hold it; download it first, or name a "
            "directory on this machine"
        ) from error
    except HfHubHTTPError as error:
        raise SourceError(f"{wanted}: the hub refused the download ({error}); try again later") from error
    except (TransportError, OSError) as error:
        raise SourceError(f"{wanted}: the download failed ({error}); check the connection and the disk") from error
    return Snapshot(directory, directory.name)
