"""A bundle's graph as onnxruntime-genai runs it: keys and values in and out, and ONNX Runtime's own operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import TensorProto

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export.checkpoint import read_config
from inferencex.formats.export.decoder_facts import DecoderFacts
from inferencex.formats.export.onnx_graph import GraphBuilder
from inferencex.formats.export.onnx_translate import Translator
from inferencex.formats.export.onnx_weights import stored_behind
from inferencex.formats.graph import Node

MODEL_FILE = "model.onnx"
_MICROSOFT = "com.microsoft"


class GenaiTranslator(Translator):
    """Translates to a graph from ids, mask, positions and past keys and values to logits and present ones."""

    def __init__(self, bundle: Bundle, builder: GraphBuilder, facts: DecoderFacts) -> None:
        super().__init__(bundle, builder)
        self.facts = facts

    def begin(self) -> None:
        """Declare the inputs, and make from them what the bundle's graph takes."""
        self._check_inputs()
        b = self.builder
        ids = b.input("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        mask = b.input("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"])
        positions = b.input("position_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        cache: list[int | str] = ["batch_size", self.facts.kv_heads, "past_sequence_length", self.facts.head_size]
        for layer in range(self.facts.layers):
            for kind in ("key", "value"):
                b.input(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, cache)
        self.shape = b.node("Shape", [ids])
        self.names["token_ids"] = b.node("Reshape", [ids, b.constant([-1])])
        self.names["positions"] = b.node("Reshape", [positions, b.constant([-1])])
        seen = b.node("Sub", [b.node("ReduceSum", [mask, b.constant([1])], {"keepdims": 0}), b.constant([1])])
        self.last_key = b.node("Cast", [seen], {"to": TensorProto.INT32})
        total = b.node("Gather", [b.node("Shape", [mask]), b.constant(1)])
        self.total = b.node("Cast", [total], {"to": TensorProto.INT32})

    def _Gemm(self, node: Node) -> bool:
        x, weight = node.inputs[:2]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        stored = None if weight is None else stored_behind(weight, self.bundle)
        if stored is None:
            return False
        output = self.made(node.outputs[0])
        product = output if bias is None else self.builder.fresh("product")
        if not self.weights.linear_in_blocks(stored, self.value(x), product):
            return False
        if bias is not None:
            self.builder.node("Add", [product, self.value(bias)], outputs=[output])
        return True

    def _RMSNormalization(self, node: Node) -> bool:
        x, scale = (self.value(value) for value in node.inputs[:2])
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5), "stash_type": 1}
        self.builder.node("SimplifiedLayerNormalization", [x, scale], attributes, outputs=[self.made(node.outputs[0])])
        return True

    def _AddRMSNormalization(self, node: Node) -> bool:
        inputs = [self.value(value) for value in node.inputs]
        attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        outputs = [self.made(node.outputs[0]), "", "", self.made(node.outputs[1])]
        self.builder.node("SkipSimplifiedLayerNormalization", inputs, attributes, domain=_MICROSOFT, outputs=outputs)
        return True

    def _AddLayerNormalization(self, node: Node) -> bool:
        inputs = [self.value(value) for value in node.inputs]
        attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        outputs = [self.made(node.outputs[0]), "", "", self.made(node.outputs[1])]
        self.builder.node("SkipLayerNormalization", inputs, attributes, domain=_MICROSOFT, outputs=outputs)
        return True

    def _RotaryEmbedding(self, node: Node) -> bool:
        if len(node.inputs) < 4:
            return False
        x, cos, sin, positions = (self.value(value) for value in node.inputs)
        attributes = {
            "interleaved": node.attributes.get_int("interleaved", 0),
            "num_heads": node.attributes.get_int("num_heads", 0),
            "rotary_embedding_dim": node.attributes.get_int("rotary_embedding_dim", 0),
        }
        outputs = [self.made(node.outputs[0])]
        self.builder.node("RotaryEmbedding", [x, positions, cos, sin], attributes, domain=_MICROSOFT, outputs=outputs)
        return True

    def _Attention(self, node: Node) -> bool:
        attributes = node.attributes
        for place, what in ((3, "sinks"), (4, "ALiBi slopes")):
            if len(node.inputs) > place and node.inputs[place] is not None:
                raise ExportError(f"node {node.name}: attention with {what} has no form that onnxruntime-genai runs")
        if attributes.get_int("chunk", 0) or not attributes.get_int("writes", 1):
            raise ExportError(
                f"node {node.name}: attention in chunks, or over the keys of another layer, has no form that "
                "onnxruntime-genai runs"
            )
        heads, kv_heads = attributes.get_int("num_heads"), attributes.get_int("num_kv_heads")
        q, k, v = (self.by_sequence(self.value(value), self.width(value)) for value in node.inputs[:3])
        width = self.width(node.inputs[2])
        if width != self.width(node.inputs[1]) or width // kv_heads != self.facts.head_size:
            raise ExportError(f"node {node.name}: keys and values differ in width, or from layer to layer")
        layer = attributes.get_int("layer")
        attended = self.builder.fresh("attended")
        self.builder.node(
            "GroupQueryAttention",
            [q, k, v, *(f"past_key_values.{layer}.{kind}" for kind in ("key", "value")), self.last_key, self.total],
            {
                "num_heads": heads,
                "kv_num_heads": kv_heads,
                "scale": attributes.get_float("scale"),
                "softcap": attributes.get_float("softcap", 0.0),
                "local_window_size": attributes.get_int("window", 0) or -1,
                "do_rotary": 0,
            },
            domain=_MICROSOFT,
            outputs=[attended, *(f"present.{layer}.{kind}" for kind in ("key", "value"))],
        )
        self.by_token(attended, width // kv_heads * heads, self.made(node.outputs[0]))
        cache: list[int | str] = ["batch_size", kv_heads, "total_sequence_length", self.facts.head_size]
        for kind in ("key", "value"):
            self.builder.output(f"present.{layer}.{kind}", TensorProto.FLOAT, cache)
        return True


def genai_config(bundle: Bundle, facts: DecoderFacts, vocab_size: int, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return `genai_config.json`; `generation` is the source's generation_config.json."""
    config = read_config(bundle)

    def token(name: str, default: int | list[int]) -> int | list[int]:
        found = generation.get(name, config.get(name))
        return default if found is None else found

    end = token("eos_token_id", 0)
    first_end = end[0] if isinstance(end, list) else end
    context = int(bundle.manifest.architecture["max_model_len"])
    sampled = bool(generation.get("do_sample", False))
    return {
        "model": {
            "type": str(config.get("model_type")),
            "bos_token_id": token("bos_token_id", first_end),
            "eos_token_id": end,
            "pad_token_id": token("pad_token_id", first_end),
            "context_length": context,
            "vocab_size": vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL_FILE,
                "head_size": facts.head_size,
                "hidden_size": int(config["hidden_size"]),
                "num_attention_heads": facts.heads,
                "num_hidden_layers": facts.layers,
                "num_key_value_heads": facts.kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": sampled,
            "early_stopping": True,
            "max_length": context,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": float(generation.get("repetition_penalty", 1.0)),
            "temperature": float(generation.get("temperature", 1.0)),
            "top_k": int(generation.get("top_k", 50)),
            "top_p": float(generation.get("top_p", 1.0)),
        },
    }
