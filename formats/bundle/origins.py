"""Which of the checkpoint's parameters every stored weight is made of, so that they can be written out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferencex.formats.bundle.layout import MANIFEST_FILE, MAX_ELEMENTS
from inferencex.formats.errors import BundleError
from inferencex.formats.records import record

_ORIGIN_FIELDS = {"parts", "computed_by"}
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
    origins: dict[str, WeightOrigin] = {}
    for name, entry in entries.items():
        try:
            origins[name] = _origin(entry)
        except BundleError as error:
            raise BundleError(f"{MANIFEST_FILE}: made_of.{name[:80]!r}: {error}") from None
    return origins


def _origin(entry: object) -> WeightOrigin:
    if not isinstance(entry, dict) or entry.keys() != _ORIGIN_FIELDS:
        raise BundleError(f"expected an object with parts and computed_by, found {str(entry)[:80]!r}")
    parts, computed_by = entry["parts"], entry["computed_by"]
    if not isinstance(parts, list) or not isinstance(computed_by, list):
        raise BundleError("parts and computed_by are lists")
    if not all(isinstance(name, str) for name in computed_by):
        raise BundleError(f"computed_by lists names of operators, found {str(computed_by)[:80]!r}")
    return WeightOrigin(tuple([_part(part) for part in parts]), tuple(computed_by))


def _part(entry: object) -> WeightPart:
    if not isinstance(entry, dict) or entry.keys() != _PART_FIELDS:
        raise BundleError(f"a part is an object with {sorted(_PART_FIELDS)}, found {str(entry)[:80]!r}")
    start, rows, added = entry["start"], entry["rows"], entry["added"]
    # Of JSON: a truth is an int to isinstance.
    numbers = type(start) is type(rows) is int and 0 <= start <= MAX_ELEMENTS and 0 <= rows <= MAX_ELEMENTS
    right = isinstance(entry["parameter"], str) and isinstance(entry["transposed"], bool) and isinstance(added, float)
    if not numbers or not right:
        raise BundleError(f"the part {str(entry)[:160]} has an entry of the wrong type")
    return WeightPart(entry["parameter"], start, rows, entry["transposed"], added)
