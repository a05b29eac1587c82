"""Tuned configurations on disk: one file for each kind of device.

`$XDG_CACHE_HOME/inferencex/tuning/<device>.json`, by default in `~/.cache`:

    {"version": 1, "device": "NVIDIA H200 sm_90", "triton": "3.9.0",
     "kernels": {"quantized_linear": {"<shape class>": {"blocks": {"BLOCK_N": 64, ...}, "num_warps": 4, ...}}}}

A file of another version of Triton, which compiles kernels differently, of another device or of another version of this
format, and a damaged one, count as none. Files are replaced as a whole, so readers never see half of one.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.tuning.config import Config

VERSION = 1
"""Of the file's format, and of the kernels: raised when a kernel changes what its configurations mean."""

_LOG = logging.getLogger(__name__)


@functools.cache
def device_name(index: int) -> str:
    """Return what tells kinds of GPUs apart: the name and the architecture."""
    properties = torch.cuda.get_device_properties(index)
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return f"{properties.name} {architecture or f'sm_{properties.major}{properties.minor}'}"


def cache_path(device: str) -> Path:
    """Return where the configurations of a kind of device are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "inferencex" / "tuning" / (re.sub(r"[^A-Za-z0-9_]+", "-", device).strip("-") + ".json")


@dataclass
class TuningCache:
    """Configurations of one kind of device, by kernel and shape class."""

    device: str
    path: Path
    configurations: dict[tuple[str, str], Config] = field(default_factory=dict)

    @classmethod
    def read(cls, device: str, path: Path | None = None) -> TuningCache:
        """Return what the file holds; nothing, with a warning, for one that cannot be used."""
        cache = cls(device, cache_path(device) if path is None else path)
        try:
            cache.configurations = _parsed(json.loads(cache.path.read_text(encoding="utf-8")), device)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            _LOG.warning("%s is not used, kernels run with their defaults: %s", cache.path, error)
        return cache

    def get(self, kernel: str, shape_class: str) -> Config | None:
        """Return a configuration; None where none was measured."""
        return self.configurations.get((kernel, shape_class))

    def put(self, kernel: str, shape_class: str, config: Config) -> None:
        """Keep a configuration, here and in the file, with what others have written there since.

        A file that cannot be written is a warning: what was measured is used all the same.
        """
        self.configurations[kernel, shape_class] = config
        merged = {**TuningCache.read(self.device, self.path).configurations, **self.configurations}
        kernels: dict[str, dict[str, Any]] = {}
        for (name, shape), chosen in sorted(merged.items()):
            kernels.setdefault(name, {})[shape] = chosen.to_json()
        text = json.dumps(
            {"version": VERSION, "device": self.device, "triton": triton.__version__, "kernels": kernels}, indent=1
        )
        try:
            _replace(self.path, text)
        except OSError as error:
            _LOG.warning("tuned configurations are not kept: %s", error)


def _parsed(data: Any, device: str) -> dict[tuple[str, str], Config]:
    if not isinstance(data, dict):
        raise ValueError("it is no file of tuned configurations")
    expected = {"version": VERSION, "device": device, "triton": triton.__version__}
    for name, value in expected.items():
        if data.get(name) != value:
            raise ValueError(f"its {name} is {str(data.get(name))[:80]!r}, expected {value!r}")
    kernels = data.get("kernels")
    if not isinstance(kernels, dict) or not all(isinstance(shapes, dict) for shapes in kernels.values()):
        raise ValueError("its kernels are no table of shape classes")
    return {
        (kernel, shape): Config.from_json(config)
        for kernel, shapes in kernels.items()
        for shape, config in shapes.items()
    }


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def device_cache(index: int) -> TuningCache:
    """Return the configurations of the GPU with this number, read from disk when first asked for."""
    return TuningCache.read(device_name(index))


def configuration(kernel: str, shape_class: str, default: Config) -> Config:
    """Return the configuration that was measured for the current device, else `default`.

    No work for the device, and none for the disk but once: launches ask for it every time. The interpreter runs with
    defaults. Raises BackendError for a configuration whose blocks are not those of `default`.
    """
    if triton.knobs.runtime.interpret:
        return default
    cache = device_cache(torch.cuda.current_device())
    found = cache.get(kernel, shape_class)
    if found is not None and found.constants.keys() != default.constants.keys():
        raise BackendError(
            f"{cache.path}: the configuration of {kernel} for {shape_class!r} sets {sorted(found.constants)}, "
            f"expected {sorted(default.constants)}; delete the file"
        )
    return default if found is None else found
