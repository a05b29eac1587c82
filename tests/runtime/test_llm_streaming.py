"""Text as it comes: code points, stop strings, offsets, and streams that are left early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.runtime import LLM, CompletionDelta, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
STORY = "naïve 🙂🚀 日本語 café: the cat sat STOP on the mat"


def scripted(bundle: Path, backend: Any, text: str, **options: Any) -> LLM:
    """A model that answers any prompt of one token with `text`, then ends."""
    llm = LLM(bundle, backend=backend, **options)
    script = [*llm.require_tokenizer().encode(text, add_special_tokens=False), 0]

    def speak(context: list[int], logits: Any) -> Any:
        logits[script[min(len(context) - 1, len(script) - 1)]] = 50.0
        return logits

    backend.model.transform = speak
    return llm


def ask(llm: LLM, **fields: Any) -> tuple[Any, list[CompletionDelta]]:
    """The answer to a prompt, whole; and as a stream, which must agree with it."""
    params = SamplingParams(temperature=0.0, max_tokens=fields.pop("max_tokens", 200), **fields)
    whole = llm.generate([[5]], params)[0].outputs[0]
    deltas = list(llm.stream([5], params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert deltas[-1].output is not None and deltas[-1].output.outputs[0] == whole
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert llm.stats.kv_blocks_used == 0 and not llm.engine.has_unfinished
    return whole, deltas


def test_no_delta_ends_inside_a_code_point(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, "🦜é日🙂" + STORY)
    answer, deltas = ask(llm)
    assert answer.text == "🦜é日🙂" + STORY
    assert len(deltas) > len([delta for delta in deltas if delta.text]), (
        "no character was split; the test shows nothing"
    )
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_bytes_left_over_at_the_end_are_flushed(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, "🦜")
    answer, _ = ask(llm, max_tokens=2)
    assert answer.text == llm.require_tokenizer().decode(answer.token_ids) == "\ufffd"


def test_an_abort_gives_what_there_is(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, "ab🦜")
    llm.engine.add_request("x", [5], SamplingParams(temperature=0.0, stop=["\ufffd", "abc"]))
    texts = [delta.text for _ in range(4) for delta in llm.engine.step()]
    assert texts == [""] * 4, "held back: what may be a stop string, and half a character"
    output = llm.engine.abort("x")
    assert output is not None and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "ab"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens(text_bundle: Path, hash_backend: Any, include: bool) -> None:
    llm = scripted(text_bundle, hash_backend, STORY)
    answer, deltas = ask(llm, stop=["STOP"], include_stop_str_in_output=include)
    before = STORY.split("STOP")[0]
    assert answer.text == before + ("STOP" if include else "")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    if not include:
        assert not any("S" in delta.text for delta in deltas)


def test_what_looks_like_a_stop_string_is_given_back(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, "the STO cat ST")
    answer, _ = ask(llm, stop=["STOP", "cats"])
    assert (answer.text, answer.finish_reason) == ("the STO cat ST", "stop")
    cut, _ = ask(llm, stop=["STOP"], max_tokens=len(answer.token_ids) - 2)
    assert cut.text == llm.require_tokenizer().decode(cut.token_ids) and cut.finish_reason == "length"


def test_overlapping_stop_strings_and_min_tokens(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, STORY)
    answer, _ = ask(llm, stop=["sat STOP", "cat sat"])
    assert answer.text == STORY.split("cat sat")[0]
    num_tokens = len(answer.token_ids)
    later, _ = ask(llm, stop=["sat STOP", "cat sat", "mat"], min_tokens=num_tokens)
    assert later.text == STORY.split("mat")[0]


def test_a_stop_token_leaves_no_text(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, "abc")
    token = llm.require_tokenizer().encode("c")[0]
    answer, _ = ask(llm, stop_token_ids=[token])
    assert (answer.text, answer.stop_reason, answer.token_ids[-1]) == ("ab", token, token)
    answer, _ = ask(llm, stop_token_ids=[token], include_stop_str_in_output=True)
    assert answer.text == "abc"


def test_special_tokens_in_the_text(text_bundle: Path, hash_backend: Any) -> None:
    llm = scripted(text_bundle, hash_backend, "a<|user|>b")
    assert ask(llm)[0].text == "ab"
    assert ask(llm, skip_special_tokens=False)[0].text == "a<|user|>b"


@pytest.mark.parametrize("fields", [{}, {"stop": "STOP"}, {"max_tokens": 9}, {"stop": "cat", "max_tokens": 60}])
def test_offsets_slice_the_text(text_bundle: Path, hash_backend: Any, fields: dict[str, Any]) -> None:
    llm = scripted(text_bundle, hash_backend, "🦜" + STORY)
    answer, _ = ask(llm, logprobs=1, **fields)
    assert len(answer.text_offsets) == len(answer.token_ids) == len(answer.logprobs)
    ends = [*answer.text_offsets[1:], len(answer.text)]
    pieces = [answer.text[start:end] for start, end in zip(answer.text_offsets, ends, strict=True)]
    assert "".join(pieces) == answer.text
    for piece, token_id, end in zip(pieces, answer.token_ids, ends, strict=True):
        alone = llm.require_tokenizer().decode([token_id])
        if "\ufffd" not in alone and end < len(answer.text):
            assert piece == alone
        assert next(iter(answer.logprobs[0].values())).decoded_token is not None


@settings(max_examples=25, deadline=None)
@given(data=st.data(), text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=25))
def test_any_text_and_any_stop(data: Any, text: str, streaming_llm: tuple[LLM, Any]) -> None:
    llm, backend = streaming_llm
    script = [*llm.require_tokenizer().encode(text, add_special_tokens=False), 0]

    def speak(context: list[int], logits: Any) -> Any:
        logits[script[min(len(context) - 1, len(script) - 1)]] = 50.0
        return logits

    backend.model.transform = speak
    decoded = llm.require_tokenizer().decode(script)
    begin = data.draw(st.integers(0, len(decoded)))
    stop = decoded[begin : begin + data.draw(st.integers(1, 4))]
    answer, _ = ask(llm, stop=[stop] if stop else [])
    assert answer.text == (decoded[: decoded.index(stop)] if stop else decoded)


@pytest.fixture(scope="module")
def streaming_llm(text_bundle: Path, hash_backend_class: Any) -> tuple[LLM, Any]:
    # Without the prefix cache: every example is a different model.
    backend = hash_backend_class()
    return LLM(text_bundle, backend=backend, enable_prefix_caching=False), backend


def test_leaving_a_stream_frees_its_blocks(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend, num_kv_blocks=40, block_size=4)
    unread = llm.stream("the cat sat", GREEDY)
    assert not llm.engine.has_unfinished, "nothing runs before the first delta is asked for"
    stream = llm.stream("the cat sat", GREEDY)
    next(stream)
    assert llm.stats.kv_blocks_used > 0
    stream.close()
    assert llm.stats.kv_blocks_used == 0 and not llm.engine.has_unfinished
    for delta in llm.stream("the cat sat", GREEDY):
        if len(delta.token_ids):
            break
    del delta
    assert llm.stats.kv_blocks_used == 0 and not llm.engine.has_unfinished
    del unread
    llm.engine.check_integrity()


def test_streams_side_by_side(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    prompts = ["the", "cat", "sat"]
    expected = [result.outputs[0].text for result in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    first = [next(stream).text for stream in streams]
    assert llm.generate("on", GREEDY)[0].outputs[0].finish_reason is not None
    assert [a + "".join(d.text for d in stream) for a, stream in zip(first, streams, strict=True)] == expected


def test_several_continuations_in_one_stream(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=9)
    texts = {0: "", 1: "", 2: ""}
    for delta in llm.stream("the", params):
        texts[delta.index] += delta.text
    assert list(texts.values()) == [output.text for output in llm.generate("the", params)[0].outputs]
    assert len(set(texts.values())) == 3


def test_two_hundred_streams_left_at_random_points(text_bundle: Path, hash_backend: Any) -> None:
    random = np.random.default_rng(1)
    llm = LLM(text_bundle, backend=hash_backend, num_kv_blocks=60, block_size=4, max_num_batched_tokens=16)
    expected = llm.generate("the cat", GREEDY)[0].outputs[0].text
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    for _ in range(50):
        streams = [llm.stream("the cat sat"[: int(random.integers(1, 11))], params) for _ in range(4)]
        for stream in streams:
            for _ in range(int(random.integers(1, 8))):
                next(stream)
        for place in random.permutation(4):
            streams[place].close()
    assert llm.stats.num_aborted_requests == 200
    assert llm.stats.kv_blocks_used == 0 and not llm.engine.has_unfinished
    llm.engine.check_integrity()
    assert llm.generate("the cat", GREEDY)[0].outputs[0].text == expected
