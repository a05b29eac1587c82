"""4-bit floats keep their scales in 8 bits on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inferencex.formats.bundle import Bundle
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.reference import ReferenceBackend
from inferencex.runtime.backends.triton import TritonBackend
from inferencex.runtime.backends.triton.lowering import constants as module
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.lowering.linear import linear_of
from inferencex.runtime.backends.triton.lowering.rows import expert_stacks
from inferencex.runtime.backends.triton.weights import LinearWeight
from tests.runtime.backends.triton.test_executable import prompts_batch, step_batch

FORMATS = {"nvfp4": "e5m3", "mxfp4": "e8m0"}


@pytest.fixture(scope="module", params=[(name, scheme) for name in ("qwen2", "mixtral") for scheme in FORMATS], ids=str)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle, and what its scales are."""
    from tests.architectures.comparison import write_bundle
    from tests.architectures.shrink import tiny_config
    from tests.architectures.zoo import tiny_model

    name, scheme = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{scheme}")
    return write_bundle(tiny_model(name), tiny_config(name), folder, quantization=scheme), FORMATS[scheme]


def weights_of(bundle: Path, device: str) -> list[LinearWeight]:
    """Return the weights of 4-bit floats, as they are on the device."""
    opened = Bundle.open(bundle)
    constants = Constants(StaticValues(opened.graph, opened.tensor), torch.device(device), torch.float32)
    found = []
    for node in opened.graph:
        linear = linear_of(constants.static, node)
        values = [stack for stack, _ in expert_stacks(node)] if linear is None else [linear.weight]
        found += [constants.linear(value, None) for value in values]
    return [weight for weight in found if weight.format == "e2m1"]


def test_scales_are_codes(quantized: tuple[Path, str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte for each group, where numbers would take two or four; and the same weights."""
    bundle, scale_format = quantized
    weights = weights_of(bundle, device)
    assert len(weights) > 5 and {weight.scale_format for weight in weights} == {scale_format}
    monkeypatch.setattr(module, "scale_codes", lambda static, value: None)
    for weight, plain in zip(weights, weights_of(bundle, device), strict=True):
        assert plain.scale_format == "float" and weight.scales is not None and plain.scales is not None
        assert weight.scales.dtype == torch.uint8 and weight.nbytes < plain.nbytes
        numbers = _numbers(weight.scales, scale_format) * weight.tensor_scale
        present = plain.scales.cpu().float() != 0  # padding has a scale of no meaning
        assert torch.equal(numbers[present], plain.scales.cpu().float()[present])


def _numbers(codes: torch.Tensor, scale_format: str) -> torch.Tensor:
    codes = codes.cpu()
    if scale_format == "e8m0":
        return codes.view(torch.float8_e8m0fnu).to(torch.float32)
    return (1 + (codes & 7) / 8) * torch.exp2((codes >> 3).to(torch.float32) - 21)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_logits_are_those_of_the_reference(quantized: tuple[Path, str], dtype: str) -> None:
    options = BackendOptions(num_blocks=24, block_size=4)
    expected = ReferenceBackend().compile(quantized[0], options)
    found = TritonBackend().compile(quantized[0], BackendOptions(num_blocks=24, block_size=4, activation_dtype=dtype))
    for batch in (prompts_batch(), step_batch([(5, 6), (1, 2), (3, 4)], [7, 8, 9])):
        wanted = expected.step(batch)
        tolerance = (1e-4 if dtype == "float32" else 2e-2) * float(np.abs(wanted).max())
        np.testing.assert_allclose(found.step(batch), wanted, atol=tolerance)
