"""Deciding how every weight is stored, before any work is done. Nothing is decided after the plan."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from inferencex.convert.quantize.scheme import PLAIN, Precision, QuantizationScheme, TensorScheme
from inferencex.formats.errors import OptionError, QuantizationError
from inferencex.formats.packing import PER_CHANNEL, group_count

Role = Literal["linear", "experts", "router", "head", "embedding"]


@dataclass(frozen=True)
class WeightInfo:
    """A weight of the model as the planner sees it.

    shape:    `[N, K]`, output by input channels; experts `[E, N, K]`; embeddings and heads `[vocab, hidden]`
    tied_to:  name of the weight that is the same tensor, for a head that is the embedding
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "linear"
    tied_to: str | None = None


@dataclass(frozen=True)
class TensorPlan:
    """What happens to one weight.

    scheme:     how it is stored; None for plain
    method:     name of the method that quantizes it; `none` for plain
    reason:     why, in words
    stored_as:  the tensor that holds it: its own name, or that of the weight it is tied to
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    scheme: TensorScheme | None
    method: str
    reason: str
    stored_as: str

    @property
    def is_stored(self) -> bool:
        """Whether this weight is a tensor of its own, rather than another's."""
        return self.stored_as == self.name

    @property
    def ragged(self) -> int:
        """Input channels in the last group when it is shorter than the others, else 0."""
        if self.scheme is None or self.scheme.group_size == PER_CHANNEL:
            return 0
        return self.shape[-1] % self.scheme.group_size

    def stored_bytes(self, plain_itemsize: int, scale_bytes: int | None = None) -> int:
        """Bytes the tensor will take at most, or with scales of `scale_bytes`.

        `plain_itemsize` is the bytes of an element left plain.
        """
        size = 1
        for dimension in self.shape:
            size *= dimension
        if not self.is_stored:
            return 0
        if self.scheme is None:
            return size * plain_itemsize
        groups = size // max(self.shape[-1], 1) * group_count(self.shape[-1], self.scheme.group_size)
        zero_points = 0 if self.scheme.symmetric else (groups * self.scheme.bits + 7) // 8
        tensor_scale = 4 if self.scheme.type == "nvfp4" else 0
        scales = (scale_bytes or self.scheme.scale_bytes) * groups
        return (size * self.scheme.bits + 7) // 8 + scales + zero_points + tensor_scale

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}: {self.scheme or 'plain'} ({self.reason})"


def plan_quantization(weights: Sequence[WeightInfo], scheme: QuantizationScheme) -> list[TensorPlan]:
    """Return a plan for every weight, in the same order.

    Linears and experts follow the scheme; routers stay plain; heads and embeddings are quantized when asked for. A
    tied head and embedding are one tensor with one format, so asking for one is asking for both. Raises OptionError
    for an exclude pattern that matches nothing and for contradicting precisions of tied weights, QuantizationError
    for a weight whose shape does not go with its role.
    """
    for pattern in scheme.exclude:
        if not any(fnmatchcase(weight.name, pattern) for weight in weights):
            close = difflib.get_close_matches(pattern, [weight.name for weight in weights], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"--exclude {pattern!r} matches none of the {len(weights)} weights of the model{hint}")
    by_name = {weight.name: weight for weight in weights}
    plans: dict[str, TensorPlan] = {}
    for weight in weights:
        if weight.tied_to is None:
            partners = [other for other in weights if other.tied_to == weight.name]
            plans[weight.name] = _plan(weight, partners, scheme)
    for weight in weights:
        if weight.tied_to is not None:
            owner = plans.get(weight.tied_to)
            if owner is None or by_name[weight.tied_to].shape != weight.shape:
                raise QuantizationError(
                    f"{weight.name} {list(weight.shape)} is tied to {weight.tied_to}, "
                    "which is not a weight of the model with that shape"
                )
            reason = f"the same tensor as {weight.tied_to}: {owner.reason}"
            plans[weight.name] = replace(owner, name=weight.name, role=weight.role, reason=reason)
    return [plans[weight.name] for weight in weights]


def _plan(weight: WeightInfo, tied: Sequence[WeightInfo], scheme: QuantizationScheme) -> TensorPlan:
    wanted, reason = _wanted(weight, tied, scheme)
    if wanted is not None and 0 in weight.shape:
        wanted, reason = None, "it is empty"
    if wanted is None:
        return TensorPlan(weight.name, weight.shape, weight.role, None, PLAIN, reason, weight.name)
    rank = 3 if weight.role == "experts" else 2
    if len(weight.shape) != rank:
        raise QuantizationError(
            f"{weight.name}: shape {list(weight.shape)}, expected {rank} dimensions for the role {weight.role!r}; "
            f"exclude it (--exclude {weight.name!r})"
        )
    fitted, note = _fit(wanted, weight)
    if weight.role == "experts" and fitted.activation is not None:
        # Between an expert's two linears nothing of the graph could quantize; half of the inputs would make no format.
        fitted = replace(fitted, activation=None)
        note += "; weights only: what an expert's second linear reads is inside of an operator"
    # An embedding is looked up, not multiplied: it has no inputs that a calibrated method could learn from.
    method = "rtn" if weight.role == "embedding" else scheme.weight_method
    return TensorPlan(weight.name, weight.shape, weight.role, fitted, method, reason + note, weight.name)


def _wanted(
    weight: WeightInfo, tied: Sequence[WeightInfo], scheme: QuantizationScheme
) -> tuple[TensorScheme | None, str]:
    for member in (weight, *tied):
        for pattern in scheme.exclude:
            if fnmatchcase(member.name, pattern):
                return None, f"--exclude {pattern!r}" + ("" if member is weight else f" matches {member.name}")
    if weight.role == "router":
        return None, "routers stay plain: they are small, and an error there picks other experts"
    if weight.role in ("linear", "experts"):
        return scheme.linear, f"--quantization {scheme.name}"
    asked: dict[str, Precision] = {}
    for member in (weight, *tied):
        option, precision = (
            ("--lm-head", scheme.lm_head) if member.role == "head" else ("--embedding", scheme.embedding)
        )
        if precision is not None:
            asked[option] = precision
    if len(set(asked.values())) > 1:
        said = ", ".join(f"{option}: {precision}" for option, precision in asked.items())
        raise OptionError(
            f"the model's head and embedding are one tensor ({weight.name}) and cannot have two formats ({said}); "
            "give one of the options, or the same precision in both"
        )
    if not asked:
        return None, f"{weight.role}s stay plain unless asked for"
    option, precision = next(iter(asked.items()))
    if precision is None or precision == PLAIN:
        return None, f"{option} none"
    return precision, f"{option} {precision.type}"


def _fit(scheme: TensorScheme, weight: WeightInfo) -> tuple[TensorScheme, str]:
    """Fit the group size to the weight's input channels; return also what there is to say about it."""
    channels = weight.shape[-1]
    if scheme.group_size == PER_CHANNEL:
        # ONNX scales along one axis have one dimension, so the rows of stacked experts become blocks instead.
        return (replace(scheme, group_size=channels), "") if weight.role == "experts" else (scheme, "")
    if scheme.group_size >= channels:
        one = f"; one group: {channels} input channels are fewer than the group size of {scheme.group_size}"
        return replace(scheme, group_size=channels), "" if scheme.group_size == channels else one
    last = channels % scheme.group_size
    if last == 0:
        return scheme, ""
    groups = group_count(channels, scheme.group_size)
    return scheme, f"; {channels} input channels make {groups} groups, the last of {last}"
