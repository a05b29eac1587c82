"""Quality against cost as an SVG: bundles that no other beats in both are joined by a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from inferencex.formats.svg import opening, round_step

_WIDTH, _HEIGHT = 820, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 260, 48, 48  # around the plotting area; the right margin holds the key
_LINE = 17  # pixels between lines of the key
_LEAST = 1e-6  # below it two models are the same, and a logarithm would say too much

_LIGHT = (
    ".best { fill: #0969da } .other { fill: none; stroke: #59636e; stroke-width: 1.6 } "
    ".front { fill: none; stroke: #0969da; stroke-width: 1.5 } .mark { font-size: 10px }"
)
_DARK = ".best { fill: #4493f8 } .front { stroke: #4493f8 } .other { stroke: #9198a1 }"


@dataclass(frozen=True)
class Point:
    """A bundle: what it costs (or gains, for a speed), and its loss of quality."""

    name: str
    x: float
    loss: float


def front(points: Sequence[Point], more_is_better: bool) -> list[Point]:
    """Return the points that no other one beats in both directions, by their x."""
    sign = -1.0 if more_is_better else 1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (sign * each.x, each.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return sorted(best, key=lambda each: each.x)


def plot(title: str, points: Sequence[Point], x_label: str, loss_label: str, *, more_is_better: bool = False) -> str:
    """Return an SVG document: cost to the right from 0, loss upwards on a logarithmic scale.

    Each bundle is a numbered point that the key beside names; hovering shows its figures. A loss below 1e-6 is drawn
    on the lowest line, which is where the reference itself is.
    """
    drawn = [point for point in points if math.isfinite(point.loss) and math.isfinite(point.x)]
    best = front(drawn, more_is_better)
    low, high = _decades([point.loss for point in drawn])
    step = round_step(max((point.x for point in drawn), default=1.0), 6)
    last = step * math.ceil(max((point.x for point in drawn), default=1.0) / step)
    height = max(_HEIGHT, _TOP + _LINE * len(drawn) + 20)
    lines = [
        *opening(title, _WIDTH, height, _LIGHT, _DARK, font_size=12),
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]

    def x(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / last, 1)

    def y(loss: float) -> float:
        share = (math.log10(max(loss, 10.0**low)) - low) / (high - low)
        return round(height - _BOTTOM - (height - _TOP - _BOTTOM) * share, 1)

    for decade in range(low, high + 1):
        at, kind = y(10.0**decade), "axis" if decade == low else "grid"
        lines.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{10.0**decade:g}</text>')
    for index in range(round(last / step) + 1):
        value = index * step
        lines.append(f'<text x="{x(value)}" y="{height - _BOTTOM + 17}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    lines.append(
        f'<text transform="translate(14 {height / 2}) rotate(-90)" text-anchor="middle">{escape(loss_label)}</text>'
    )
    if len(best) > 1:
        path = " ".join(f"{x(point.x)},{y(point.loss)}" for point in best)
        lines.append(f'<polyline class="front" points="{path}"/>')
    for number, point in enumerate(drawn, 1):
        kind = "best" if point in best else "other"
        at_x, at_y = x(point.x), y(point.loss)
        figures = f"{point.name}: {x_label} {point.x:.4g}, {loss_label} {point.loss:.3g}"
        lines.append(f'<circle class="{kind}" cx="{at_x}" cy="{at_y}" r="4"><title>{escape(figures)}</title></circle>')
        lines.append(f'<text class="mark" x="{at_x + 6}" y="{at_y - 4}">{number}</text>')
        where = _TOP + _LINE * (number - 1)
        lines.append(f'<circle class="{kind}" cx="{_WIDTH - _RIGHT + 22}" cy="{where - 4}" r="4"/>')
        lines.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{where}">{number} {escape(point.name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _decades(losses: Sequence[float]) -> tuple[int, int]:
    """Exponents of the powers of ten around all losses that a logarithm can show."""
    shown = [loss for loss in losses if loss > _LEAST]
    if not shown:
        return -4, 0
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    if len(shown) < len(losses):
        low -= 1  # a line of its own for the reference
    return low, max(high, low + 1)
