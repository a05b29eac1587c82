"""The predicted rise of the KL divergence against what quantizing one weight alone does to a trained model."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferencex.convert.calibrate.blocks import cut_blocks
from inferencex.convert.calibrate.run import CalibrationLimits
from inferencex.convert.calibrate.sensitivity import Sensitivities, SensitivityMeasurement, looked_at
from inferencex.convert.calibrate.sharing import shared_inputs
from inferencex.convert.capture import capture
from inferencex.convert.passes import optimize
from inferencex.convert.passes.editing import is_weight
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize import Calibration, TensorScheme, method_named
from inferencex.convert.roles import weight_roles
from inferencex.formats.errors import QuantizationError
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model
from tests.convert.calibrate.graphs import TinyGraph

SCHEMES = [TensorScheme(kind, 16, symmetric=False) for kind in ("int3", "int4", "int8")]


def _text(samples: int, length: int, seed: int) -> Tensor:
    """Draw sequences in which the next token mostly follows from the last one, at times from the one before."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (samples, length), generator=generator)
    for place in range(2, length):
        before = torch.where(ids[:, place - 1] % 4 == 0, ids[:, place - 2], ids[:, place - 1])
        follows = (5 * before + 1) % 64
        known = torch.rand(samples, generator=generator) < 0.8
        ids[:, place] = torch.where(known, follows, ids[:, place])
    return ids


@functools.cache
def _trained(name: str) -> TinyGraph:
    module = tiny_model(name)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for step in range(100):
        ids = _text(16, 32, 1000 + step)
        logits = module(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model = optimize(capture(tiny_config(name)), max_positions=64).model
    state = module.state_dict()
    weights = {
        key: expression_of(value).evaluate(lambda parameter: state[parameter]).detach()
        for key, value in model.graph.initializers.items()
        if is_weight(value)
    }
    quantized = {info.name for info in weight_roles(model) if info.role in ("linear", "experts")}
    shared = shared_inputs(model, quantized)
    return TinyGraph(module, model, weights, shared, cut_blocks(model.graph, shared))


def _measure(tiny: TinyGraph, scratch: Path, token_ids: Tensor, **limits: Any) -> Sensitivities:
    state = tiny.module.state_dict()
    sources: Any = {key: SimpleNamespace(load=functools.partial(state.get, key)) for key in state}
    names = [name for one in tiny.shared for name in one.quantized]
    allowed = CalibrationLimits(limits.get("memory", 1 << 30), scratch, limits.get("threads", 2))
    schemes = dict.fromkeys(names, SCHEMES)
    return SensitivityMeasurement(tiny.model, schemes, sources, token_ids, allowed).run(lambda done, total: None)


def _divergence(tiny: TinyGraph, token_ids: Tensor, name: str, scheme: TensorScheme) -> float:
    """Return the mean KL divergence that one weight rounded to nearest causes."""
    weight = tiny.weights[name].to(torch.float32)
    ones = Calibration(np.ones(weight.shape[-1], np.float32))
    calibration = ones if weight.dim() == 2 else Calibration(np.ones((len(weight), weight.shape[-1]), np.float32))
    rounded = method_named("rtn").quantize(name, weight.numpy(), scheme, calibration).tensor.dequantize()
    with torch.no_grad():
        plain = torch.log_softmax(tiny.logits(token_ids, tiny.weights).double(), -1)
        changed = torch.log_softmax(
            tiny.logits(token_ids, {**tiny.weights, name: torch.from_numpy(rounded)}).double(), -1
        )
    return float((plain.exp() * (plain - changed)).sum(-1).mean())


def _ranks(values: list[float]) -> np.ndarray[Any, Any]:
    return np.argsort(np.argsort(values))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_predictions_rank_weights_as_measurements_do(name: str, tmp_path: Path) -> None:
    tiny = _trained(name)
    found = _measure(tiny, tmp_path, _text(8, 64, 1))
    text = _text(24, 64, 2)
    predicted, measured = [], []
    for weight, candidates in found.items():
        for candidate in candidates[:2]:
            predicted.append(candidate.rise)
            measured.append(_divergence(tiny, text, weight, candidate.scheme))
    assert np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1] > 0.9
    ratios = np.array(measured) / np.array(predicted)
    assert 0.4 < float(np.median(ratios)) < 2.5


def test_more_bits_cost_less_and_take_more_bytes(tmp_path: Path) -> None:
    for candidates in _measure(_trained("llama"), tmp_path, _text(8, 64, 1)).values():
        assert [c.scheme for c in candidates] == SCHEMES
        rises, sizes = [c.rise for c in candidates], [c.nbytes for c in candidates]
        assert rises == sorted(rises, reverse=True)
        assert sizes == sorted(sizes)
        assert rises[-1] > 0


@pytest.mark.parametrize("limits", [{"threads": 1}, {"threads": 3}, {"memory": 0}])
def test_threads_and_memory_change_nothing(limits: dict[str, int], tmp_path: Path) -> None:
    tiny, text = _trained("qwen3_moe"), _text(5, 48, 1)
    (tmp_path / "other").mkdir()
    expected = _measure(tiny, tmp_path, text)
    assert _measure(tiny, tmp_path / "other", text, **limits) == expected


def test_a_model_without_finite_logits_is_refused(tmp_path: Path) -> None:
    module = tiny_model("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[3] = float("nan")
    tiny = _trained("llama")
    broken = TinyGraph(module, tiny.model, tiny.weights, tiny.shared, tiny.blocks)
    with pytest.raises(QuantizationError, match="not finite"):
        _measure(broken, tmp_path, torch.full((2, 16), 3))


def test_windows_are_taken_from_all_over_the_text() -> None:
    token_ids = np.arange(20 * 600).reshape(20, 600)
    chosen = looked_at(token_ids)
    assert chosen.shape == (8, 512)
    assert chosen[:, 0].tolist() == [600 * row for row in (0, 2, 5, 7, 10, 12, 15, 17)]
    assert looked_at(token_ids[:3, :40]).shape == (3, 40)
