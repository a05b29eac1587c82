"""Every operator in torch, one plain function each, by `(domain, name)`; see `Registry` for what they take.

Operators that are not here run through `onnx.reference` (see `fallback.py`).
"""

from __future__ import annotations

from inferencex.runtime.backends.reference import elementwise, fused, indexing, linear, reductions, shapes
from inferencex.runtime.backends.reference.registry import Operator

OPERATORS: dict[tuple[str, str], Operator] = {
    **elementwise.OPERATORS,
    **reductions.OPERATORS,
    **linear.OPERATORS,
    **shapes.OPERATORS,
    **indexing.OPERATORS,
    **fused.OPERATORS,
}
