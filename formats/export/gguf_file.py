"""GGUF, which llama.cpp runs: names from the tables of the `gguf` package, integers in blocks that say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export.checkpoint import read_config
from inferencex.formats.export.decoder_facts import DecoderFacts, Rotation, decoder_facts
from inferencex.formats.export.gguf_blocks import Stored, block_type, stored_blocks, stored_plain
from inferencex.formats.export.gguf_tokenizer import add_tokenizer
from inferencex.formats.export.linears import listed
from inferencex.formats.export.parameters import Parameter, parameters_of, requantized

NAME = "gguf"


@dataclass(frozen=True)
class _Family:
    """How llama.cpp computes the models of a type, as far as its own tables do not say.

    architecture: its name there
    pairs:        it rotates neighbours, so rows of queries and keys that transformers rotates by halves are reordered
    """

    architecture: str
    pairs: bool


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", True),
    "mistral": _Family("llama", True),
    "qwen2": _Family("qwen2", False),
    "qwen3": _Family("qwen3", False),
}

_FILE_TYPES = {
    GGMLQuantizationType.F32: LlamaFileType.ALL_F32,
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.BF16: LlamaFileType.MOSTLY_BF16,
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    GGMLQuantizationType.Q4_1: LlamaFileType.MOSTLY_Q4_1,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


def write(bundle: Bundle, path: Path) -> list[str]:
    """Write the file and return what a user should know of it.

    Raises ExportError for architectures whose arrangement in GGUF is not known here, for RoPE and attention that
    llama.cpp would compute differently, and for tokenizers it has no like of.
    """
    config = read_config(bundle)
    model_type = str(config.get("model_type"))
    family = _FAMILIES.get(model_type)
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    if family is None or family.architecture not in known:
        raise ExportError(
            f"{bundle.path}: gguf export has been checked for {', '.join(_FAMILIES)}, not for {model_type}; how "
            "llama.cpp arranges its weights is not certain"
        )
    facts = decoder_facts(bundle)
    factors = _frequency_factors(bundle, config, facts, family)
    parameters = parameters_of(bundle)
    names = gguf.get_tensor_name_map(known[family.architecture], facts.layers)
    writer = gguf.GGUFWriter(path, family.architecture)
    vocab_size = next(p.shape[0] for p in parameters if p.use == "embedding")
    _add_metadata(writer, bundle, config, facts, vocab_size)
    add_tokenizer(writer, bundle, vocab_size)
    kinds: Counter[GGMLQuantizationType] = Counter()
    widened: list[str] = []
    targets: list[tuple[str, Parameter]] = []
    for parameter in parameters:
        target = names.get_name(parameter.name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ExportError(f"{parameter.name}: the gguf package has no name for it in {family.architecture}")
        targets.append((target, parameter))
        kind, nbytes = _announced(parameter, widened)
        kinds[kind] += int(np.prod(parameter.shape))
        _announce(writer, target, parameter.linear_shape, kind, nbytes)
    if factors is not None:
        _announce(writer, "rope_freqs.weight", factors.shape, GGMLQuantizationType.F32, factors.nbytes)
    writer.add_file_type(_FILE_TYPES[kinds.most_common(1)[0][0]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    errors: dict[str, float] = {}
    for target, parameter in targets:
        stored = _stored(parameter, _order(target, facts) if family.pairs else None)
        writer.write_tensor_data(stored.data)
        if stored.error:
            errors[parameter.name] = stored.error
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()
    return _notes(errors, widened)


def _notes(errors: Mapping[str, float], widened: list[str]) -> list[str]:
    notes = []
    if errors:
        notes.append(
            f"Q4_1 keeps -zero_point * scale as float16: {len(errors)} weights differ from the bundle's by a relative "
            f"error of at most {max(errors.values()):.1e}; all other weights are equal"
        )
    if widened:
        notes.append(
            f"no block of 32 says the same as the bundle's groups: {listed(widened)} written as float32, without loss "
            "and larger"
        )
    return notes


def _announced(parameter: Parameter, widened: list[str]) -> tuple[GGMLQuantizationType, int]:
    """Return the type a parameter gets and the bytes it takes."""
    elements = int(np.prod(parameter.shape))
    if not parameter.is_quantized:
        stored = stored_plain(parameter.effective()[:1] if len(parameter.shape) > 1 else np.zeros(1, np.float32))
        kind = stored.kind
    else:
        found = None if parameter.transposed else block_type(parameter.quantized())
        if found is None:
            widened.append(parameter.name)
        kind = GGMLQuantizationType.F32 if found is None else found
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return kind, elements // block * nbytes


def _announce(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, nbytes: int
) -> None:
    """Tell the writer of a tensor that follows; it takes shapes of blocks in bytes."""
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        dtype = np.dtype(np.float16) if kind == GGMLQuantizationType.F16 else np.dtype(np.float32)
        writer.add_tensor_info(name, shape, dtype, nbytes)
    else:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        in_bytes = (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), nbytes, raw_dtype=kind)


def _stored(parameter: Parameter, order: NDArray[np.int64] | None) -> Stored:
    kind = None
    if parameter.is_quantized and not parameter.transposed:
        tensor = parameter.quantized()
        kind = block_type(tensor)
    if kind is None:
        values = parameter.effective()
        return stored_plain(values if order is None else values[order])
    if order is not None:
        points = tensor.zero_point_integers()
        tensor = requantized(
            tensor, tensor.integers()[order], tensor.scales[order], None if points is None else points[order]
        )
    return stored_blocks(tensor, kind)


def _order(target: str, facts: DecoderFacts) -> NDArray[np.int64] | None:
    """Return in which order rows of queries and keys rotate as neighbours; None for other tensors."""
    part = target.split(".")[-2]
    if part not in ("attn_q", "attn_k") or facts.rotation is None or facts.rotation.interleaved:
        return None
    heads = facts.heads if part == "attn_q" else facts.kv_heads
    rows = np.arange(heads * facts.head_size, dtype=np.int64)
    return rows.reshape(heads, 2, facts.head_size // 2).swapaxes(1, 2).reshape(-1)


def _add_metadata(
    writer: gguf.GGUFWriter, bundle: Bundle, config: Mapping[str, Any], facts: DecoderFacts, vocab_size: int
) -> None:
    if facts.softcap or not np.isclose(facts.scale, facts.head_size**-0.5, rtol=1e-5):
        raise ExportError(
            f"{bundle.path}: attention has the scale {facts.scale:.6g} and the softcap {facts.softcap:g}; llama.cpp "
            f"computes {config['model_type']} with {facts.head_size**-0.5:.6g} and none"
        )
    if facts.window and facts.window < int(bundle.manifest.architecture["max_model_len"]):
        raise ExportError(
            f"{bundle.path}: attention sees {facts.window} tokens, llama.cpp computes {config['model_type']} without "
            f"such a window; convert with --max-model-len {facts.window} or less"
        )
    writer.add_name(str(bundle.manifest.source.get("id", "model")))
    writer.add_context_length(int(bundle.manifest.architecture["max_model_len"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(facts.layers)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(facts.heads)
    writer.add_head_count_kv(facts.kv_heads)
    writer.add_key_length(facts.head_size)
    writer.add_value_length(facts.head_size)
    writer.add_layer_norm_rms_eps(facts.epsilon)
    writer.add_vocab_size(vocab_size)
    if facts.rotation is not None:
        writer.add_rope_dimension_count(2 * len(facts.rotation.frequencies))
        writer.add_rope_freq_base(_rope_theta(config))


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _frequency_factors(
    bundle: Bundle, config: Mapping[str, Any], facts: DecoderFacts, family: _Family
) -> NDArray[np.float32] | None:
    """Return by what the frequencies of RoPE are divided, float32 `[rotated / 2]`; None where they are not.

    Raises ExportError for RoPE that no such table describes, or where llama.cpp reads none.
    """
    rotation: Rotation | None = facts.rotation
    if rotation is None or rotation.factor != 1.0 or 2 * len(rotation.frequencies) != facts.head_size:
        raise ExportError(
            f"{bundle.path}: positions rotate {'nothing' if rotation is None else 'a part of each head, or scale it'}; "
            f"gguf export of {config['model_type']} knows RoPE of whole heads"
        )
    half = len(rotation.frequencies)
    plain = _rope_theta(config) ** (-np.arange(half) / half)
    factors: NDArray[np.float32] = (plain / rotation.frequencies).astype(np.float32)
    if np.allclose(factors, 1, rtol=1e-4):
        return None
    if family.architecture != "llama":
        raise ExportError(
            f"{bundle.path}: its RoPE is scaled, and llama.cpp reads scaled frequencies for llama, not for "
            f"{family.architecture}"
        )
    return factors
