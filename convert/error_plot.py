"""A plot as SVG, written by hand: panels of two series over a common scale, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from inferencex.formats.svg import opening, round_step

_WIDTH, _HEIGHT = 420, 170  # pixels of a panel, axes and title included
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 26, 34  # of which around the plotting area
_HEAD = 54  # above all panels
_COLUMNS = 2

_LIGHT = """
.before { stroke: #818b98; fill: #818b98 } .after { stroke: #0969da; fill: #0969da } polyline { fill: none !important }
.before, .after { stroke-width: 1.5 } tspan.before, tspan.after { stroke: none }
"""
_DARK = ".before { stroke: #9198a1; fill: #9198a1 } .after { stroke: #4493f8; fill: #4493f8 }"


@dataclass(frozen=True)
class Point:
    """Values at a place `x`, as fractions of 1: without a method (None: unknown) and with it; `name` says of what."""

    x: int
    before: float | None
    after: float | None
    name: str


@dataclass(frozen=True)
class Panel:
    """One set of axes with its points, ascending in `x`."""

    title: str
    points: Sequence[Point]


def small_multiples(
    title: str, panels: Sequence[Panel], *, x_label: str, y_label: str, before: str, after: str = "stored"
) -> str:
    """Return an SVG document. All panels share both scales; the y axis is in percent and begins at 0.

    Hovering over a point shows its name and values. Points whose value is not finite are left out.
    """
    values = [v for panel in panels for p in panel.points for v in (p.before, p.after) if v is not None]
    top = max((value for value in values if math.isfinite(value)), default=0.0) or 0.01
    step = round_step(top, 4)
    top = step * max(1, math.ceil(top / step - 1e-9))
    last = max((point.x for panel in panels for point in panel.points), default=0)
    rows = -(-len(panels) // _COLUMNS)
    columns = min(len(panels), _COLUMNS)
    width, height = max(columns, 1) * _WIDTH, _HEAD + rows * _HEIGHT
    lines = [
        *opening(title, width, height, _LIGHT, _DARK),
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="40">{escape(y_label)} in % by {escape(x_label)}: '
        f'<tspan class="before">● {escape(before)}</tspan>  '
        f'<tspan class="after">● {escape(after)}</tspan></text>',
    ]
    for index, panel in enumerate(panels):
        x, y = index % _COLUMNS * _WIDTH, _HEAD + index // _COLUMNS * _HEIGHT
        lines.append(f'<g transform="translate({x} {y})">')
        lines += _axes(panel.title, top, step, last, x_label, y_label)
        lines += _series(panel.points, "before", before, top, last) + _series(panel.points, "after", after, top, last)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes(title: str, top: float, step: float, last: int, x_label: str, y_label: str) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    lines = [f'<text x="{_LEFT}" y="16">{escape(title)}</text>']
    for index in range(round(top / step) + 1):
        y = _y(index * step, top)
        lines.append(f'<line class="{"grid" if index else "axis"}" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        label = f"{100 * index * step:.6g}"
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for index in range(0, last + 1, max(1, round(round_step(last, 8)))):
        lines.append(f'<text x="{_x(index, last)}" y="{bottom + 14}" text-anchor="middle">{index}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    lines.append(f'<text x="{middle_x}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    lines.append(
        f'<text transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">{escape(y_label)}, %</text>'
    )
    return lines


def _series(points: Sequence[Point], which: str, label: str, top: float, last: int) -> list[str]:
    drawn = [(p, v) for p in points if (v := getattr(p, which)) is not None and math.isfinite(v)]
    if not drawn:
        return []
    places = " ".join(f"{_x(point.x, last)},{_y(value, top)}" for point, value in drawn)
    lines = [f'<polyline class="{which}" points="{places}"/>']
    for point, value in drawn:
        lines.append(
            f'<circle class="{which}" cx="{_x(point.x, last)}" cy="{_y(value, top)}" r="2.5">'
            f"<title>{escape(point.name)}: {escape(label)} {100 * value:.3g} %</title></circle>"
        )
    return lines


def _x(value: int, last: int) -> float:
    inner = _WIDTH - _LEFT - _RIGHT - 16
    return round(_LEFT + 8 + inner * (value / last if last else 0.5), 1)


def _y(value: float, top: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top, 1)
