"""The operators that the IR adds to ONNX: their schemas, and what they mean in numpy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inferencex.formats.dialect.names import DOMAIN, OPSET, VERSION

if TYPE_CHECKING:
    from inferencex.formats.dialect.reference import OPERATORS as OPERATORS
    from inferencex.formats.dialect.reference import new_ops as new_ops
    from inferencex.formats.dialect.schemas import register as register

__all__ = ["DOMAIN", "OPERATORS", "OPSET", "VERSION", "new_ops", "register"]

_HOMES = {"OPERATORS": "reference", "new_ops": "reference", "register": "schemas"}


def __getattr__(name: str) -> Any:
    """Import schemas and reference when they are asked for: running a bundle needs neither, and they bring `onnx`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
