"""Which rows an expert sees."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.calibrate.sharing import inner_name
from inferencex.convert.calibrate.streams import Rows, Streams
from inferencex.formats.dialect.schemas import DOMAIN


class Routing:
    """Finds the rows of a shared input that are routed to one expert of a weight `[E, N, K]`."""

    def __init__(self, graph: ir.Graph) -> None:
        self._readers: dict[str, tuple[ir.Node, bool]] = {}
        for node in graph:
            if node.domain != DOMAIN or node.op_type not in ("Experts", "ExpertLinear"):
                continue
            weights = node.inputs[3:5] if node.op_type == "Experts" else node.inputs[2:3]
            for place, weight in enumerate(weights):
                assert weight is not None
                self._readers[str(weight.name)] = (node, place == 1)

    def is_expert(self, weight: str) -> bool:
        """Tell whether a weight is a stack of experts."""
        return weight in self._readers

    def rows(self, weight: str, expert: int, streams: Streams) -> list[Rows]:
        """Return, for each batch, how to get the rows that one expert reads."""
        node, is_inner = self._readers[weight]
        source, index = node.inputs[0], node.inputs[1]
        assert source is not None and index is not None
        value = inner_name(node) if is_inner else str(source.name)
        flat = is_inner or node.op_type == "ExpertLinear"

        def select(rows: Rows, routes: Rows) -> Rows:
            def load() -> Tensor:
                chosen = routes()
                seen = chosen.reshape(-1) == expert if flat else (chosen == expert).any(-1)
                return rows()[seen]

            return load

        return [select(*pair) for pair in zip(streams.rows(value), streams.rows(str(index.name)), strict=True)]


def tokens_by_expert(index: list[Rows], experts: int) -> Tensor:
    """Count the rows of every expert, int64 `[E]`."""
    return sum((torch.bincount(batch().reshape(-1), minlength=experts) for batch in index), torch.zeros(experts).long())
