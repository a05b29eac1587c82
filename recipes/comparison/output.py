"""Files that a comparison leaves: results.json, results.md, and the plots that say something."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from inferencex.recipes.comparison.pareto import Point, plot
from inferencex.recipes.comparison.rows import Row, markdown


def size_of(bundle: Path) -> int:
    """Return the bytes of all files of a bundle."""
    return sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())


def write_comparison(rows: Sequence[Row], folder: Path) -> None:
    """Write the reports of a comparison into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = {name: text for name, text in plots_of(rows).items() if text is not None}
    for name, text in plots.items():
        (folder / name).write_text(text, encoding="utf-8")
    document = {"format": 1, "reference": rows[0].bundle, "bundles": [row.to_json() for row in rows]}
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown(rows, list(plots)), encoding="utf-8")


def plots_of(rows: Sequence[Row]) -> dict[str, str | None]:
    """Return KL divergence against size and against speed by the names of their files; None where nothing is known."""
    return {
        "pareto-size.svg": _plot("Quality and size", rows, lambda row: row.size_bytes / 1e6, "MB", False),
        "pareto-speed.svg": _plot(
            "Quality and speed",
            rows,
            lambda row: row.decode,
            "decoded tokens per second",
            True,
        ),
    }


def _plot(
    title: str, rows: Sequence[Row], cost: Callable[[Row], float | None], label: str, more_is_better: bool
) -> str | None:
    points = []
    for row in rows:
        x = cost(row)
        if x is not None and row.mean_kl is not None:
            points.append(Point(Path(row.bundle).name, x, row.mean_kl))
    if not points:
        return None
    return plot(title, points, label, "mean KL, nats per token", more_is_better=more_is_better)
