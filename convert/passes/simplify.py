"""Constant folding, common subexpressions and dead code, with onnxscript's and onnx_ir's own passes."""

from __future__ import annotations

import logging

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer as optimizer

from inferencex.convert.passes.editing import drop_dead


def simplify(model: ir.Model) -> int:
    """Fold constants into initializers, merge equal nodes and remove unused ones; returns how many nodes went."""
    before = len(model.graph)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the folder remarks on each initializer without a value, which is all of them
    try:
        optimizer.fold_constants(model, onnx_shape_inference=False)
        common.CommonSubexpressionEliminationPass()(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    finally:
        logging.disable(disabled)
    drop_dead(model.graph)
    return before - len(model.graph)
