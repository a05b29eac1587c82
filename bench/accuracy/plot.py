"""KL divergence against bits per weight as an SVG, written by hand, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from bench.accuracy.results import Finding
from bench.accuracy.tools import OURS
from inferencex.formats.svg import opening

_WIDTH, _HEIGHT = 840, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 250, 48, 44  # around the plotting area; the right margin holds the key
_LINE = 17  # pixels between lines of the key

_LIGHT = ".ours { fill: #0969da } .peer { fill: none; stroke: #59636e; stroke-width: 1.6 } .mark { font-size: 10px }"
_DARK = ".ours { fill: #4493f8 } .peer { stroke: #9198a1 }"


def scatter(title: str, findings: Sequence[Finding]) -> str:
    """Return an SVG document: bits per weight to the right, mean KL upwards on a logarithmic scale.

    Each row is a numbered point, ours filled; the key beside names them, and hovering shows the figures. Rows whose
    KL is 0 or not finite are left out.
    """
    drawn = [found for found in findings if found.mean_kl > 0 and math.isfinite(found.mean_kl)]
    low, high = _decades([found.mean_kl for found in drawn])
    first, last = _span([found.bits for found in drawn])
    height = max(_HEIGHT, _TOP + _LINE * len(drawn) + 20)
    lines = [
        *opening(title, _WIDTH, height, _LIGHT, _DARK, font_size=12),
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]

    def x(bits: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (bits - first) / (last - first), 1)

    def y(kl: float) -> float:
        share = (math.log10(kl) - low) / (high - low)
        return round(height - _BOTTOM - (height - _TOP - _BOTTOM) * share, 1)

    for decade in range(low, high + 1):
        at = y(10.0**decade)
        kind = "axis" if decade == low else "grid"
        lines.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{10.0**decade:g}</text>')
    for bits in range(first, last + 1):
        lines.append(f'<text x="{x(bits)}" y="{height - _BOTTOM + 16}" text-anchor="middle">{bits}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">bits per weight</text>')
    lines.append(
        f'<text transform="translate(14 {height / 2}) rotate(-90)" text-anchor="middle">mean KL, nats per token</text>'
    )
    for number, found in enumerate(drawn, 1):
        kind = "ours" if found.tool == OURS else "peer"
        at_x, at_y = x(found.bits), y(found.mean_kl)
        name = f"{found.tool}: {found.scheme}"
        lines.append(
            f'<circle class="{kind}" cx="{at_x}" cy="{at_y}" r="4"><title>{escape(name)}: {found.bits:.2f} bits, '
            f"KL {found.mean_kl:.3g}</title></circle>"
        )
        lines.append(f'<text class="mark" x="{at_x + 6}" y="{at_y - 4}">{number}</text>')
        where = _TOP + _LINE * (number - 1)
        lines.append(f'<circle class="{kind}" cx="{_WIDTH - _RIGHT + 22}" cy="{where - 4}" r="4"/>')
        lines.append(
            f'<text x="{_WIDTH - _RIGHT + 32}" y="{where}">{number} {escape(f"{found.tool}/{found.row}")}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Exponents of the powers of ten around all values."""
    if not values:
        return -2, 0
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _span(bits: Sequence[float]) -> tuple[int, int]:
    """Whole numbers around all values."""
    if not bits:
        return 4, 8
    first, last = math.floor(min(bits)), math.ceil(max(bits))
    return first, max(last, first + 1)
