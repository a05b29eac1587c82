"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>(?:[kmgt]i?)?)b?", re.IGNORECASE)


def parse_size(value: object) -> object:
    """Return the bytes that a text such as `4GiB`, `512 MB` or `1000000` stands for; anything but a text as it is.

    Raises ValueError for a text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("expected a size such as 4GiB, 512MB or 1048576")
    return int(float(match["number"]) * _UNITS[match["unit"].lower()])


def show_size(nbytes: int) -> str:
    """Return a size in the largest unit that it is a whole number of, as `parse_size` reads it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit[:2].lower()]
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


class SizeUnit:
    """Marks a setting whose value is a number of bytes."""


Size = Annotated[int, BeforeValidator(parse_size), Field(strict=True, ge=1), SizeUnit()]
"""A number of bytes, at least 1, given as an integer or as a text with a unit."""
