"""Every choice that tuning has is right, and is what a launch is made with once it is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from inferencex.runtime.backends.triton.kernels import decode_attention as decode
from inferencex.runtime.backends.triton.kernels import decode_tiles
from inferencex.runtime.backends.triton.kernels import grouped_linear as grouped
from inferencex.runtime.backends.triton.kernels import linear as quantized
from inferencex.runtime.backends.triton.kernels import prefill_attention as prefill
from inferencex.runtime.backends.triton.kernels import scaled_linear as scaled
from inferencex.runtime.backends.triton.kernels.attention import rows_per_tile
from inferencex.runtime.backends.triton.kernels.attention_step import HeadShape, family_of
from inferencex.runtime.backends.triton.kernels.chips import device_target, processors
from inferencex.runtime.backends.triton.kernels.expert_routing import route
from inferencex.runtime.backends.triton.kernels.grouped_tiles import GroupedShape
from inferencex.runtime.backends.triton.kernels.linear_tiles import Shape
from inferencex.runtime.backends.triton.kernels.quantize_rows import quantize_rows
from inferencex.runtime.backends.triton.kernels.variant import TARGETS
from inferencex.runtime.backends.triton.tuning import Config
from inferencex.runtime.backends.triton.tuning.cache import current_cache
from inferencex.runtime.backends.triton.weights import from_canonical
from tests import triton_kernels
from tests.runtime.backends.triton.kernels.paged_sequences import Layer, make_step
from tests.runtime.backends.triton.kernels.test_experts import Scheme, make_stack
from tests.runtime.backends.triton.kernels.test_linear import quantized as quantized_weight


class Launches:
    """Stands for a kernel, launches it, and keeps what it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.options = kernel, [{}]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.options.append({"grid": grid, **options})
            self.kernel[grid](*arguments, **options)

        return launch


def exactest(device: str) -> tuple[torch.dtype, float]:
    """Return a type of activations that there are choices for, and what it errs by: on GPUs float32 has none."""
    return (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 3e-3)


def of_different_blocks(options: Iterable[Config]) -> list[Config]:
    """Return one of each blocks, which has fewest warps and stages; on GPUs also the one that has most.

    These change nothing that the interpreter computes, but what compilers make of a loop.
    """
    found = list(options)
    fewest = {option.blocks: option for option in reversed(found)}
    most = {option.blocks: option for option in found} if triton_kernels.device() == "cuda" else {}
    return list(dict.fromkeys([*fewest.values(), *most.values()]))


def check(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    kernel: str,
    shape_class: str,
    options: list[Config],
    run: Callable[[], Tensor],
    expected: Tensor,
    tolerance: float,
    tiles: Any = None,
) -> None:
    """Keep each choice in turn; the launch must have it, and give what is expected.

    tiles: the module that names the choices, where it is not the one that launches
    """
    launches = Launches(getattr(module, kernel))
    monkeypatch.setattr(module, kernel, launches)
    assert len(options) > 3
    for option in of_different_blocks(options):
        current_cache().put((tiles or module).KERNEL, shape_class, option)
        try:
            found = run().cpu().double()
        except OutOfResources:  # of a GPU, which tuning passes over
            continue
        assert ((found - expected).abs().max() / expected.abs().max()) < tolerance, option
        launched = launches.options[-1]
        wanted = {**option.constants, "num_warps": option.num_warps, "num_stages": option.num_stages}
        if wanted.get("BLOCK_K") == 1:  # panels are the steps of experts' quantized weights
            del wanted["BLOCK_K"]
        assert {name: launched.get(name) for name in wanted} == wanted
        if "SPLITS" in wanted:
            assert launched["grid"][1] == option["SPLITS"]


@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_quantized_linear(device: str, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    weight, exact = quantized_weight(device, 70, 1100, group_size=32, asymmetric=True)
    dtype, tolerance = exactest(device)
    shape, place = Shape.of(weight, dtype), weight.values.device
    x = torch.randn(tokens, 1100, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(
        monkeypatch, quantized, "quantized_linear_kernel", shape.class_for(tokens),
        quantized.candidates(shape, tokens, device_target(place), processors(place)),
        lambda: quantized.linear(x.to(device), weight), x.double() @ exact.T, tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 40, 70])
def test_scaled_linear(device: str, monkeypatch: pytest.MonkeyPatch, tokens: int, to: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    values, scales = quantize_rows(torch.randn(70, 1100, generator=random).to(device), to)
    number = "int" if to == torch.int8 else "e4m3"
    weight = from_canonical(values, scales, shape=(70, 1100), bits=8, number=number, layout="rows")
    x, x_scales = quantize_rows(torch.randn(tokens, 1100, generator=random).to(device), to)
    exact = [part.cpu().double() * scale.cpu().double()[:, None] for part, scale in ((x.float(), x_scales),
             (values.float(), scales))]  # fmt: skip
    shape, place = scaled.shape_of(weight, torch.float32), values.device
    check(
        monkeypatch, scaled, "_scaled_linear", shape.class_for(tokens),
        scaled.candidates(shape, tokens, device_target(place), processors(place)),
        lambda: scaled.scaled_linear(x, x_scales, weight, torch.float32), exact[0] @ exact[1].T, 1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", [Scheme(16, 0), Scheme(4, 32), Scheme(8, 1 << 20)], ids=str)
@pytest.mark.parametrize("tile", [16, 64])
def test_grouped_linear(device: str, monkeypatch: pytest.MonkeyPatch, scheme: Scheme, tile: int) -> None:
    dtype, tolerance = exactest(device)
    weight, exact, _ = make_stack((3, 70, 200), scheme, device, dtype, 1, has_bias=False)
    ids = torch.arange(3 * tile) % 3
    x = torch.randn(len(ids), 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    routing = route(ids.to(device), 3, tile)
    shape = GroupedShape.of(weight, dtype, tile)
    check(
        monkeypatch, grouped, "_grouped_plain" if scheme.bits == 16 else "_grouped_panels", shape.name,
        grouped.candidates(shape, device_target(routing.rows.device)),
        lambda: grouped.grouped_linear(x.to(device), weight, routing, len(ids)),
        torch.einsum("mk,mnk->mn", x.double(), exact[ids]), tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("module", [decode, prefill], ids=["decode", "prefill"])
@pytest.mark.parametrize("window", [0, 300])
def test_attention(device: str, monkeypatch: pytest.MonkeyPatch, module: Any, window: int) -> None:
    """Contexts of more than one split of any size, for decoding."""
    layer = Layer(4, 2, dtype=torch.float16).with_options(window=window)
    sequences = ((1100, 1), (280, 1)) if module is decode else ((90, 90), (30, 5))
    step = make_step(layer, sequences, device, tile_rows=40)
    shape = HeadShape.of(4, step.pages, torch.float16)
    tiles: Any = decode_tiles if module is decode else prefill
    options = tiles.decode_options if module is decode else tiles.prefill_options
    check(
        monkeypatch, module, f"{tiles.KERNEL}_kernel", shape.name,
        options(shape, family_of(step.q.device)), step.run, step.expected.double(), 3e-3, tiles,
    )  # fmt: skip


def test_steps_are_planned_for_the_tiles_that_were_chosen(device: str) -> None:
    step = make_step(Layer(4, 2, dtype=torch.float16), ((9, 9),), device)
    place, shape = step.q.device, HeadShape.of(4, step.pages, torch.float16)
    for option in prefill.prefill_options(shape, family_of(place)):
        current_cache().put(prefill.KERNEL, shape.name, option)
        assert rows_per_tile(place, 4, step.pages, torch.float16) == option["BLOCK_M"] // 2


@pytest.mark.parametrize("target", TARGETS)
def test_spaces_are_small_and_begin_with_the_default(target: Any) -> None:
    from inferencex.runtime.backends.triton.kernels import grouped_tiles, scaled_linear_tiles

    for tokens in (1, 16, 64, 4096):
        for columns, depth in ((4096, 4096), (28672, 4096), (512, 14336)):
            shape = scaled.ScaledShape("int8", False, torch.bfloat16, columns, depth)
            found = scaled_linear_tiles.candidates(shape, tokens, target, 132)
            assert found[0] == scaled_linear_tiles.default_config(shape, tokens, target, 132)
            assert len(set(found)) == len(found) <= 90
    for tile in grouped_tiles.TILES:
        experts = GroupedShape("plain", 0, True, torch.bfloat16, 8, 4096, 4096, tile)
        found = grouped_tiles.candidates(experts, target)
        assert found[0] == grouped_tiles.default_config(experts, target) and len(set(found)) == len(found) <= 60
