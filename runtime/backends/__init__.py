"""Backends by name, imported only when asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from inferencex.formats.errors import BackendError, OptionError

if TYPE_CHECKING:
    from inferencex.runtime.backends.base import Backend

# In the order "auto" tries them, the fastest first.
_BACKENDS = {
    "cpu": ("inferencex.runtime.backends.cpu", "CpuBackend", ""),
    "reference": ("inferencex.runtime.backends.reference", "ReferenceBackend", "convert"),
}


def backend_names() -> tuple[str, ...]:
    """Return the names `load_backend` knows, in the order "auto" tries them."""
    return tuple(_BACKENDS)


def load_backend(name: str) -> Backend:
    """Import and return the backend called `name`.

    Raises OptionError for an unknown name and BackendError when a package it needs is not installed.
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
            f"install inferencex{f'[{extra}]' if extra else ''}"
        ) from error
    return backend


def select_backend(name: str, bundle: Path) -> Backend:
    """Return the backend called `name`, or for "auto" the first that can run `bundle` here.

    Raises BackendError stating each backend's reasons when none can.
    """
    names = backend_names() if name == "auto" else (name,)
    refusals: list[str] = []
    for candidate in names:
        try:
            backend = load_backend(candidate)
        except BackendError as error:
            refusals.append(str(error))
            continue
        reasons = backend.supports(bundle)
        if not reasons:
            return backend
        refusals.append(f"{candidate}: {'; '.join(reasons)}")
    raise BackendError(f"{bundle}: no backend can run this bundle here: {' | '.join(refusals)}")
