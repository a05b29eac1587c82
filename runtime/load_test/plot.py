"""Latency against throughput as an SVG: what users wait while the server works through more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from inferencex.formats.svg import opening, round_step
from inferencex.runtime.load_test.statistics import Distribution, Result

_WIDTH, _HEIGHT = 420, 300  # pixels of a panel, axes and title included
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 26, 40  # of which around the plotting area
_HEAD = 58  # above the panels

_LIGHT = """
.p50 { stroke: #0969da; fill: #0969da } .p99 { stroke: #bc4c00; fill: #bc4c00 } polyline { fill: none !important }
.p50, .p99 { stroke-width: 1.5 } tspan.p50, tspan.p99 { stroke: none } .mark { font-size: 10px }
"""
_DARK = ".p50 { stroke: #4493f8; fill: #4493f8 } .p99 { stroke: #f0883e; fill: #f0883e }"


@dataclass(frozen=True)
class _Point:
    throughput: float  # output tokens a second, or requests where tokens are not known
    times: Distribution
    label: str


def latency_throughput(title: str, results: Sequence[Result]) -> str:
    """Return an SVG document with a panel for each latency that was measured, in the order of the results.

    Hovering over a point shows its load and figures. Measurements in which nothing completed are left out.
    """
    by_tokens = any(result.output_tokens for result in results)
    x_label = "output tokens/s" if by_tokens else "requests/s"
    panels = []
    for name, field in (
        ("time to first token", "time_to_first_token"),
        ("inter-token latency", "inter_token_latency"),
        ("end to end", "latency"),
    ):
        points = [
            _Point(
                result.output_tokens_per_second if by_tokens else result.requests_per_second,
                getattr(result, field),
                result.load.label,
            )
            for result in results
            if getattr(result, field) is not None
        ]
        if points:
            panels.append((name, points))
    width, height = max(len(panels), 1) * _WIDTH, _HEAD + _HEIGHT
    lines = [
        *opening(title, width, height, _LIGHT, _DARK),
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="42">latency in ms by {x_label}: <tspan class="p50">● p50</tspan>  '
        '<tspan class="p99">● p99</tspan></text>',
    ]
    for place, (name, points) in enumerate(panels):
        lines.append(f'<g transform="translate({place * _WIDTH} {_HEAD})">')
        lines += _panel(name, points, x_label)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(title: str, points: Sequence[_Point], x_label: str) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    x_step, x_top = _scale(max(point.throughput for point in points))
    y_step, y_top = _scale(max(1e3 * point.times.p99 for point in points))

    def x(value: float) -> float:
        return round(_LEFT + (right - _LEFT) * value / x_top, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - _TOP) * value / y_top, 1)

    lines = [f'<text x="{_LEFT}" y="16">{escape(title)}</text>']
    for index in range(round(y_top / y_step) + 1):
        at = y(index * y_step)
        lines.append(f'<line class="{"grid" if index else "axis"}" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{index * y_step:.6g}</text>')
    for index in range(round(x_top / x_step) + 1):
        lines.append(
            f'<text x="{x(index * x_step)}" y="{bottom + 15}" text-anchor="middle">{index * x_step:.6g}</text>'
        )
    lines.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    for name in ("p99", "p50"):
        placed = [(point, 1e3 * getattr(point.times, name)) for point in points]
        path = " ".join(f"{x(point.throughput)},{y(value)}" for point, value in placed)
        lines.append(f'<polyline class="{name}" points="{path}"/>')
        for point, value in placed:
            lines.append(
                f'<circle class="{name}" cx="{x(point.throughput)}" cy="{y(value)}" r="3">'
                f"<title>{escape(point.label)}: {name} {value:.4g} ms at {point.throughput:.4g} {escape(x_label)}"
                "</title></circle>"
            )
    for point in points:
        above = y(1e3 * point.times.p50) - 7
        place = f'x="{x(point.throughput)}" y="{above:.1f}" text-anchor="middle"'
        lines.append(f'<text class="mark" {place}>{_mark(point.label)}</text>')
    return lines


def _scale(largest: float) -> tuple[float, float]:
    """Return a step between lines and the end of an axis, for values up to `largest`."""
    largest = largest if math.isfinite(largest) and largest > 0 else 1.0
    step = round_step(largest, 5)
    return step, step * max(1, math.ceil(largest / step - 1e-9))


def _mark(label: str) -> str:
    """Return the number that a load's label begins with."""
    return escape(label.split()[0]) if label else ""
