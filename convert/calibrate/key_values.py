"""Calibrate the KV cache: observe the keys and values of a block, and choose the scales they are kept with."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.calibrate.activations import ActivationStore
from inferencex.convert.calibrate.blocks import Block
from inferencex.convert.calibrate.sharing import rows_behind
from inferencex.convert.calibrate.work_dir import FinishedBlock
from inferencex.convert.kv_cache import KVLayerReport
from inferencex.convert.passes.editing import attribute
from inferencex.convert.quantize.kv_cache import count_magnitudes, search_scales
from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.formats.errors import QuantizationError
from inferencex.formats.kv_cache import KV_LARGEST, KVFormat
from inferencex.runtime.backends.reference.attention import keep_in_8_bits


def attention_layers(nodes: Iterable[ir.Node]) -> dict[int, ir.Node]:
    """Return the node that writes the keys and values of each layer, by layer."""
    found: dict[int, ir.Node] = {}
    for node in nodes:
        if node.domain == DOMAIN and node.op_type == "Attention" and attribute(node, "writes", 1):
            found.setdefault(int(attribute(node, "layer")), node)
    return found


@dataclass
class KeyValueCalibration:
    """Chooses scales for keys and values, block by block.

    kind:   the format of the cache
    store:  keeps what is observed until the block is finished
    pool:   computes
    """

    kind: KVFormat
    store: ActivationStore
    pool: Executor

    def observe(self, batch: int, node: ir.Node, keys: Tensor, values: Tensor) -> None:
        """Take in what an `Attention` node is given for a batch of samples: `[T, G * Dk]` and `[T, G * Dv]`."""
        if attribute(node, "writes", 1):
            layer, heads = int(attribute(node, "layer")), int(attribute(node, "num_kv_heads"))
            for part, tensor in (("keys", keys), ("values", values)):
                self.store.put(_key(layer, part, batch), tensor.to(torch.float32).reshape(len(tensor), heads, -1))

    def finish(self, block: Block, batches: int, originals: Mapping[str, Tensor], finished: FinishedBlock) -> None:
        """Choose the scales of the layers of a block, of which everything but refinement is decided.

        What factors of later linears do to values is taken into account: they are stored divided by them. Raises
        QuantizationError when keys or values are not finite.
        """
        for layer, node in attention_layers(block.nodes).items():
            heads = int(attribute(node, "num_kv_heads"))
            divisors = _value_divisors(node, block, originals, finished)
            keys = self._calibrate(layer, "keys", batches, heads, None)
            values = self._calibrate(layer, "values", batches, heads, divisors)
            finished.kv_scales[str(layer)] = np.stack([keys.scales, values.scales])
            finished.kv_report.append(
                asdict(
                    KVLayerReport(
                        layer,
                        self.kind,
                        heads,
                        keys.tokens,
                        keys.error,
                        values.error,
                        keys.error_absmax,
                        values.error_absmax,
                    )
                )
            )

    def _calibrate(
        self, layer: int, part: str, batches: int, heads: int, divisors: NDArray[np.float32] | None
    ) -> _Calibrated:
        """Search the scales of the keys or the values of a layer, and measure what they do."""

        def load(batch: int) -> Tensor:
            x = self.store.get(_key(layer, part, batch))
            return x if divisors is None else x / torch.from_numpy(divisors).reshape(heads, -1)

        def peaks(batch: int) -> Tensor:
            return load(batch).abs().amax((0, 2))

        largest = functools.reduce(torch.maximum, self.pool.map(peaks, range(batches))).numpy()
        if not np.isfinite(largest).all():
            head = int(np.flatnonzero(~np.isfinite(largest))[0])
            raise QuantizationError(
                f"the {part} of layer {layer} are not finite (NaN or infinity) in KV head {head} during calibration: "
                "the checkpoint is damaged, or the model does not work on this text"
            )
        counts = sum(self.pool.map(lambda batch: count_magnitudes(load(batch), largest), range(batches)))
        assert isinstance(counts, np.ndarray)
        scales = search_scales(counts, largest, self.kind)
        covering = np.where(largest > 0, largest / np.float32(KV_LARGEST[self.kind]), np.float32(1)).astype(np.float32)

        def errors(batch: int) -> NDArray[np.float64]:
            x = load(batch)
            kept = [x - keep_in_8_bits(x, s.tolist(), self.kind) for s in (scales, covering)]
            return np.array([len(x), *(float(y.square().sum(dtype=torch.float64)) for y in (x, *kept))])

        tokens, energy, chosen, absmax = sum(self.pool.map(errors, range(batches)))  # type: ignore[misc]
        for batch in range(batches):
            self.store.drop(_key(layer, part, batch))
        energy = energy or 1.0
        return _Calibrated(scales, int(tokens), math.sqrt(chosen / energy), math.sqrt(absmax / energy))


@dataclass(frozen=True)
class _Calibrated:
    """Scales `[G]`, and the relative errors they and those of the largest magnitudes leave."""

    scales: NDArray[np.float32]
    tokens: int
    error: float
    error_absmax: float


def _key(layer: int, part: str, batch: int) -> str:
    return f"kv/{layer}/{part}/{batch}"


def _value_divisors(
    node: ir.Node, block: Block, originals: Mapping[str, Tensor], finished: FinishedBlock
) -> NDArray[np.float32] | None:
    """Return what the values of an `Attention` node are divided by in the bundle, `[G * Dv]`; None for nothing."""
    behind = rows_behind(node.inputs[2])
    if behind is None:
        return None
    weight, rows = behind
    divisors = np.ones(len(originals[weight]), dtype=np.float32) if weight in originals else None
    for shared in (shared for stage in block.stages for shared in stage.shared):
        factors, absorber = finished.factors.get(shared.value), shared.absorber
        if divisors is not None and factors is not None and absorber is not None and weight in absorber.tensors:
            divisors[absorber.rows] *= factors
    return None if divisors is None else divisors[rows]
