"""What a backend says the head reads is what `transformers` calls the last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

import torch

from inferencex.formats.errors import BackendError
from inferencex.runtime import LLM
from inferencex.runtime.backends.base import BackendOptions, Executable, HiddenStatesExecutable
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.head import find_head
from inferencex.runtime.backends.reference import ReferenceBackend
from tests.architectures.comparison import write_bundle
from tests.architectures.ragged import BLOCK_SIZE, LENGTHS, blocks_needed, last_logits, ragged_logits, random_sequences
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

# Tied and separate heads, norms of both kinds, scales and caps in front of and behind the head.
NAMES = ["llama", "gemma2", "gpt2", "granite", "cohere", "qwen2"]
SEQUENCES = random_sequences(250)


class HiddenOnly:
    """An executable whose steps give hidden states, for functions that drive steps."""

    def __init__(self, executable: HiddenStatesExecutable) -> None:
        self._executable = executable
        self.facts = SimpleNamespace(vocab_size=executable.hidden_size)
        self.step = executable.hidden_states


def hidden_states(executable: Executable) -> list[NDArray[np.float32]]:
    assert isinstance(executable, HiddenStatesExecutable)
    return ragged_logits(cast("Executable", HiddenOnly(executable)), SEQUENCES)


def backends(bundle: Path) -> Iterator[Executable]:
    options = BackendOptions(num_blocks=blocks_needed(LENGTHS), block_size=BLOCK_SIZE, threads=1)
    for backend in (ReferenceBackend(), CpuBackend()):
        yield backend.compile(bundle, options)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model: Any = tiny_model(name)
    bundle = write_bundle(model, tiny_config(name), tmp_path)
    with torch.no_grad():
        bodies = [model.base_model(torch.tensor([tokens])).last_hidden_state[0].numpy() for tokens in SEQUENCES]
    for executable in backends(bundle):
        for found, expected in zip(hidden_states(executable), bodies, strict=True):
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-3
        last = last_logits(cast("Executable", HiddenOnly(cast("HiddenStatesExecutable", executable))), SEQUENCES[-1])
        assert np.abs(last - bodies[-1][-1:]).max() < 1e-3


@pytest.mark.parametrize("quantization", ["none", "rtn-int8", "rtn-int4"])
def test_a_step_leaves_no_trace_of_what_was_asked_of_it(quantization: str, tmp_path: Path) -> None:
    """Bit for bit: alone or among others, and logits after steps that stopped at the head."""
    bundle = write_bundle(tiny_model("llama"), tiny_config("llama"), tmp_path, quantization)
    options = BackendOptions(num_blocks=blocks_needed(LENGTHS), block_size=BLOCK_SIZE, threads=1)
    executable = CpuBackend().compile(bundle, options)
    assert isinstance(executable, HiddenStatesExecutable)
    together = hidden_states(executable)
    logits = ragged_logits(executable, SEQUENCES)
    assert all(map(np.array_equal, hidden_states(executable), together))
    assert all(map(np.array_equal, ragged_logits(executable, SEQUENCES), logits))
    only = cast("Executable", HiddenOnly(executable))
    for tokens, rows in zip(SEQUENCES, together, strict=True):
        assert np.array_equal(ragged_logits(only, [tokens])[0], rows)
        if len(tokens) > 1:
            assert np.array_equal(last_logits(only, tokens)[0], rows[-1])


def test_quantized_activations_are_told_as_they_were_before(tmp_path: Path) -> None:
    """INT8 in front of the head is how the head reads; an embedding is what it reads."""
    bundle = write_bundle(tiny_model("llama"), tiny_config("llama"), tmp_path, "rtn-int8")
    (reference, cpu) = (hidden_states(executable) for executable in backends(bundle))
    for wanted, found in zip(reference, cpu, strict=True):
        assert np.abs(wanted - found).max() < 0.15 * np.abs(wanted).max()


def _node(op_type: str, *inputs: Any, domain: str = "") -> Any:
    node = SimpleNamespace(op_type=op_type, domain=domain, inputs=inputs)
    value = SimpleNamespace(producer=lambda: node, node=node)
    return value


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda x, w: _node("Gemm", x, w), True),
        (lambda x, w: _node("Mul", _node("Tanh", _node("Div", _node("MatMul", x, w), w)), w), True),
        (lambda x, w: _node("Add", _node("Gemm", x, w), _node("Gemm", x, w)), False),
        (lambda x, w: _node("Softmax", _node("Gemm", x, w)), False),
        (lambda x, w: _node("Gemm", x, x), False),
        (lambda x, w: _node("Experts", x, w, domain="inferencex"), False),
        (lambda x, w: x, False),
    ],
)
def test_a_head_is_a_product_with_fixed_weights(build: Callable[[Any, Any], Any], found: bool) -> None:
    x, w = SimpleNamespace(producer=lambda: None), SimpleNamespace(producer=lambda: None)
    head = find_head(build(x, w), lambda value: value is w)
    assert (head is not None) == found
    if head is not None:
        assert head.hidden is x and head.node.op_type in ("Gemm", "MatMul")


def test_the_head_of_quantized_activations_reads_what_they_stand_for() -> None:
    x, w = SimpleNamespace(producer=lambda: None), SimpleNamespace(producer=lambda: None)
    for op_type, domain in (("QuantizeLinear", ""), ("QuantizeRows", "inferencex")):
        stored = _node("DequantizeLinear", _node(op_type, x, w, domain=domain), w)
        head = find_head(_node("Gemm", stored, w), lambda value: value is w)
        assert head is not None and head.hidden is x


def test_without_a_head_an_executable_offers_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(tiny_model("llama"), tiny_config("llama"), tmp_path)
    for module in ("cpu.lowering.lower", "reference.executable"):
        monkeypatch.setattr(f"inferencex.runtime.backends.{module}.find_head", lambda *_: None)
    for executable in backends(bundle):
        assert not isinstance(executable, HiddenStatesExecutable)
        with pytest.raises(BackendError, match="does not end in a linear layer"):
            executable.hidden_states(None)  # type: ignore[attr-defined]
        assert ragged_logits(executable, SEQUENCES[:1])[0].shape[0] == 1


@pytest.mark.parametrize("quantization", ["none", "rtn-int4"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_same_bits_however_they_are_computed(
    quantization: str, pooling: Any, tmp_path: Path
) -> None:
    bundle = write_bundle(tiny_model("llama"), tiny_config("llama"), tmp_path, quantization)

    def embeddings(prompts: list[list[int]], **options: Any) -> list[NDArray[np.float32]]:
        with LLM(bundle, backend="cpu", block_size=4, threads=1, load_tokenizer=False, **options) as llm:
            return [output.embedding for output in llm.embed([*prompts], pooling=pooling)]

    expected = embeddings(SEQUENCES)
    assert all(abs(float(np.linalg.norm(vector)) - 1) < 1e-6 for vector in expected)
    for options in ({"max_num_batched_tokens": 5}, {"max_num_seqs": 1}, {"enable_prefix_caching": False}):
        assert all(map(np.array_equal, embeddings(SEQUENCES, **options), expected))
    for tokens, vector in zip(SEQUENCES, expected, strict=True):
        assert np.array_equal(embeddings([tokens])[0], vector)
