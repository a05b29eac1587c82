"""How much the predictions of a model change when one of its weights is stored with fewer bits.

The rise of the mean KL divergence by errors `E` of a weight is, to second order, half of their quadratic form with the
Fisher information of the predictions. At every position a token is drawn from what the source predicts, so that the
gradients `g_t` of its negative log probability, with regard to the products of the weight with its inputs `x_t`, have
that information as their second moments; tokens count as independent:

    rise(E) = 1/2 mean_t (g_t^T E x_t)^2

One block is in memory at a time: all run forward once, then each again with gradients, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.calibrate.activations import ActivationStore
from inferencex.convert.calibrate.arithmetic import one_thread_each, product_dtype
from inferencex.convert.calibrate.blocks import Block, Stage, cut_blocks
from inferencex.convert.calibrate.executor import BlockExecutor, step_inputs
from inferencex.convert.calibrate.run import CalibrationLimits
from inferencex.convert.calibrate.sharing import shared_inputs
from inferencex.convert.calibrate.whole_model import as_read
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize.rtn import quantize_weight
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.errors import QuantizationError

WINDOWS = 8
"""Windows of the calibration text that are looked at."""

LENGTH = 512
"""Tokens of each of them, at most."""


@dataclass(frozen=True)
class Candidate:
    """What a weight costs in one format.

    nbytes:  stored bytes, scales and zero points included
    rise:    expected rise of the mean KL, nats per token
    """

    scheme: TensorScheme
    nbytes: int
    rise: float


Sensitivities = dict[str, list[Candidate]]
"""Candidates by the name of the weight, in the order in which their schemes were given."""


def looked_at(token_ids: NDArray[np.int64]) -> Tensor:
    """Choose windows, int64 `[S, L]`, out of those of a calibration: `WINDOWS` all over it, each from its beginning."""
    samples = token_ids.shape[0]
    chosen = np.arange(min(WINDOWS, samples)) * samples // min(WINDOWS, samples)
    return torch.from_numpy(np.ascontiguousarray(token_ids[chosen, :LENGTH]))


class SensitivityMeasurement:
    """Measures the weights of `schemes`, each with the candidate schemes given for it.

    `token_ids` is int64 `[samples, length]`. The result depends on neither the threads nor the memory of `limits`.
    """

    def __init__(
        self,
        model: ir.Model,
        schemes: Mapping[str, Sequence[TensorScheme]],
        sources: Mapping[str, ParameterSource],
        token_ids: Tensor,
        limits: CalibrationLimits,
        seed: int = 0,
    ) -> None:
        self._graph, self._schemes, self._sources = model.graph, schemes, sources
        self._token_ids, self._limits, self._seed = token_ids, limits, seed
        self._blocks = [_one_stage(block) for block in cut_blocks(model.graph, shared_inputs(model, schemes))]

    def run(self, progress: Callable[[int, int], None]) -> Sensitivities:
        """Measure; `progress(done, total)` counts blocks, forward and backward.

        Raises QuantizationError when logits or gradients are not finite.
        """
        limits = self._limits
        store = ActivationStore(limits.scratch, limits.activation_bytes)
        found: Sensitivities = {}
        first = min(i for i, stage in enumerate(self._blocks) if any(name in self._schemes for name in stage.weights))
        total = 2 * len(self._blocks) - first
        with one_thread_each(), ThreadPoolExecutor(limits.threads) as pool:
            passes = _Passes(self._graph, self._token_ids, store, pool, self._seed)
            for done, stage in enumerate(self._blocks, 1):
                passes.forward(stage, self._weights(stage))
                progress(done, total)
            for index in range(len(self._blocks) - 1, first - 1, -1):
                stage = self._blocks[index]
                wanted = [name for name in stage.weights if name in self._schemes]
                originals = self._weights(stage)
                passes.backward(stage, originals, wanted)
                for name in wanted:
                    weight = originals[name].to(torch.float32)
                    found[name] = self._candidates(name, weight, passes, pool)
                    passes.forget(name)
                progress(len(self._blocks) + len(self._blocks) - index, total)
        return {name: found[name] for name in self._schemes}

    def _weights(self, stage: Stage) -> dict[str, Tensor]:
        def load(name: str) -> Tensor:
            return expression_of(self._graph.initializers[name]).evaluate(lambda key: self._sources[key].load())

        return {name: load(name) for name in stage.weights}

    def _candidates(self, name: str, weight: Tensor, passes: _Passes, pool: Executor) -> list[Candidate]:
        found = []
        matrices = weight if weight.dim() == 3 else weight[None]
        importance = np.stack([passes.mean_square(name, e, weight.shape[-1]) for e in range(len(matrices))])
        for scheme in self._schemes[name]:
            rounded = quantize_weight(
                name,
                weight.numpy(),
                scheme,
                importance=importance if weight.dim() == 3 else importance[0],
                threads=self._limits.threads,
            ).tensor
            errors = torch.from_numpy(rounded.dequantize()).sub_(weight).reshape(matrices.shape)
            total = sum(passes.squared_effect(name, e, matrix, pool) for e, matrix in enumerate(errors))
            found.append(Candidate(scheme, rounded.nbytes, 0.5 * total / self._token_ids.numel()))
        return found


@dataclass
class _Passes:
    """Runs blocks forward and backward over all windows, one window to a task.

    What blocks read is kept by value; what weights read, and the gradients of their products, by weight and expert.
    """

    graph: ir.Graph
    token_ids: Tensor
    store: ActivationStore
    pool: Executor
    seed: int
    _gradients: list[dict[str, Tensor]] = field(default_factory=list)
    _rows: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._executor = BlockExecutor(self.graph)
        self._logits = [str(value.name) for value in self.graph.outputs]
        self._gradients = [{} for _ in self.token_ids]
        for window, ids in enumerate(self.token_ids):
            for name, tensor in step_inputs(self.graph, ids[None]).items():
                self.store.put(f"{window}/{name}", tensor)

    def forward(self, stage: Stage, weights: Mapping[str, Tensor]) -> None:
        """Run a block on what the blocks before it have left; logits are not kept."""
        read = as_read(stage.nodes, weights)
        made = {str(o.name) for node in stage.nodes for o in node.outputs} - set(self._logits)

        def run(window: int) -> None:
            values = {name: self.store.get(f"{window}/{name}") for name in stage.inputs}
            with torch.no_grad():
                outputs = self._executor.run(stage, values, read, 1)
            for name in made & outputs.keys():
                self.store.put(f"{window}/{name}", outputs[name])

        for _ in self.pool.map(run, self._windows):
            pass

    def backward(self, stage: Stage, weights: Mapping[str, Tensor], wanted: Iterable[str]) -> None:
        """Run a block again, and take the gradients of all it read, and of the products of the weights `wanted`."""
        read, names = as_read(stage.nodes, weights), set(wanted)

        def run(window: int) -> list[tuple[str, int, str]]:
            return self._backward(window, stage, read, names)

        kept = list(self.pool.map(run, self._windows))
        for name in names:
            self._rows[name] = {}
        for one in kept:
            for name, expert, key in one:
                self._rows[name].setdefault(expert, []).append(key)

    def _backward(
        self, window: int, stage: Stage, weights: Mapping[str, Tensor], wanted: set[str]
    ) -> list[tuple[str, int, str]]:
        shown: list[tuple[str, int, Tensor, Tensor]] = []

        def tap(name: str, expert: int, x: Tensor, y: Tensor) -> None:
            if name in wanted and y.requires_grad:
                shown.append((name, expert, x, y))

        values = {name: self.store.get(f"{window}/{name}") for name in stage.inputs}
        floats = {name: value.detach().clone() for name, value in values.items() if value.is_floating_point()}
        # Where a block reads no activation, as the first one does, its weights are what gradients start from.
        given = {name: w.detach().requires_grad_(w.is_floating_point() and not floats) for name, w in weights.items()}
        for value in floats.values():
            value.requires_grad_(True)
        with torch.enable_grad():
            outputs = self._executor.run(stage, values | floats, given, 1, tap=tap)
        behind = self._gradients[window]
        for name in self._logits:
            if name in outputs:
                behind[name] = self._of_drawn_tokens(outputs[name].detach(), window)
        made = {str(o.name) for node in stage.nodes for o in node.outputs}
        ends = [name for name in outputs if name in made & behind.keys() and outputs[name].requires_grad]
        places = [*floats.values(), *(y for *_, y in shown)]
        gradients = torch.autograd.grad(
            [outputs[name] for name in ends], places, [behind[name] for name in ends], allow_unused=True
        )
        for name in made & behind.keys():
            del behind[name]
        for name, gradient in zip(floats, gradients, strict=False):
            if gradient is not None:
                # What passes by the block as well has a gradient of later blocks already.
                behind[name] = gradient if name not in behind else behind[name] + gradient
        kept = []
        for (name, expert, x, _), gradient in zip(shown, gradients[len(floats) :], strict=True):
            if gradient is None:
                continue
            if not bool(torch.isfinite(gradient).all()):
                raise QuantizationError(
                    f"{name}: gradients are not finite (NaN or infinity) on the calibration text; the sensitivity of "
                    "this model cannot be measured, give a scheme such as awq+gptq-int4 instead of a budget"
                )
            key = f"rows/{window}/{name}/{expert}"
            self.store.put(f"{key}/x", x.detach().to(product_dtype()))
            self.store.put(f"{key}/g", gradient)
            kept.append((name, expert, key))
        return kept

    def _of_drawn_tokens(self, logits: Tensor, window: int) -> Tensor:
        """Draw a token at each position from the predictions; return the gradient of its -log p, `[T, vocab]`."""
        if not bool(torch.isfinite(logits).all()):
            raise QuantizationError(
                "the model's logits are not finite (NaN or infinity) on the calibration text; the checkpoint is damaged"
            )
        gradient = torch.softmax(logits, dim=-1)
        generator = torch.Generator().manual_seed(self.seed * len(self.token_ids) + window)
        drawn = torch.multinomial(gradient, 1, generator=generator)
        return gradient.scatter_add_(1, drawn, torch.full(drawn.shape, -1.0))

    def mean_square(self, name: str, expert: int, channels: int) -> NDArray[np.float32]:
        """Return the mean square of what a weight reads, float32 `[K]`; zeros where no token reached it."""
        total, count = torch.zeros(channels, dtype=torch.float64), 0
        for key in self._rows[name].get(expert, ()):
            x = self.store.get(f"{key}/x").to(torch.float32)
            total, count = total + x.square().sum(0).double(), count + len(x)
        mean: NDArray[np.float32] = (total / max(count, 1)).to(torch.float32).numpy()
        return mean

    def squared_effect(self, name: str, expert: int, errors: Tensor, pool: Executor) -> float:
        """Return the sum over tokens of `(g_t^T E x_t)^2` for errors `E [N, K]`."""
        matrix = errors.to(product_dtype())

        def effect(key: str) -> float:
            x, gradient = self.store.get(f"{key}/x"), self.store.get(f"{key}/g")
            change = torch.nn.functional.linear(x, matrix).to(torch.float32)
            return float((change * gradient).sum(-1).square().sum(dtype=torch.float64))

        return sum(pool.map(effect, self._rows[name].get(expert, ())))

    def forget(self, name: str) -> None:
        """Drop what was kept for a weight."""
        for keys in self._rows.pop(name).values():
            for key in keys:
                self.store.drop(f"{key}/x")
                self.store.drop(f"{key}/g")

    @property
    def _windows(self) -> range:
        return range(len(self.token_ids))


def _one_stage(block: Block) -> Stage:
    """Return the nodes of a block as one stage."""
    made = {str(output.name) for node in block.nodes for output in node.outputs}
    inputs = dict.fromkeys(name for stage in block.stages for name in stage.inputs if name not in made)
    return Stage(block.nodes, tuple(inputs), block.outputs, block.weights)
