"""What a configuration means for the models: checked before anything starts, and described once they are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from inferencex.formats.errors import BundleError, OptionError
from inferencex.runtime.server.config.settings import Settings
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.models.version import LoadRequest


def check(settings: Settings) -> None:
    """Raise for what can be known to be wrong without loading: OptionError, or BundleError for a missing bundle."""
    model = settings.model
    if not model.path and not model.root:
        raise OptionError("there is nothing to serve; give --model-path, or --model-root to load models later")
    for path in model.path:
        if not path.is_dir():
            raise BundleError(f"{path}: is not a folder; a bundle is the folder that inferencex-convert writes")
    for root in model.root:
        if not root.is_dir():
            raise OptionError(f"model.root {root}: is not a folder; give one that holds bundles")
    names = [name for name, _, _ in _named(settings)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"two bundles would be called {twice!r}; give each a name with --served-model-name")


def notes(settings: Settings) -> Iterator[str]:
    """Yield what is worth saying of settings that can be honoured only in part."""
    if settings.server.admin_keys and not settings.model.root:
        yield "admin keys are set, and there is no model.root: no further models can be loaded"
    if settings.server.tls_certificate is None and settings.server.api_keys and not _is_local(settings):
        yield "keys are sent unencrypted to this server; set tls_certificate and tls_key, or use a proxy that has TLS"


def _is_local(settings: Settings) -> bool:
    return settings.server.uds is not None or settings.server.host in ("localhost", "127.0.0.1", "::1")


def load_requests(settings: Settings) -> list[LoadRequest]:
    """Return what to load at the start, in order."""
    options = ModelOptions.from_settings(settings)
    return [
        LoadRequest(uid=name, path=path, options=options, aliases=aliases, required=True)
        for name, path, aliases in _named(settings)
    ]


def describe(model: ServedModel) -> Iterator[str]:
    """Yield lines about a model that is loaded: what computes, and how much fits."""
    engine = model.llm.engine
    limits, options = engine.limits, engine.options
    blocks_each = -(-limits.max_model_len // limits.block_size)
    at_once = min(limits.num_blocks // blocks_each, options.max_num_seqs)
    replicas = len(model.loops)
    each = f" in each of {replicas} replicas" if replicas > 1 else ""
    facts = engine.executable.facts
    kv_bytes = limits.num_slots * facts.bytes_per_token
    yield (
        f"{model.name}: backend {model.llm.backend.name}, {facts.num_layers} layers, "
        f"{limits.max_model_len} tokens of context, at most {options.max_num_seqs} sequences and "
        f"{options.max_num_batched_tokens} tokens in a step{each}"
    )
    yield (
        f"{model.name}: KV cache of {limits.num_blocks} blocks of {limits.block_size} tokens "
        f"({kv_bytes / 2**20:.0f} MiB){each}, enough for {at_once} full-length requests at once"
    )
    if at_once == 0:
        yield (
            f"{model.name}: requests of more than {limits.num_slots} tokens will be refused, for the KV cache holds no "
            "more (raise engine.kv_cache_memory, or lower model.max_model_len)"
        )


def _named(settings: Settings) -> list[tuple[str, Path, tuple[str, ...]]]:
    """Return name, folder and further names of each bundle."""
    paths, names = settings.model.path, settings.model.served_model_name
    if len(paths) == 1 and names:
        return [(names[0], paths[0], names[1:])]
    if names:
        return [(name, path, ()) for name, path in zip(names, paths, strict=True)]
    # A link keeps its own name: clients go on asking for it when it leads to another bundle.
    return [(Path(os.path.abspath(path)).name, path, ()) for path in paths]
