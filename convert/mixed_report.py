"""What `report.md` says of formats that a budget chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = 20  # weights in the ranking of report.md; report.json has all


def mixed_lines(mixed: Mapping[str, Any]) -> list[str]:
    """Return the Markdown of a summary: the budget, the formats by count, the most sensitive weights."""
    measured = mixed["measured_kl"]
    lines = [
        f"`{mixed['budget']['option']}`: {mixed['bits']:.3f} bits per weight over the weights whose format was chosen. "
        f"Mean KL expected {mixed['expected_kl']:.4g}"
        + (f", measured {measured:.4g}." if measured is not None else "; it was not measured."),
        "",
        "| format | weights | parameters | bits |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {entry['weights']} | {entry['parameters']:,} | {8 * entry['bytes'] / entry['parameters']:.3f} |"
        for name, entry in mixed["formats"].items()
    ]
    if len(mixed["attempts"]) > 1:
        lines += ["", "| conversion | bits | KL predicted | expected | measured |", "|---|---|---|---|---|"]
        lines += [
            f"| {number} | {a['bits']:.3f} | {a['predicted_kl']:.4g} | {a['expected_kl']:.4g} "
            f"| {'' if a['measured_kl'] is None else format(a['measured_kl'], '.4g')} |"
            for number, a in enumerate(mixed["attempts"], 1)
        ]
    types = list(mixed["weights"][0]["rises"])
    lines += [
        "",
        "What each weight alone is expected to add to the mean KL (rounded to nearest, in thousandths of a nat per "
        "token), most for its size first:",
        "",
        f"| weight | stored as | {' | '.join(types)} |",
        f"|---|---|{'---|' * len(types)}",
    ]
    lines += [
        f"| `{w['name']}` | {w['format']} | " + " | ".join(f"{1000 * w['rises'][kind]:.3g}" for kind in types) + " |"
        for w in mixed["weights"][:_SHOWN]
    ]
    return lines
