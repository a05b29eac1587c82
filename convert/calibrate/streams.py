"""What the source model and the quantized one have computed for every sample, up to the current stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.calibrate.activations import ActivationStore
from inferencex.convert.calibrate.arithmetic import product_dtype
from inferencex.convert.calibrate.blocks import Stage
from inferencex.convert.calibrate.executor import BlockExecutor, Values, step_inputs
from inferencex.convert.calibrate.sharing import inner_name
from inferencex.formats.dialect.schemas import DOMAIN

_BATCH_TOKENS = 2048  # that one task runs together; a constant, for results must not depend on the machine

Rows = Callable[[], Tensor]


class Streams:
    """Runs stages over all samples, batch by batch.

    There is the `quantized` stream, in which every weight that is finished has its quantized value, and, if asked
    for, the `source` stream. Values that only linears with products of lower precision read are kept in it.
    """

    def __init__(
        self,
        graph: ir.Graph,
        token_ids: Tensor,
        store: ActivationStore,
        pool: Executor,
        *,
        with_source: bool,
        sequences: int | None = None,
    ) -> None:
        """Begin at the graph's inputs. `sequences` says how many samples a batch has, if not as many as go well."""
        step = sequences or max(1, _BATCH_TOKENS // token_ids.shape[1])
        self.sequences = step
        self.names = ("source", "quantized") if with_source else ("quantized",)
        self._executor = BlockExecutor(graph)
        self._store, self._pool = store, pool
        self._sequences = [len(part) for part in torch.split(token_ids, step)]
        self._kept: set[str] = {str(value.name) for value in graph.inputs}
        self._experts = {inner_name(n): n for n in graph if n.domain == DOMAIN and n.op_type == "Experts"}
        self._for_linears = _read_by_linears_only(graph)
        for index, part in enumerate(torch.split(token_ids, step)):
            for name, tensor in step_inputs(graph, part).items():
                for stream in self.names:
                    store.put(_key(stream, index, name), tensor)

    def advance(
        self,
        stage: Stage,
        weights: Mapping[str, Mapping[str, Tensor]],
        attended: Callable[[int, ir.Node, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Run a stage in every stream, each with its own weights; values that nobody needs any more are dropped.

        `attended(batch, node, keys, values)` is shown what Attention is given in the quantized stream.
        """
        made = {str(o.name) for node in stage.nodes for o in node.outputs} & set(stage.outputs)

        def run(task: tuple[str, int]) -> None:
            stream, batch = task
            values = {name: self._store.get(_key(stream, batch, name)) for name in stage.inputs}
            shown = None if attended is None or stream != "quantized" else functools.partial(attended, batch)
            outputs = self._executor.run(stage, values, weights[stream], self._sequences[batch], attended=shown)
            for name in made:
                tensor = outputs[name]
                lower = name in self._for_linears and tensor.is_floating_point()
                self._store.put(_key(stream, batch, name), tensor.to(product_dtype()) if lower else tensor)

        tasks = [(stream, batch) for batch in range(len(self._sequences)) for stream in self.names]
        for _ in self._pool.map(run, tasks):
            pass
        for name in sorted((self._kept | made) - set(stage.outputs)):
            self.drop(name)
        self._kept = (self._kept | made) & set(stage.outputs)

    def rows(self, name: str, stream: str = "quantized") -> list[Rows]:
        """Return, for each batch, how to get the rows `[rows, channels]` of a value."""

        def get(batch: int) -> Rows:
            def load() -> Tensor:
                tensor = self._store.get(_key(stream, batch, name))
                return tensor.reshape(-1, tensor.shape[-1]) if tensor.is_floating_point() else tensor

            return load

        return [get(batch) for batch in range(len(self._sequences))]

    def values(self, batch: int, stream: str = "quantized") -> Values:
        """Return everything that is kept of a batch."""
        return {name: self._store.get(_key(stream, batch, name)) for name in sorted(self._kept)}

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return len(self._sequences)

    def replace(self, compute: Callable[[int], Values]) -> None:
        """Replace the quantized stream's values of every batch by what `compute(batch)` has of them."""

        def renew(batch: int) -> None:
            for name, tensor in compute(batch).items():
                if name in self._kept:
                    key = _key("quantized", batch, name)
                    kept = self._store.get(key).dtype
                    self._store.drop(key)
                    self._store.put(key, tensor.to(kept))

        for _ in self._pool.map(renew, range(len(self._sequences))):
            pass

    def compute_inner(self, name: str, weights: Mapping[str, Tensor]) -> bool:
        """Compute what the second linears of experts read, if `name` is such a value, to be had from `rows`."""
        node = self._experts.get(name)
        if node is None:
            return False
        inputs = tuple(str(v.name) for v in node.inputs if v is not None and str(v.name) not in weights)
        stage = Stage((node,), inputs, (), ())

        def run(batch: int) -> None:
            found: list[Tensor] = []
            values = {value: self._store.get(_key("quantized", batch, value)) for value in inputs}
            self._executor.run(stage, values, weights, self._sequences[batch], lambda _, rows: found.append(rows))
            self._store.put(_key("quantized", batch, name), found[0].to(product_dtype()))

        for _ in self._pool.map(run, range(len(self._sequences))):
            pass
        return True

    def drop(self, name: str) -> None:
        """Forget a value."""
        for stream in self.names:
            for batch in range(len(self._sequences)):
                self._store.drop(_key(stream, batch, name))


def _key(stream: str, batch: int, name: str) -> str:
    return f"{stream}/{batch}/{name}"


def _read_by_linears_only(graph: ir.Graph) -> set[str]:
    """Name the values that nothing reads but linears, whose weights are multiplied in the dtype of products."""
    found: set[str] = set()
    for node in graph:
        for output in node.outputs:
            uses = list(output.uses())
            if uses and all(
                use.idx == 0
                and (use.node.domain, use.node.op_type) in (("", "Gemm"), (DOMAIN, "Experts"), (DOMAIN, "ExpertLinear"))
                for use in uses
            ):
                found.add(str(output.name))
    return found
