"""What `--quantization` and its companion options mean; the one place where their grammar is read.

`--quantization` is `none`, `METHOD-TYPE[-gN]`: `rtn-int8`, `rtn-int4`, `rtn-int4-g128`, or one of the names that stand
for a method, a type and what happens to activations: `fp8`, `fp8-weight`, `int8-dynamic`, `nvfp4`, `mxfp4`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from inferencex.convert.quantize.composition import Composition, compositions
from inferencex.formats.errors import OptionError
from inferencex.formats.packing import PER_CHANNEL, Number

PLAIN: Final = "none"
"""The precision that leaves a weight as it is."""

_NAME = re.compile(r"(?P<method>[a-z][a-z0-9]*(?:\+[a-z][a-z0-9]*)*)-(?P<type>[a-z0-9]+)(?:-g(?P<group>\d{1,9}))?")
_NAME_WITH_GROUP = re.compile(r"(?P<name>[a-z0-9-]+?)(?:-g(?P<group>\d{1,9}))?")
_MIXED = re.compile(r"(?P<method>[a-z][a-z0-9]*(?:\+[a-z][a-z0-9]*)*)(?:-mixed(?:-g(?P<group>\d{1,9}))?)?")
_MIXED_GROUP = 64
_PRECISION = re.compile(r"(?P<type>[a-z0-9]+)(?:-g(?P<group>\d{1,9}))?")


@dataclass(frozen=True)
class _WeightType:
    """What a type is where nothing else is said; `fixed` types have no other group size or symmetry."""

    bits: int
    group_size: int
    symmetric: bool
    number: Number = "int"
    fixed: bool = False


_TYPES: Final = {
    "int3": _WeightType(bits=3, group_size=64, symmetric=False),
    "int4": _WeightType(bits=4, group_size=64, symmetric=False),
    "int5": _WeightType(bits=5, group_size=64, symmetric=False),
    "int6": _WeightType(bits=6, group_size=64, symmetric=False),
    "int8": _WeightType(bits=8, group_size=PER_CHANNEL, symmetric=True),
    "fp8": _WeightType(bits=8, group_size=PER_CHANNEL, symmetric=True, number="e4m3"),
    "nvfp4": _WeightType(bits=4, group_size=16, symmetric=True, number="e2m1", fixed=True),
    "mxfp4": _WeightType(bits=4, group_size=32, symmetric=True, number="e2m1", fixed=True),
}


@dataclass(frozen=True)
class ActivationScheme:
    """How the inputs of a linear are quantized: to INT8 or FP8 (E4M3).

    static: with one scale, found by calibration; else every token with a scale of its own, found when it comes
    """

    type: Literal["int8", "fp8"]
    static: bool = False

    @property
    def largest(self) -> float:
        """The largest number of the type: 127, or 448 (E4M3)."""
        return 127.0 if self.type == "int8" else 448.0

    def __str__(self) -> str:
        return f"{self.type} activations, {'static' if self.static else 'dynamic per token'}"


@dataclass(frozen=True)
class TensorScheme:
    """How one weight is stored: type, input channels to a scale, and whether zero is in the middle.

    activation: how the inputs it is multiplied with are quantized; None leaves that to the backend
    """

    type: str
    group_size: int
    symmetric: bool
    activation: ActivationScheme | None = None

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return _TYPES[self.type].bits

    @property
    def number(self) -> Number:
        """What a value is."""
        return _TYPES[self.type].number

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, at most."""
        return 1 if self.number == "e2m1" else 4

    def __str__(self) -> str:
        groups = "per channel" if self.group_size == PER_CHANNEL else f"groups of {self.group_size}"
        kind = f", {'symmetric' if self.symmetric else 'asymmetric'}" if self.number == "int" else ""
        activation = f", {self.activation}" if self.activation is not None else ""
        return f"{self.type}, {groups}{kind}{activation}"


@dataclass(frozen=True)
class _NamedScheme:
    method: str
    type: str
    activation: ActivationScheme | None = None


_NAMED: Final = {
    "int4": _NamedScheme("awq+gptq", "int4"),
    "smoothquant-int8": _NamedScheme("smoothquant+gptq", "int8", ActivationScheme("int8")),
    "fp8": _NamedScheme("rtn", "fp8", ActivationScheme("fp8")),
    "fp8-weight": _NamedScheme("rtn", "fp8"),
    "int8-dynamic": _NamedScheme("rtn", "int8", ActivationScheme("int8")),
    "nvfp4": _NamedScheme("rtn", "nvfp4"),
    "mxfp4": _NamedScheme("rtn", "mxfp4"),
}

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
    candidates:       schemes that a budget chooses from, weight by weight, the last of which is `linear` too; usually
                      none
    """

    name: str
    method: str
    linear: TensorScheme | None
    lm_head: Precision = None
    embedding: Precision = None
    exclude: tuple[str, ...] = ()
    candidates: tuple[TensorScheme, ...] = ()

    @property
    def weight_method(self) -> str:
        """The method that quantizes weights which have no calibrated one: heads and embeddings beside plain linears."""
        return "rtn" if self.method == PLAIN else self.method

    @property
    def composition(self) -> Composition:
        """The steps of the method; those of rounding to nearest where linears stay plain."""
        return compositions()[self.weight_method]

    @property
    def needs_calibration(self) -> bool:
        """Whether quantizing takes knowledge of what the linears read."""
        static = self.linear is not None and self.linear.activation is not None and self.linear.activation.static
        return self.linear is not None and (static or bool(self.candidates) or self.composition.needs_calibration)

    def to_json(self) -> dict[str, Any]:
        """Return the scheme in the form that `bundle.json` keeps."""

        def shown(precision: Precision) -> str | None:
            return None if precision is None else str(precision)

        return {
            "name": self.name,
            "method": self.method,
            "linear": " or ".join(map(str, self.candidates)) or shown(self.linear) or PLAIN,
            "lm_head": shown(self.lm_head),
            "embedding": shown(self.embedding),
            "exclude": list(self.exclude),
        }


def available_schemes() -> list[str]:
    """Return every name that `--quantization` takes, without group sizes."""
    composed = (f"{name}-{kind}" for name, method in compositions().items() for kind in method.types)
    return [PLAIN, *composed, *_NAMED]


def parse_scheme(
    name: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    lm_head: str | None = None,
    embedding: str | None = None,
    exclude: Iterable[str] = (),
    static_activations: bool = False,
) -> QuantizationScheme:
    """Read the quantization options; None stands for an option that was not given.

    `group_size` is a positive number, or -1 for one scale to an output channel. Defaults: int3 to int6 in groups of 64,
    asymmetric; int8 per channel, symmetric; fp8 per channel; nvfp4 and mxfp4 have groups of 16 and 32, always.
    `lm_head` and `embedding` take `none` or `TYPE[-gN]`, and what such a precision leaves open is taken from the
    linears when the type is the same; their inputs are never quantized by the graph. With `static_activations` the
    activations of schemes that quantize them get one scale a tensor, which takes calibration. Raises OptionError.
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
        if static_activations:
            raise OptionError("--quantization none quantizes no activations; static ones need a scheme that does")
        if patterns and all(precision in (None, PLAIN) for precision in (lm_head, embedding)):
            raise OptionError("--exclude means nothing with --quantization none; leave it out")
        linear, method, full_name = None, PLAIN, PLAIN
    else:
        method, kind, group, activation = _split(name)
        if group is not None and group_size is not None and group != group_size:
            raise OptionError(
                f"--quantization {name} says groups of {group}, --group-size says {group_size}; give one of them"
            )
        linear = _tensor_scheme(kind, group if group is not None else group_size, symmetric, f"--quantization {name}")
        linear = _with_activation(linear, activation, static_activations, name)
        base = name.removesuffix(f"-g{group}")
        full_name = base if base in _NAMED else f"{method}-{kind}"
        if linear.group_size != PER_CHANNEL and not _TYPES[kind].fixed:
            full_name = f"{full_name}-g{linear.group_size}"
    return QuantizationScheme(
        name=full_name,
        method=method,
        linear=linear,
        lm_head=_precision("--lm-head", lm_head, linear),
        embedding=_precision("--embedding", embedding, linear),
        exclude=patterns,
    )


def parse_mixed_scheme(
    name: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    lm_head: str | None = None,
    embedding: str | None = None,
    exclude: Iterable[str] = (),
) -> QuantizationScheme:
    """Read the quantization options where a budget chooses the type of each weight.

    `name` is a method, with or without `-mixed[-gN]`; `none` stands for `awq+gptq`. All weights have groups of the same
    size, 64 where nothing is said, and zero points unless `symmetric`. Raises OptionError.
    """
    named = _MIXED.fullmatch("awq+gptq" if name == PLAIN else name)
    methods = {key: types for key, c in compositions().items() if len(types := _mixable(c.types)) > 1}
    if named is None or named["method"] not in methods:
        hint = "; the budget chooses the type" if name in available_schemes() else ""
        raise OptionError(
            f"--quantization {name!r} with a budget: expected a method, one of {', '.join(methods)}{hint}"
        )
    group = int(named["group"]) if named["group"] else None
    if group is not None and group_size is not None and group != group_size:
        raise OptionError(
            f"--quantization {name} says groups of {group}, --group-size says {group_size}; give one of them"
        )
    group = group if group is not None else group_size if group_size is not None else _MIXED_GROUP
    types = methods[named["method"]]
    candidates = tuple(_tensor_scheme(kind, group, bool(symmetric), f"--quantization {name}") for kind in types)
    return QuantizationScheme(
        name=f"{named['method']}-mixed" + ("" if group == PER_CHANNEL else f"-g{group}"),
        method=named["method"],
        linear=candidates[-1],
        lm_head=_precision("--lm-head", lm_head, None),
        embedding=_precision("--embedding", embedding, None),
        exclude=tuple(exclude),
        candidates=candidates,
    )


def _mixable(types: Sequence[str]) -> list[str]:
    """Return the types a budget chooses from, from few bits to many."""
    return [kind for kind, facts in _TYPES.items() if kind in types and facts.number == "int"]


def _with_activation(
    linear: TensorScheme, activation: ActivationScheme | None, static: bool, name: str
) -> TensorScheme:
    """Add what happens to activations, which go with weights that have one scale a channel."""
    if activation is None:
        if static:
            raise OptionError(f"--quantization {name} does not quantize activations; static ones need one that does")
        return linear
    if activation.type == "int8" and linear.group_size != PER_CHANNEL:
        raise OptionError(
            f"--quantization {name}: INT8 activations with a scale a token go with weights that have a scale a "
            f"channel, not groups of {linear.group_size}; leave the group size out"
        )
    if activation.type == "int8" and not linear.symmetric:
        raise OptionError(f"--quantization {name} has symmetric weights only; leave --asymmetric out")
    return replace(linear, activation=replace(activation, static=static))


def _split(name: str) -> tuple[str, str, int | None, ActivationScheme | None]:
    """Return method, type, group size and activations of a scheme's name."""
    named = _NAME_WITH_GROUP.fullmatch(name)
    if named is not None and named["name"] in _NAMED:
        scheme = _NAMED[named["name"]]
        return scheme.method, scheme.type, int(named["group"]) if named["group"] else None, scheme.activation
    schemes = available_schemes()
    match = _NAME.fullmatch(name)
    base = f"{match['method']}-{match['type']}" if match else name
    method = compositions().get(name)
    if method is not None:
        raise OptionError(
            f"--quantization {name!r} is a method without a type; give one, such as {name}-{method.types[-1]}"
            + (", or a budget: --target-bits, --target-size or --max-kl" if len(_mixable(method.types)) > 1 else "")
        )
    if match is None or base not in schemes:
        raise OptionError(f"--quantization {name!r} is not one of {', '.join(schemes)}{_suggestion(base, schemes)}")
    activation = ActivationScheme("int8") if compositions()[match["method"]].quantizes_inputs else None
    return match["method"], match["type"], int(match["group"]) if match["group"] else None, activation


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
    if defaults.fixed and group != defaults.group_size:
        raise OptionError(f"{where}: {kind} has groups of {defaults.group_size}, always; leave the group size out")
    if symmetric is False and defaults.number != "int":
        raise OptionError(f"{where}: {kind} has no zero points; leave --asymmetric out")
    if group != PER_CHANNEL and group < 1:
        raise OptionError(f"{where}: group size {group} is neither positive nor {PER_CHANNEL} (one scale per channel)")
    return TensorScheme(kind, group, defaults.symmetric if symmetric is None else symmetric)


def _suggestion(text: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(text, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
