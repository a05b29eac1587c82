"""Backends by name, imported only when asked for."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends.device_names import DeviceName, may_have_gpu

if TYPE_CHECKING:
    from inferencex.runtime.backends.base import Backend

_LOG = logging.getLogger(__name__)

# In the order "auto" tries them, the fastest first.
_BACKENDS = {
    "triton": ("inferencex.runtime.backends.triton", "TritonBackend", "cuda"),
    "cpu": ("inferencex.runtime.backends.cpu", "CpuBackend", ""),
    "reference": ("inferencex.runtime.backends.reference", "ReferenceBackend", "convert"),
}

_ON_GPUS = ("triton",)
_ROCM_HINT = ", or inferencex[rocm] for AMD's GPUs"


def backend_names() -> tuple[str, ...]:
    """Return the names `load_backend` knows, in the order "auto" tries them."""
    return tuple(_BACKENDS)


def automatic_backends() -> tuple[str, ...]:
    """Return the backends that "auto" tries on this machine, in order: none on GPUs where there is no driver of one."""
    return _candidates(DeviceName("auto"))


def load_backend(name: str) -> Backend:
    """Import and return the backend called `name`.

    Raises OptionError for an unknown name, and BackendError when a package it needs is not there or cannot be
    loaded.
    """
    if name not in _BACKENDS:
        raise OptionError(f"no backend is called {name!r}; choose one of: auto, {', '.join(_BACKENDS)}")
    module, attribute, extra = _BACKENDS[name]
    try:
        backend: Backend = getattr(import_module(module), attribute)()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("inferencex"):
            raise
        raise BackendError(
            f"the backend {name!r} needs the package {error.name!r}, which is not installed; "
            f"install inferencex{f'[{extra}]' if extra else ''}{_ROCM_HINT if name in _ON_GPUS else ''}"
        ) from error
    except (ImportError, OSError) as error:  # which libraries that are missing or do not fit end in
        raise BackendError(
            f"the backend {name!r} cannot be loaded: {type(error).__name__}: {error}; install what it needs anew: "
            f"inferencex{f'[{extra}]' if extra else ''}{_ROCM_HINT if name in _ON_GPUS else ''}"
        ) from error
    return backend


def select_backend(name: str, bundle: Path, device: str = "auto") -> Backend:
    """Return the backend called `name`, or for "auto" the first that can run `bundle` on the device here.

    A look for GPUs imports torch, so "auto" looks for one only where there are a driver and the packages.

    Raises OptionError for names that are none and for a backend that does not compute on such a device, and
    BackendError stating each backend's reasons when none can.
    """
    asked = DeviceName.parse(device)
    names = _candidates(asked) if name == "auto" else (name,)
    if name in _BACKENDS and asked.kind != "auto" and asked.is_gpu != (name in _ON_GPUS):
        raise OptionError(
            f"the backend {name!r} computes on {'GPUs' if name in _ON_GPUS else 'CPUs'}, and device={device!r}; give "
            "one of them, or backend auto"
        )
    refusals: list[str] = []
    for candidate in names:
        try:
            backend = load_backend(candidate)
        except BackendError as error:
            refusals.append(str(error))
            continue
        reasons = backend.supports(bundle)
        if not reasons:
            if refusals:  # of GPUs, which are only looked for where there is a driver of one
                _LOG.warning(
                    "%s: runs on the backend %s, and not on a GPU: %s", bundle, candidate, " | ".join(refusals)
                )
            return backend
        refusals.append(f"{candidate}: {'; '.join(reasons)}")
    raise BackendError(f"{bundle}: no backend can run this bundle here: {' | '.join(refusals)}")


def _candidates(device: DeviceName) -> tuple[str, ...]:
    """Return the backends that "auto" tries, in order."""
    if device.is_gpu:
        return _ON_GPUS
    on_cpus = tuple(name for name in _BACKENDS if name not in _ON_GPUS)
    return (*_ON_GPUS, *on_cpus) if device.kind == "auto" and may_have_gpu() else on_cpus
