"""What `--quantization` and its companion options mean; the one place where their grammar is read.

`--quantization` is `none`, or `METHOD-TYPE[-gN]`: `rtn-int8`, `rtn-int4`, `rtn-int4-g128`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from inferencex.convert.quantize.base import available_methods
from inferencex.formats.errors import OptionError
from inferencex.formats.packing import PER_CHANNEL

PLAIN: Final = "none"
"""The precision that leaves a weight as it is."""

_NAME = re.compile(r"(?P<method>[a-z][a-z0-9]*(?:\+[a-z][a-z0-9]*)*)-(?P<type>[a-z0-9]+)(?:-g(?P<group>\d{1,9}))?")
_PRECISION = re.compile(r"(?P<type>[a-z0-9]+)(?:-g(?P<group>\d{1,9}))?")


@dataclass(frozen=True)
class _IntegerType:
    bits: int
    group_size: int
    symmetric: bool


_TYPES: Final = {
    "int4": _IntegerType(bits=4, group_size=64, symmetric=False),
    "int8": _IntegerType(bits=8, group_size=PER_CHANNEL, symmetric=True),
}


@dataclass(frozen=True)
class TensorScheme:
    """How one weight is stored: integer type, input channels to a scale, and whether zero is in the middle."""

    type: str
    group_size: int
    symmetric: bool

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return _TYPES[self.type].bits

    def __str__(self) -> str:
        groups = "per channel" if self.group_size == PER_CHANNEL else f"groups of {self.group_size}"
        return f"{self.type}, {groups}, {'symmetric' if self.symmetric else 'asymmetric'}"


Precision = TensorScheme | Literal["none"] | None
"""What was said about a head or an embedding: a scheme, `PLAIN`, or nothing."""


@dataclass(frozen=True)
class QuantizationScheme:
    """All that the user decided about quantization.

    name:             as given, in full: `rtn-int4-g64`
    method:           `none`, or the name of a method in the registry
    linear:           scheme of linears and experts; None leaves them plain
    lm_head:          scheme of the output projection, `PLAIN`, or None when nothing was said
    embedding:        the same for the token embedding
    exclude:          fnmatch patterns of weight names that stay plain
    """

    name: str
    method: str
    linear: TensorScheme | None
    lm_head: Precision = None
    embedding: Precision = None
    exclude: tuple[str, ...] = ()

    @property
    def weight_method(self) -> str:
        """The method that quantizes weights which have no calibrated one: heads and embeddings beside plain linears."""
        return "rtn" if self.method == PLAIN else self.method

    def to_json(self) -> dict[str, Any]:
        """Return the scheme in the form that `bundle.json` keeps."""

        def shown(precision: Precision) -> str | None:
            return None if precision is None else str(precision)

        return {
            "name": self.name,
            "method": self.method,
            "linear": shown(self.linear) or PLAIN,
            "lm_head": shown(self.lm_head),
            "embedding": shown(self.embedding),
            "exclude": list(self.exclude),
        }


def available_schemes() -> list[str]:
    """Return every name that `--quantization` takes, without group sizes."""
    return [PLAIN, *(f"{name}-{kind}" for name, method in available_methods().items() for kind in method.types)]


def parse_scheme(
    name: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    lm_head: str | None = None,
    embedding: str | None = None,
    exclude: Iterable[str] = (),
) -> QuantizationScheme:
    """Read the quantization options; None stands for an option that was not given.

    `group_size` is a positive number, or -1 for one scale to an output channel. Defaults: int4 in groups of 64,
    asymmetric; int8 per channel, symmetric. `lm_head` and `embedding` take `none` or `TYPE[-gN]`, and what such a
    precision leaves open is taken from the linears when the type is the same. Raises OptionError.
    """
    patterns = tuple(exclude)
    if name == PLAIN:
        given = [
            option
            for option, value in (("--group-size", group_size), ("--symmetric/--asymmetric", symmetric))
            if value is not None
        ]
        if given:
            raise OptionError(f"{' and '.join(given)} mean nothing with --quantization none; leave them out")
        linear, method, full_name = None, PLAIN, PLAIN
    else:
        method, kind, group = _split(name)
        if group is not None and group_size is not None and group != group_size:
            raise OptionError(
                f"--quantization {name} says groups of {group}, --group-size says {group_size}; give one of them"
            )
        linear = _tensor_scheme(kind, group if group is not None else group_size, symmetric, f"--quantization {name}")
        full_name = f"{method}-{kind}" + ("" if linear.group_size == PER_CHANNEL else f"-g{linear.group_size}")
    return QuantizationScheme(
        name=full_name,
        method=method,
        linear=linear,
        lm_head=_precision("--lm-head", lm_head, linear),
        embedding=_precision("--embedding", embedding, linear),
        exclude=patterns,
    )


def _split(name: str) -> tuple[str, str, int | None]:
    """Return method, type and group size of `METHOD-TYPE[-gN]`."""
    schemes = available_schemes()
    match = _NAME.fullmatch(name)
    base = f"{match['method']}-{match['type']}" if match else name
    if match is None or base not in schemes:
        raise OptionError(f"--quantization {name!r} is not one of {', '.join(schemes)}{_suggestion(base, schemes)}")
    return match["method"], match["type"], int(match["group"]) if match["group"] else None


def _precision(option: str, text: str | None, linear: TensorScheme | None) -> Precision:
    if text is None:
        return None
    if text == PLAIN:
        return "none"
    match = _PRECISION.fullmatch(text)
    if match is None or match["type"] not in _TYPES:
        choices = [PLAIN, *_TYPES]
        raise OptionError(
            f"{option} {text!r} is not one of {', '.join(choices)} (with a group size: int4-g64)"
            f"{_suggestion(match['type'] if match else text, choices)}"
        )
    same = linear if linear is not None and linear.type == match["type"] else None
    group = int(match["group"]) if match["group"] else (same.group_size if same else None)
    return _tensor_scheme(match["type"], group, same.symmetric if same else None, f"{option} {text}")


def _tensor_scheme(kind: str, group_size: int | None, symmetric: bool | None, where: str) -> TensorScheme:
    defaults = _TYPES[kind]
    group = defaults.group_size if group_size is None else group_size
    if group != PER_CHANNEL and group < 1:
        raise OptionError(f"{where}: group size {group} is neither positive nor {PER_CHANNEL} (one scale per channel)")
    return TensorScheme(kind, group, defaults.symmetric if symmetric is None else symmetric)


def _suggestion(text: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(text, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
