"""What plots written by hand as SVG have in common: the document's head, its colours on light and dark pages, steps."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

_LIGHT = {
    "text": "fill: #1f2328",
    ".page": "fill: #ffffff",
    ".grid": "stroke: #d1d9e0; stroke-width: 1",
    ".axis": "stroke: #59636e; stroke-width: 1",
}
_DARK = {"text": "fill: #f0f6fc", ".page": "fill: #0d1117", ".grid": "stroke: #3d444d", ".axis": "stroke: #9198a1"}
_LEAST = 1e-300  # below it there are no powers of ten to divide by


def opening(title: str, width: int, height: int, light: str, dark: str, font_size: int = 11) -> list[str]:
    """Return the first lines of a document of `width` x `height` pixels, up to its background.

    `light` and `dark` are the rules of the plot's own classes, of which `dark` changes what it must on dark pages.
    There are the classes `title`, `grid` and `axis` for texts and lines.
    """
    style = [
        f"text {{ font: {font_size}px system-ui, sans-serif }} .title {{ font-size: 14px; font-weight: 600 }}",
        " ".join(f"{name} {{ {rule} }}" for name, rule in _LIGHT.items()),
        light.strip(),
        "@media (prefers-color-scheme: dark) {",
        " ".join(f"{name} {{ {rule} }}" for name, rule in _DARK.items()),
        f"{dark.strip()} }}",
    ]
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{attribute(title)}">',
        "<style>\n" + "\n".join(style) + "\n</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]


def round_step(span: float, most: int) -> float:
    """Return 1, 2 or 5 times a power of ten that divides `span` into at most `most` steps; 1 for next to no span."""
    if span < _LEAST:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * scale for factor in (1, 2, 5, 10) if span / (factor * scale) <= most + 1e-9)


def attribute(text: str) -> str:
    """Escape a text for an attribute in double quotes."""
    return escape(text, {'"': "&quot;"})
