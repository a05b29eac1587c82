"""Keys and values in pages: how they are rounded, where they go, and the rotation that is done along."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.formats.kv_cache import KVScales
from inferencex.runtime.backends.reference.attention import keep_in_8_bits
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages, bytes_per_slot
from inferencex.runtime.backends.triton.kernels.kv_write import rope_write, write_kv
from inferencex.runtime.backends.triton.kernels.rope import rope
from tests.runtime.backends.triton.kernels.paged_sequences import Layer, filled_pages, read_back

KINDS = [
    Layer(dtype=torch.float32),
    Layer(dtype=torch.float16),
    Layer(pages=torch.bfloat16),
    Layer(pages=torch.int8),
    Layer(pages=torch.int8, scaled_by_head=True),
    Layer(pages=torch.float8_e4m3fn, scaled_by_head=True),
]


def same_bytes(a: KVPages, b: KVPages) -> bool:
    """Whether two pools hold the same bytes, scales included."""
    pairs = zip((*a.storage(), a.key_scales, a.value_scales), (*b.storage(), b.key_scales, b.value_scales), strict=True)
    return all(
        x is y or (x is not None and y is not None and torch.equal(x.view(torch.uint8), y.view(torch.uint8)))
        for x, y in pairs
    )


def kept(x: Tensor, layer: Layer, scales: Tensor | None) -> Tensor:
    """Return what is read back of keys or values `[T, G, D]`, float32."""
    dtype = layer.pages or layer.dtype
    if layer.scaled_by_head:
        assert scales is not None
        return keep_in_8_bits(x.float(), scales.tolist(), "int8" if dtype == torch.int8 else "fp8")
    if dtype == torch.int8:
        largest = x.float().abs().amax(-1, keepdim=True)
        return (x.float() * (127 / largest)).round() * (largest / 127)
    return x.to(dtype).float()


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: f"{layer.pages or layer.dtype}-{layer.scaled_by_head}")
@pytest.mark.parametrize("kv_heads,key_width,value_width", [(2, 16, 16), (3, 20, 12), (1, 576, 512)])
def test_what_is_written_is_read_back(
    device: str, layer: Layer, kv_heads: int, key_width: int, value_width: int
) -> None:
    """Every kind of page, odd widths, numbers that are clipped; nothing is written but the slots, none for -1."""
    layer = replace(layer, kv_heads=kv_heads, key_width=key_width, value_width=value_width, block_size=8)
    pages, untouched = filled_pages(layer, 3, device), filled_pages(layer, 3, device)
    k = (torch.randn(5, kv_heads * key_width) * 3).to(layer.dtype)
    v = (torch.randn(5, kv_heads * value_width) * 3).to(layer.dtype)
    slots = torch.tensor([23, 0, -1, 8, 9])
    write_kv(k.to(device), v.to(device), pages, slots.to(device))
    written = slots >= 0
    # Triton's interpreter cuts numbers to bfloat16 where chips round them.
    tolerance = 2**-7 if layer.pages == torch.bfloat16 else 1e-6
    found = read_back(pages, slots.to(device))
    for given, read, scales in zip((k, v), found, (pages.key_scales, pages.value_scales), strict=True):
        expected = kept(given.unflatten(1, (kv_heads, -1)), layer, scales)
        torch.testing.assert_close(read.cpu()[written], expected[written], rtol=tolerance, atol=0)
    others = torch.tensor([slot for slot in range(24) if slot not in slots.tolist()])
    for before, after in zip(untouched.storage(), pages.storage(), strict=True):
        flat = [x.flatten(0, 1).cpu()[others].view(torch.uint8) for x in (before, after)]
        assert torch.equal(*flat)


def test_rounding_to_8_bits(device: str) -> None:
    """Ties, subnormals, zeros, infinities and what is no number, as INT8 and E4M3 with a scale of one."""
    numbers = torch.cat([
        torch.tensor([0.0, -0.0, 0.5, 1.5, -2.5, 126.5, 127.5, 1e9, -1e9, float("inf"), -float("inf"), float("nan")]),
        torch.arange(-70, 70) / 4096,
        torch.linspace(-500, 500, 104),
    ])  # fmt: skip
    one = KVScales("fp8", (1.0,), (1.0,))
    for kind, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        pages = KVPages.allocate(1, 1, 1, 256, 256, dtype, device, replace(one, format=kind))  # type: ignore[arg-type]
        x = numbers[None].to(device)
        write_kv(x, x, pages, torch.tensor([0], device=device))
        expected = keep_in_8_bits(numbers[None, None], [1.0], kind)[0, 0]  # type: ignore[arg-type]
        if kind == "int8":
            expected = expected.nan_to_num(0.0)
        for read in read_back(pages, torch.tensor([0], device=device)):
            torch.testing.assert_close(read[0, 0].cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_scales_of_tokens_with_nothing_or_no_numbers(device: str) -> None:
    """A key of zeros has the scale 0, one that is not all finite the scale NaN, and both have zeros as integers."""
    k = torch.ones(3, 16, device=device)
    k[0], k[1, 5], k[2, 7] = 0, float("inf"), float("nan")
    pages = KVPages.allocate(1, 4, 1, 16, 16, torch.int8, device)
    write_kv(k, torch.ones_like(k), pages, torch.arange(3, device=device))
    assert pages.key_scales is not None and pages.value_scales is not None
    scales = pages.key_scales.flatten().cpu()
    assert scales[0] == 0 and scales[1:3].isnan().all()
    assert not pages.keys[0, 0].any()
    assert not pages.keys[0, 1, 0, 5] and not pages.keys[0, 2, 0, 7]
    assert torch.equal(pages.value_scales.flatten().cpu()[:3], torch.full((3,), 1.0) / 127)


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: f"{layer.pages or layer.dtype}-{layer.scaled_by_head}")
@pytest.mark.parametrize("interleaved,width,heads,kv_heads", [(False, 0, 4, 2), (True, 12, 6, 3), (False, 16, 1, 1)])
def test_rotation_and_write_are_those_apart(
    device: str, layer: Layer, interleaved: bool, width: int, heads: int, kv_heads: int
) -> None:
    """One kernel leaves what `rope` of queries and keys and `write_kv` leave, to the bit, in place or elsewhere."""
    layer = replace(layer, kv_heads=kv_heads, key_width=20, value_width=28, block_size=8)
    fused, apart = filled_pages(layer, 2, device), filled_pages(layer, 2, device)
    qkv = torch.randn(4, (heads + kv_heads) * 20 + kv_heads * 28, device=device).to(layer.dtype)
    q, k, v = qkv.split([heads * 20, kv_heads * 20, kv_heads * 28], dim=1)
    angles = torch.rand(30, (width or 20) // 2, device=device) * 6
    tables = (angles.cos(), angles.sin(), torch.tensor([3, 29, 0, 11], device=device))
    slots = torch.tensor([4, -1, 15, 0], device=device)
    turn = {"interleaved": interleaved, "width": width}
    expected = rope(q, *tables, heads, **turn)
    write_kv(rope(k, *tables, kv_heads, **turn), v, apart, slots)
    counts = {"num_heads": heads, "num_kv_heads": kv_heads}
    elsewhere = rope_write(q, k, v, fused, slots, *tables, **counts, **turn, out=torch.empty_like(expected))
    assert torch.equal(elsewhere, expected)
    assert same_bytes(fused, apart)
    before = k.clone()
    assert rope_write(q, k, v, fused, slots, *tables, **counts, **turn).data_ptr() == q.data_ptr()
    assert torch.equal(q, expected) and torch.equal(k, before)
    assert same_bytes(fused, apart)


def test_no_tokens(device: str) -> None:
    """Nothing is launched for nothing."""
    pages = filled_pages(Layer(), 1, device)
    nothing = torch.zeros(0, 32, device=device)
    write_kv(nothing, nothing, pages, torch.zeros(0, dtype=torch.int64, device=device))


def test_wrong_shapes_are_refused(device: str) -> None:
    """What would write past the end is an error that says what it found."""
    pages = filled_pages(Layer(), 1, device)
    k, slots = torch.zeros(3, 32, device=device), torch.arange(3, device=device)
    with pytest.raises(BackendError, match=r"v is \[3, 30\], expected \[3, 32\]"):
        write_kv(k, k[:, :30], pages, slots)
    with pytest.raises(BackendError, match=r"slots are torch.int32 \[3\], expected int64 \[3\]"):
        write_kv(k, k, pages, slots.int())


def test_pages_that_contradict_themselves_are_refused() -> None:
    """Scales where there must be some, and shapes that fit."""
    for dtype in (torch.float8_e4m3fn, torch.int8):
        keys = torch.zeros(2, 8, 3, 16).to(dtype)
        with pytest.raises(BackendError, match="need contiguous float32 scales"):
            KVPages(keys, keys)
        with pytest.raises(BackendError, match="have scales"):
            KVPages(keys, keys, torch.ones(2), torch.ones(2))
    with pytest.raises(BackendError, match="have no scales"):
        KVPages(torch.zeros(2, 8, 3, 16), torch.zeros(2, 8, 3, 16), torch.ones(3), torch.ones(3))
    with pytest.raises(BackendError, match="expected"):
        KVPages(torch.zeros(2, 8, 3, 16), torch.zeros(2, 4, 3, 16))
    with pytest.raises(BackendError, match="expected one of"):
        KVPages(torch.zeros(2, 8, 3, 16), torch.zeros(2, 8, 3, 16).half())
    with pytest.raises(BackendError, match="were given scales for fp8"):
        KVPages.allocate(1, 8, 2, 16, 16, torch.int8, "cpu", KVScales("fp8", (1.0, 1.0), (1.0, 1.0)))


def test_bytes_of_a_token() -> None:
    """What a pool is sized by: elements, and a pair of scales for each KV head where tokens have their own."""
    assert bytes_per_slot(8, 128, 128, torch.bfloat16, "none") == 8 * 256 * 2
    assert bytes_per_slot(8, 128, 128, torch.int8, "token") == 8 * (256 + 8)
    assert bytes_per_slot(1, 576, 512, torch.float8_e4m3fn, "head") == 1088
