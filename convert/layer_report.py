"""What became of each quantized weight: its format, and what the format costs before and after calibration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from inferencex.convert.error_plot import Panel, Point, small_multiples

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class LayerReport:
    """One weight of the graph.

    name:              as in the graph; merged weights are joined with `+`
    shape:             `[N, K]`, or `[E, N, K]` for experts
    method:            what was applied, such as `awq+gptq`
    format:            how it is stored, such as `int4-g64`
    bits_per_weight:   with scales and zero points
    weight_error:      norm of (weight - stored) over norm of weight, in what the layer computes (folding undone)
    output_error_rtn:  norm of (output - output with the weight rounded to nearest) over norm of output, over the
                       calibration samples; None where nothing was measured
    output_error:      the same for the weight as it is stored
    tokens:            calibration tokens that reached it (the fewest of its experts); None where none were counted
    remark:            what a user should know, such as experts that saw no token
    """

    name: str
    shape: tuple[int, ...]
    method: str
    format: str
    bits_per_weight: float
    weight_error: float
    output_error_rtn: float | None = None
    output_error: float | None = None
    tokens: int | None = None
    remark: str = ""

    @property
    def block(self) -> int | None:
        """Number of the block it belongs to, the first number in its name; None outside of blocks."""
        found = _NUMBER.search(self.name)
        return int(found.group()) if found else None

    @property
    def kind(self) -> str:
        """What it is within its block: its name without block, `.weight` and what merged parts have in common."""
        parts = [part.removesuffix(".weight") for part in self.name.split("+")]
        parts = [part[found.end() + 1 :] if (found := _NUMBER.search(part)) else part for part in parts]
        return "+".join([parts[0], *(part.rsplit(".", 1)[-1] for part in parts[1:])])


def bits_per_weight(layers: Iterable[LayerReport]) -> float:
    """Return the mean over all weights, with scales and zero points; NaN for no weights."""
    sizes = [(prod(layer.shape), layer.bits_per_weight) for layer in layers]
    total = sum(size for size, _ in sizes)
    return sum(size * bits for size, bits in sizes) / total if total else float("nan")


def layer_tables(layers: Sequence[LayerReport]) -> list[str]:
    """Return Markdown: means by kind of weight, then every weight."""
    lines = [
        f"{len(layers)} weights, {bits_per_weight(layers):.3f} bits per weight. Errors are relative: the norm of the "
        "difference over the norm of what it should be. RTN is rounding to nearest, in the same format.",
        "",
        "| weights | count | method | format | bits | weight error | output error, RTN | output error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kind, method, stored), members in _grouped(layers).items():
        before, after = _both([(m.output_error_rtn, m.output_error) for m in members])
        lines.append(
            f"| {kind} | {len(members)} | {method} | {stored} | {bits_per_weight(members):.3f} "
            f"| {_percent(_mean([m.weight_error for m in members]))} | {_percent(before)} | {_percent(after)} |"
        )
    lines += [
        "",
        "<details><summary>Every weight</summary>",
        "",
        "| weight | shape | method | format | bits | weight error | output error, RTN | output error | tokens | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{layer.name}` | {list(layer.shape)} | {layer.method} | {layer.format} | {layer.bits_per_weight:.3f} "
        f"| {_percent(layer.weight_error)} | {_percent(layer.output_error_rtn)} | {_percent(layer.output_error)} "
        f"| {'' if layer.tokens is None else f'{layer.tokens:,}'} | {layer.remark} |"
        for layer in layers
    ]
    return [*lines, "", "</details>"]


def error_plot(layers: Sequence[LayerReport], title: str) -> str | None:
    """Return a plot of the output error by block, a panel for each kind of weight; None when nothing was measured."""
    by_kind: dict[str, list[Point]] = {}
    for layer in layers:
        if layer.output_error is not None:
            point = Point(layer.block or 0, layer.output_error_rtn, layer.output_error, layer.name)
            by_kind.setdefault(layer.kind, []).append(point)
    if not by_kind:
        return None
    panels = []
    for kind, points in by_kind.items():
        before, after = _both([(point.before, point.after) for point in points])
        change = f"mean {_percent(after)}" if before is None else f"mean {_percent(before)} → {_percent(after)}"
        panels.append(Panel(f"{kind}: {change}", sorted(points, key=lambda point: point.x)))
    return small_multiples(title, panels, x_label="block", y_label="relative output error", before="RTN")


def _grouped(layers: Sequence[LayerReport]) -> dict[tuple[str, str, str], list[LayerReport]]:
    groups: dict[tuple[str, str, str], list[LayerReport]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.method, layer.format), []).append(layer)
    return groups


def _both(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """Return the means before and after, each over those that have both where any has: means of the same weights."""
    complete = [(before, after) for before, after in pairs if before is not None and after is not None]
    if complete:
        return _mean([before for before, _ in complete]), _mean([after for _, after in complete])
    return None, _mean([after for _, after in pairs if after is not None])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
