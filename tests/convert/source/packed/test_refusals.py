"""What is wrong with a quantized checkpoint is said before anything is converted, with names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.convert.source.open import open_checkpoint
from inferencex.formats.errors import OptionError, SourceError
from tests.convert.source.packed import layouts
from tests.convert.source.packed.checkpoints import integer_quantizer, write_checkpoint, write_config
from tests.smollm2 import Quiet

MODULE = "model.layers.0.mlp.up_proj"
AWQ = layouts.config_of("awq", bits=4, group_size=32, version="gemm")
GPTQ = layouts.config_of("gptq", bits=4, group_size=32, sym=False)
PACKED = layouts.compressed_config("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=32)
FP8 = layouts.config_of("fp8", weight_block_size=[32, 32])

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def tensors_of(settings: Mapping[str, Any]) -> Tensors:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    if settings["quant_method"] == "fp8":
        f = layouts.round_to_float8(weight, (32, 32))
        return {f"{MODULE}.weight": f.values, f"{MODULE}.weight_scale_inv": f.scales}
    q = layouts.round_to_integers(weight, bits=4, group_size=32, symmetric=False)
    if settings["quant_method"] == "awq":
        return layouts.awq(MODULE, q)
    if settings["quant_method"] == "gptq":
        return layouts.gptq(MODULE, q, version=1)
    return layouts.pack_quantized(MODULE, q, symmetric=False, dtype=torch.float16)


def refused(folder: Path, settings: dict[str, Any] | None, tensors: Tensors, message: str) -> None:
    write_config(folder, LlamaConfig().to_dict(), settings)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(SourceError, match=message):
        open_checkpoint(str(folder)).tensors[f"{MODULE}.weight"].load()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (AWQ, "scales"),
        (AWQ, "qzeros"),
        (AWQ, "qweight"),
        (GPTQ, "scales"),
        (GPTQ, "qzeros"),
        (GPTQ, "qweight"),
        (PACKED, "weight_scale"),
        (PACKED, "weight_shape"),
        (PACKED, "weight_packed"),
        (PACKED, "weight_zero_point"),
        (FP8, "weight_scale_inv"),
        (FP8, "weight"),
    ],
)
def test_missing_tensors(tmp_path: Path, settings: dict[str, Any], part: str) -> None:
    tensors = tensors_of(settings)
    other = {name.replace("layers.0", "layers.1"): value.clone() for name, value in tensors.items()}
    del tensors[f"{MODULE}.{part}"]
    refused(
        tmp_path, settings, {**tensors, **other}, rf"layers\.0\.mlp\.up_proj.*{part}|{part}.*layers\.0\.mlp\.up_proj"
    )


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        (AWQ, ("qzeros", lambda t: t[:2]), r"qzeros: is int32 \[2, 8\], expected int32.*\[3, 8\].*groups of 32"),
        (AWQ, ("scales", lambda t: t[:, :56]), r"scales: is float16 \[3, 56\], expected .*\[3, 64\]"),
        (AWQ, ("qweight", lambda t: t.long()), "qweight: is int64"),
        (AWQ, ("scales", lambda t: t * float("nan")), "up_proj: its scales are not all finite"),
        (GPTQ, ("qzeros", lambda t: t[:, :4]), r"qzeros: is int32 \[3, 4\], expected .*\[3, 8\]"),
        (GPTQ, ("g_idx", lambda t: t[:-1]), r"g_idx: is int32 \[95\], expected .*\[96\]"),
        (
            GPTQ,
            ("g_idx", lambda t: t * 0),
            r"g_idx: .*groups 0 to 0 of 96 to 96 .*, expected groups 0 to 2 of 32",
        ),
        (GPTQ, ("scales", lambda t: t.double()), "scales: is float64"),
        (PACKED, ("weight_packed", lambda t: t[:, :-1]), r"weight_packed: is int32 \[64, 11\], expected .*\[64, 12\]"),
        (PACKED, ("weight_zero_point", lambda t: t[:4]), r"weight_zero_point: is int32 \[4, 3\], expected .*\[8, 3\]"),
        (PACKED, ("weight_scale", lambda t: t[:, :2]), r"weight_scale: is float16 \[64, 2\], expected .*\[64, 3\]"),
        (PACKED, ("weight_shape", lambda t: t + 8), r"weight_packed: is int32 \[64, 12\], expected .*\[72, 13\]"),
        (FP8, ("weight_scale_inv", lambda t: t[:1]), r"weight_scale_inv: is float32 \[1, 3\], expected .*\[2, 3\]"),
        (FP8, ("weight", lambda t: t.float()), "weight: is float32"),
        (
            FP8,
            ("weight", lambda t: (t.view(torch.uint8) | 0x7F).view(t.dtype)),
            "up_proj: holds values that are not",
        ),
    ],
)
def test_damaged_tensors(
    tmp_path: Path, settings: dict[str, Any], change: tuple[str, Callable[[torch.Tensor], torch.Tensor]], message: str
) -> None:
    tensors = tensors_of(settings)
    name = f"{MODULE}.{change[0]}"
    tensors[name] = change[1](tensors[name])
    refused(tmp_path, settings, tensors, message)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (AWQ, {"bits": 3}, "AWQ of 3 bits"),
        (AWQ, {"bits": "4"}, "bits is '4', expected a whole number"),
        (AWQ, {"version": "gemv"}, "layout 'gemv'"),
        (AWQ, {"backend": "llm-awq"}, "llm-awq"),
        (AWQ, {"group_size": 36}, "36.*do not divide"),
        (AWQ, {"group_size": 48}, r"qzeros: is int32 \[3, 8\], expected .*\[2, 8\]"),
        (AWQ, {"group_size": 0}, "group_size 0 is neither"),
        (AWQ, {"group_size": None}, "group_size is None"),
        (GPTQ, {"bits": 5}, "bits is 5, expected one of 2, 3, 4, 8"),
        (GPTQ, {"bits": 8}, r"scales: is float16 \[3, 64\], expected .*\[2, 64\].*8 bits"),
        (GPTQ, {"group_size": 48}, r"scales: is float16 \[3, 64\], expected .*\[2, 64\]"),
        (GPTQ, {"checkpoint_format": "marlin"}, "layout 'marlin'"),
        (GPTQ, {"dynamic": {"-:.*up_proj": {}}}, "up_proj: is packed, but .*'-:.*up_proj' says it is not"),
        (GPTQ, {"dynamic": {"+:(": {}}}, "not a regular expression"),
        (GPTQ, {"dynamic": [1]}, "dynamic is"),
        (PACKED, {"format": "marlin-24"}, "format 'marlin-24' is not read"),
        (PACKED, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (PACKED, {"config_groups": {}}, "config_groups is"),
        (PACKED, {"ignore": [MODULE]}, "up_proj: is packed, but .* ignores it"),
        (PACKED, {"ignore": ["re:.*up_proj"]}, "up_proj: is packed, but .* ignores it"),
        (FP8, {"fmt": "e5m2"}, "'e5m2'"),
        (FP8, {"expert_dtype": "fp4"}, "'fp4'"),
        (FP8, {"weight_block_size": [32]}, r"weight_block_size is \[32\]"),
        (AWQ, {"quant_method": "bitsandbytes"}, "method 'bitsandbytes', which is not read.*awq, gptq"),
        (AWQ, {"quant_method": "aqlm"}, "method 'aqlm'"),
        (AWQ, {"quant_method": "mxfp4"}, "method 'mxfp4'"),
        (AWQ, {"quant_method": None}, "method None"),
    ],
)
def test_settings_that_are_not_read(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    refused(tmp_path, {**settings, **changes}, tensors_of(settings), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 6}, "int numbers of 6 bits do not go with the format 'pack-quantized'"),
        ({"type": "float"}, "float numbers of 4 bits do not go with"),
        ({"strategy": "block"}, "integers in blocks"),
        ({"strategy": "token"}, "strategy 'token' is not known"),
        ({"group_size": None}, "group_size is None"),
        ({"num_bits": None}, "num_bits is None"),
    ],
)
def test_schemes_that_are_not_read(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = layouts.compressed_config(
        "pack-quantized", **{"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32, **changes}
    )
    refused(tmp_path, settings, tensors_of(PACKED), message)


def test_config_and_tensors_that_contradict_each_other(tmp_path: Path) -> None:
    plain = {f"{MODULE}.weight": torch.ones(64, 96)}
    for settings, part in ((AWQ, "qweight"), (GPTQ, "qweight"), (PACKED, "weight_scale"), (FP8, "weight_scale_inv")):
        message = rf"config.json: says .* '{settings['quant_method']}'.*\*\.{part} .*up_proj"
        refused(tmp_path, settings, plain, message)
        refused(tmp_path, None, tensors_of(settings), r"config.json: says nothing of quantized .*up_proj\.")


def test_a_module_that_is_plain_and_packed(tmp_path: Path) -> None:
    both = {**tensors_of(AWQ), f"{MODULE}.weight": torch.ones(64, 96)}
    refused(tmp_path, AWQ, both, "up_proj.weight: is stored both plain and quantized")
    both = {**tensors_of(PACKED), f"{MODULE}.weight": torch.ones(64, 96)}
    refused(tmp_path, PACKED, both, "has no use for .*up_proj.weight")


def test_zero_points_of_three_bits_less_one(tmp_path: Path) -> None:
    q = layouts.round_to_integers(torch.randn(64, 96), bits=3, group_size=32, symmetric=False)
    q.zero_points[:] = 4
    settings = layouts.config_of("gptq", bits=3, group_size=32, sym=False)
    refused(tmp_path, settings, layouts.gptq(MODULE, q, version=1), "qzeros: zero points of 3 bits .*'gptq_v2'")


def test_integers_out_of_range(tmp_path: Path) -> None:
    q = layouts.round_to_integers(torch.randn(64, 96), bits=4, group_size=32, symmetric=True)
    tensors = layouts.int_quantized(MODULE, q, symmetric=True, dtype=torch.float16)
    tensors[f"{MODULE}.weight"][3, 4] = 8
    settings = layouts.compressed_config("int-quantized", num_bits=4, strategy="group", group_size=32)
    refused(tmp_path, settings, tensors, "up_proj: holds integers that 4 bits cannot")


def test_three_bits_ten_to_a_word(tmp_path: Path) -> None:
    q = layouts.round_to_integers(torch.randn(64, 96), bits=3, group_size=32, symmetric=True)
    tensors = layouts.pack_quantized(MODULE, q, symmetric=True, dtype=torch.float16)
    tensors[f"{MODULE}.weight_packed"] = torch.zeros(64, 10, dtype=torch.int32)
    settings = layouts.compressed_config("pack-quantized", num_bits=3, strategy="group", group_size=32)
    refused(tmp_path, settings, tensors, "weight_packed: three-bit integers ten to a word")


@pytest.fixture(scope="module")
def awq_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("awq") / "source"
    write_checkpoint(
        source,
        AWQ,
        integer_quantizer(layouts.awq, bits=4, group_size=32, symmetric=False),
        skip=("none",),
        tie_word_embeddings=False,
    )
    return source


def _convert(source: Path, output: Path, scheme: str, dequantize: bool, **options: Any) -> None:
    convert(ConvertOptions(str(source), output, parse_scheme(scheme, **options), dequantize=dequantize), Quiet())


def test_quantizing_twice(awq_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--quantization rtn-int8: .*quantized already \(awq\).*--dequantize"):
        _convert(awq_checkpoint, tmp_path / "out", "rtn-int8", dequantize=False)


def test_another_format_for_a_packed_head(awq_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--lm-head int8 asks for .*lm_head.*quantized already \(AWQ, 4 bits"):
        _convert(awq_checkpoint, tmp_path / "out", "none", dequantize=False, lm_head="int8")


def test_dequantizing_what_is_plain(awq_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    checkpoint = open_checkpoint(str(awq_checkpoint))
    save_file({name: h.load() for name, h in checkpoint.tensors.items()}, source / "model.safetensors")
    write_config(source, checkpoint.config.to_dict(), None)
    with pytest.raises(OptionError, match="--dequantize is for quantized checkpoints"):
        _convert(source, tmp_path / "out", "none", dequantize=True)


def test_random_weights_of_a_quantized_config(awq_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(str(awq_checkpoint), random_weights=True)
    assert checkpoint.packed is None
    assert any("is quantized (awq)" in text for text in checkpoint.warnings)


def test_plain_tensors_keep_their_handles(tmp_path: Path) -> None:
    """A checkpoint in the format `dense` is a plain one, whatever else its config says."""
    settings = layouts.compressed_config("dense", num_bits=4, strategy="group", group_size=32)
    write_config(tmp_path, LlamaConfig().to_dict(), settings)
    save_file({f"{MODULE}.weight": torch.ones(64, 96)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.packed is None
    np.testing.assert_array_equal(checkpoint.tensors[f"{MODULE}.weight"].load(), 1)
