"""The model `local-completions` of lm-eval: reads log-probabilities of what it sends, and has texts continued."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")
pytest.importorskip("transformers", reason="lm-eval takes its tokenizer from transformers")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.outputs import Logprob
from tests.runtime.server.clients.conftest import Endpoint

DOCUMENTS = [
    ("Once upon a time there was", " a little girl"),
    ("Once upon a time there was", " a number."),
    ("Water boils at", " 100 degrees; it is hot."),
    ("Größe, naïve", " café: 東京は日本"),
    ("The answer is", " 7"),
]


@pytest.fixture(scope="module")
def llm(endpoint: Endpoint) -> LLM:
    return LLM(endpoint.bundle, threads=1, num_kv_blocks=128)


@pytest.fixture(params=["token ids", "texts", "batches", "at once"])
def model(endpoint: Endpoint, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENAI_API_KEY", endpoint.key)
    options = {"texts": {"tokenized_requests": False}, "batches": {"batch_size": 3}, "at once": {"num_concurrent": 4}}
    return LocalCompletionsAPI(
        base_url=f"{endpoint.api}/completions",
        model=endpoint.model,
        tokenizer_backend="huggingface",
        tokenizer=str(endpoint.bundle),
        max_length=1024,
        max_retries=1,
        **options.get(request.param, {}),
    )


def expected(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is what greedy decoding gives; computed without a server."""
    tokenizer = llm.require_tokenizer()
    ids = tokenizer.encode(context + continuation, add_special_tokens=False)
    begin = len(tokenizer.encode(context, add_special_tokens=False))
    chosen = prompt_logprobs(llm, ids)[begin - 1 :]
    return sum(each.logprob for each in chosen), all(each.rank == 1 for each in chosen)


def prompt_logprobs(llm: LLM, ids: list[int]) -> list[Logprob]:
    """How likely each token is after those before it, from the second on."""
    [output] = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return [entry[token] for entry, token in zip(output.prompt_logprobs, ids, strict=True) if entry is not None]


def test_log_likelihoods(model: Any, llm: LLM) -> None:
    documents = [*DOCUMENTS, (DOCUMENTS[0][0], greedy(llm, DOCUMENTS[0][0]))]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(documents)]
    for (score, is_greedy), pair in zip(model.loglikelihood(asked, disable_tqdm=True), documents, strict=True):
        wanted, wanted_greedy = expected(llm, *pair)
        assert score == pytest.approx(wanted, abs=1e-3) and is_greedy == wanted_greedy, pair


def greedy(llm: LLM, prompt: str) -> str:
    """A continuation that is spelled with the same tokens when it is read again."""
    tokenizer = llm.require_tokenizer()
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    for length in range(6, 0, -1):
        params = SamplingParams(temperature=0.0, max_tokens=length)
        [answer] = llm.generate([ids], params)[0].outputs
        if tokenizer.encode(prompt + answer.text, add_special_tokens=False) == [*ids, *answer.token_ids]:
            return answer.text
    pytest.fail("no continuation is read as it is written")


def test_rolling_log_likelihoods(model: Any, llm: LLM) -> None:
    """How likely whole texts are, after the token that begins a text."""
    texts = ["Once upon a time there was a little girl who didn't like the rain.", "Water boils at 100 degrees; 12"]
    asked = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    scores = model.loglikelihood_rolling(asked, disable_tqdm=True)
    for text, score in zip(texts, scores, strict=True):
        tokenizer = llm.require_tokenizer()
        ids = [model.prefix_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        assert score == pytest.approx(sum(each.logprob for each in prompt_logprobs(llm, ids)), abs=1e-3)


def test_texts_are_continued_until_a_stop(model: Any, llm: LLM) -> None:
    prompts = [context for context, _ in DOCUMENTS[1:]]
    asked = [
        Instance("generate_until", {}, (prompt, {"until": ["e", "\n\n"], "max_gen_toks": 24}), index)
        for index, prompt in enumerate(prompts)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["e", "\n\n", "</s>"])
    tokenizer = llm.require_tokenizer()
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    wanted = [output.outputs[0].text for output in llm.generate(ids, params)]
    assert model.generate_until(asked, disable_tqdm=True) == wanted
