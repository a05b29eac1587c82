"""The engine gives lm-eval the numbers and texts that its own `hf` model gives on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")

from lm_eval.api.instance import Instance

from inferencex.formats.errors import OptionError, RequestError
from inferencex.recipes.evaluation.lm import EngineLM
from inferencex.runtime import LLM

PAIRS = [
    ("the cat sat", " on the mat"),
    ("the cat sat ", "on the mat"),  # the space belongs to the continuation
    ("the cat sat\n", "on"),
    ("", "the dog"),
    ("", "<s>the dog"),
    ("<s>the cat", " sat"),
    ("naïve", " café: 日本"),
    ("Question: up?\nAnswer:", " A"),
    ("Question: up?\nAnswer:", " B"),
    ("Question: up?\nAnswer:", " that way"),
    ("the cat and the dog on the mat " * 8, "and the floor"),  # longer than the context
    ("the dog", " on the mat" * 6),
]
TEXTS = ["the cat sat on the mat", "the dog lay on the floor and the cat sat on the mat, 日本語 " * 6, "🙂"]


@pytest.fixture(scope="module")
def ours(bundle: Path) -> Iterator[EngineLM]:
    with LLM(bundle, threads=1, max_num_seqs=5, max_num_batched_tokens=96, num_kv_blocks=64) as llm:
        yield EngineLM(llm)


@pytest.fixture(scope="module")
def hf(checkpoint: Path, ours: EngineLM) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(checkpoint), device="cpu", dtype="float32", max_length=ours.max_length, batch_size=1)


def _instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each if isinstance(each, tuple) else (each,), i) for i, each in enumerate(arguments)]  # type: ignore[arg-type]


def test_loglikelihoods_are_those_of_the_hf_model(ours: EngineLM, hf: Any) -> None:
    greedy = hf.generate_until(_instances("generate_until", [("the cat", {"until": [], "max_gen_toks": 3})]))[0]
    pairs = [*PAIRS, ("the cat", greedy)] if greedy else PAIRS
    found = ours.loglikelihood(_instances("loglikelihood", pairs))
    wanted = hf.loglikelihood(_instances("loglikelihood", pairs), disable_tqdm=True)
    for (score, is_greedy), (hf_score, hf_greedy), pair in zip(found, wanted, pairs, strict=True):
        assert score == pytest.approx(hf_score, abs=1e-4), pair
        assert is_greedy == hf_greedy, pair


def test_rolling_loglikelihoods_are_those_of_the_hf_model(ours: EngineLM, hf: Any) -> None:
    found = ours.loglikelihood_rolling(_instances("loglikelihood_rolling", TEXTS))
    wanted = hf.loglikelihood_rolling(_instances("loglikelihood_rolling", TEXTS), disable_tqdm=True)
    assert found == pytest.approx(wanted, abs=1e-3)


def test_generated_texts_are_those_of_the_hf_model(ours: EngineLM, hf: Any) -> None:
    free = [(context, {"until": [], "max_gen_toks": 12}) for context, _ in PAIRS if context]
    wanted = hf.generate_until(_instances("generate_until", free), disable_tqdm=True)
    assert ours.generate_until(_instances("generate_until", free)) == wanted
    stop = next(text for text in wanted if len(text) > 4)[2:4]
    stopped = [(context, {"until": [stop, "\n\n"], "max_gen_toks": 12, "do_sample": False}) for context, _ in free]
    assert ours.generate_until(_instances("generate_until", stopped)) == hf.generate_until(
        _instances("generate_until", stopped), disable_tqdm=True
    )


def test_contexts_are_computed_once(ours: EngineLM) -> None:
    """Choices find their question's context in the cache, once there are more questions than one step takes."""
    contexts = [f"{number}: the cat sat on the mat and the dog lay on the floor, and so" for number in range(16)]
    pairs = [(context, choice) for context in contexts for choice in (" A", " B", " C", " D")]
    before = ours._llm.engine.stats.num_cached_tokens
    ours.loglikelihood(_instances("loglikelihood", pairs))
    blocks = sum((len(ours.tok_encode(context)) - 1) // 16 for context in contexts)
    assert blocks >= len(contexts)
    assert ours._llm.engine.stats.num_cached_tokens - before >= 0.8 * 3 * 16 * blocks


def test_chats_are_rendered_as_by_the_hf_model(ours: EngineLM, hf: Any) -> None:
    chat = [{"role": "user", "content": "which way is up?"}]
    assert ours.apply_chat_template(chat) == hf.apply_chat_template(chat)
    begun = [*chat, {"role": "assistant", "content": "that way"}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == hf.apply_chat_template(begun, False)


def test_sampling_depends_on_the_seed_alone(bundle: Path) -> None:
    asked = [("the cat", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8, "until": []})] * 2
    with LLM(bundle, threads=1, num_kv_blocks=64) as llm:
        one, two = (EngineLM(llm, seed=seed).generate_until(_instances("generate_until", asked)) for seed in (1, 1))
        other = EngineLM(llm, seed=7).generate_until(_instances("generate_until", asked))
    assert one == two != other and one[0] != one[1]


def test_what_cannot_be_asked_for(ours: EngineLM) -> None:
    with pytest.raises(OptionError, match="num_beams"):
        ours.generate_until(_instances("generate_until", [("a", {"num_beams": 4})]))
    with pytest.raises(OptionError, match="no room"):
        ours.generate_until(_instances("generate_until", [("a", {"max_gen_toks": 100})]))
    with pytest.raises(RequestError, match="tokens; from 1 to 62"):
        ours.loglikelihood(_instances("loglikelihood", [("the cat", " 日本" * 60)]))
