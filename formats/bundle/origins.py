"""Which of the checkpoint's parameters every stored weight is made of, so that they can be written out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferencex.formats.bundle.layout import MANIFEST_FILE, MAX_ELEMENTS
from inferencex.formats.errors import BundleError
from inferencex.formats.records import record

_PART_FIELDS = {"parameter", "start", "rows", "transposed", "added"}


@record(frozen=True)
class WeightPart:
    """Rows of a stored weight that are rows of one parameter.

    parameter:   name in the model's state, `model.layers.0.self_attn.q_proj.weight`
    start:       first of the parameter's rows, after `transposed`
    rows:        how many rows of the first axis
    transposed:  whether the parameter has its last two axes the other way round
    added:       what was added to the parameter's numbers, 1.0 for norms that compute `1 + weight`
    """

    parameter: str
    start: int
    rows: int
    transposed: bool = False
    added: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the form that `bundle.json` keeps."""
        return {
            "parameter": self.parameter,
            "start": self.start,
            "rows": self.rows,
            "transposed": self.transposed,
            "added": self.added,
        }


@record(frozen=True)
class WeightOrigin:
    """How a stored weight came from parameters: the parts it is made of, one after the other along the first axis.

    parts:        empty when it is made in a way that rows of parameters do not describe
    computed_by:  then, the operators that make it
    """

    parts: tuple[WeightPart, ...]
    computed_by: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the form that `bundle.json` keeps."""
        return {"parts": [part.to_json() for part in self.parts], "computed_by": list(self.computed_by)}


def parse_origins(entries: Mapping[str, Any]) -> dict[str, WeightOrigin]:
    """Read `made_of` of `bundle.json`; raises BundleError naming the entry that is wrong."""
    return {name: _origin(f"{MANIFEST_FILE}: made_of.{name[:80]!r}", entry) for name, entry in entries.items()}


def _origin(where: str, entry: object) -> WeightOrigin:
    if not isinstance(entry, dict) or set(entry) != {"parts", "computed_by"}:
        raise BundleError(f"{where}: expected an object with parts and computed_by, found {str(entry)[:80]!r}")
    parts, computed_by = entry["parts"], entry["computed_by"]
    if not isinstance(parts, list) or not isinstance(computed_by, list):
        raise BundleError(f"{where}: parts and computed_by are lists")
    if not all(isinstance(name, str) for name in computed_by):
        raise BundleError(f"{where}: computed_by lists names of operators, found {str(computed_by)[:80]!r}")
    return WeightOrigin(tuple(_part(where, part) for part in parts), tuple(computed_by))


def _part(where: str, entry: object) -> WeightPart:
    if not isinstance(entry, dict) or set(entry) != _PART_FIELDS:
        raise BundleError(f"{where}: a part is an object with {sorted(_PART_FIELDS)}, found {str(entry)[:80]!r}")
    start, rows, added = entry["start"], entry["rows"], entry["added"]
    numbers = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_ELEMENTS for n in (start, rows))
    right = isinstance(entry["parameter"], str) and isinstance(entry["transposed"], bool) and isinstance(added, float)
    if not numbers or not right:
        raise BundleError(f"{where}: the part {str(entry)[:160]} has an entry of the wrong type")
    return WeightPart(entry["parameter"], start, rows, entry["transposed"], added)
