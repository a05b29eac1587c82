"""Reading what `quantization_config` in config.json says, and refusing what is not understood."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inferencex.formats.errors import SourceError

# Where publishers put it; older compressed-tensors checkpoints use the second name.
KEYS = ("quantization_config", "compression_config")


def quantization_settings(config_dict: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str] | None:
    """Return the settings of a quantized checkpoint and where they are, or None for a plain one.

    They may also be those of `text_config`, the language part of a larger model. Raises SourceError when they are not
    an object.
    """
    for key in KEYS:
        settings = config_dict.get(key)
        if settings:
            if not isinstance(settings, dict):
                raise SourceError(f"{where}: {key} is {settings!r}, expected an object")
            return settings, f"{where}: {key}"
    text_config = config_dict.get("text_config")
    return quantization_settings(text_config, f"{where}: text_config") if isinstance(text_config, dict) else None


def integer_setting(settings: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """Return a whole number. Raises SourceError when it is missing or something else."""
    value = settings.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SourceError(f"{where}: {key} is {value!r}, expected a whole number")
    return value


def one_of(value: int, choices: Collection[int], what: str) -> int:
    """Return `value` if it is a choice. Raises SourceError naming the choices."""
    if value not in choices:
        raise SourceError(f"{what} is {value}, expected one of {', '.join(map(str, sorted(choices)))}")
    return value


def group_size_setting(settings: Mapping[str, Any], where: str, default: int | None = None) -> int:
    """Return `group_size`: a positive number, or -1 for one group of all input channels. Raises SourceError."""
    group_size = integer_setting(settings, "group_size", where, default)
    if group_size != -1 and group_size < 1:
        raise SourceError(f"{where}: group_size {group_size} is neither positive nor -1")
    return group_size
