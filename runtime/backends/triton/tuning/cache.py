"""Tuned configurations on disk: one file for each kind of device.

`$XDG_CACHE_HOME/inferencex/tuning/<device>.json`, by default in `~/.cache`:

    {"version": 2, "device": "NVIDIA H200 sm_90", "triton": "3.9.0",
     "kernels": {"quantized_linear": {"<shape class>": {"blocks": {"BLOCK_N": 64, ...}, "num_warps": 4, ...}}}}

A file of another version of Triton, which compiles kernels differently, of another device or of another version of this
format, and a damaged one, count as none. Files are replaced as a whole, so readers never see half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
import triton

from inferencex.runtime.backends.triton.tuning.config import Config

VERSION = 2
"""Of the file's format, and of the kernels: raised when a kernel changes what its configurations mean."""

INTERPRETER = "Triton's interpreter"
"""The device's name where kernels are interpreted."""

_LOG = logging.getLogger(__name__)
_FORGET: list[Callable[[], None]] = []

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def device_name(index: int) -> str:
    """Return what tells kinds of GPUs apart: the name and the architecture."""
    properties = torch.cuda.get_device_properties(index)
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return f"{properties.name} {architecture or f'sm_{properties.major}{properties.minor}'}"


def cache_path(device: str) -> Path:
    """Return where the configurations of a kind of device are kept."""
    return _cache_root() / "inferencex" / "tuning" / (re.sub(r"[^A-Za-z0-9_]+", "-", device).strip("-") + ".json")


def _cache_root() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # nobody's home: containers run as any number, of which the system knows no user
        return Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"


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
        forget()
        try:
            with _alone(self.path):
                _replace(self.path, self._text_with_others(kernel, shape_class))
        except OSError as error:
            _LOG.warning("tuned configurations are not kept: %s", error)

    def _text_with_others(self, kernel: str, shape_class: str) -> str:
        """Return the file's text, in which only this class is not as others have kept it since it was read."""
        kept, key = TuningCache.read(self.device, self.path).configurations, (kernel, shape_class)
        merged = {**self.configurations, **kept, key: self.configurations[key]}
        kernels: dict[str, dict[str, Any]] = {}
        for (name, shape), chosen in sorted(merged.items()):
            kernels.setdefault(name, {})[shape] = chosen.to_json()
        return json.dumps(
            {"version": VERSION, "device": self.device, "triton": triton.__version__, "kernels": kernels}, indent=1
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is about to replace a file with what it has read of it, and keep others waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file for nothing else, that is open to be written: NFS locks no folders.
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        except OSError as error:  # a file system without locks, as clusters have them
            _LOG.warning("%s: what others keep at the same time may be lost, for nothing locks it: %s", path, error)
        yield
    finally:
        os.close(lock)


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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def device_cache(index: int | None) -> TuningCache:
    """Return the configurations of the GPU with this number, or (None) of the interpreter; read when first asked for.

    Nothing is measured in the interpreter, but what a file says for it is used: so tests try every configuration.
    """
    return TuningCache.read(INTERPRETER if index is None else device_name(index))


def current_cache() -> TuningCache:
    """Return the configurations of the current device."""
    return device_cache(None if triton.knobs.runtime.interpret else torch.cuda.current_device())


def configuration(kernel: str, shape_class: str, options: Sequence[Config], device: torch.device) -> Config:
    """Return the configuration that was measured for a shape class on a device, else the first of `options`.

    options: those that the kernel is right with. One that is none of them, of a file that somebody has changed, is
        not used, with a warning.

    No work for the device, and none for the disk but once. Launches ask through functions that are `remembered`.
    """
    cache = device_cache(device.index if device.type == "cuda" else None)
    found = cache.get(kernel, shape_class)
    if found is None or found in options:
        return options[0] if found is None else found
    _LOG.warning(
        "%s: %s for %r is not used, the kernel runs with its default: %s %s is none of its configurations",
        cache.path, kernel, shape_class, dict(found.blocks), (found.num_warps, found.num_stages),
    )  # fmt: skip
    return options[0]


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function of hashable arguments compute each result once, until another configuration is kept."""
    cached = functools.cache(function)
    _FORGET.append(cached.cache_clear)
    return cast("Callable[P, T]", cached)


def forget() -> None:
    """Let all that is `remembered` be computed anew."""
    for clear in _FORGET:
        clear()


def read_again() -> None:
    """Read files anew when they are next asked for: another process may have measured."""
    device_cache.cache_clear()
    forget()
