"""`/v1/completions`: prompts of every form, log-probabilities, echo, several answers, streams."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.openai.serving import MODEL, Serve, Served, serve

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12}


def sliced(logprobs: dict[str, Any], text: str) -> list[str]:
    offsets = [*logprobs["text_offset"], len(text)]
    return [text[start:end] for start, end in itertools.pairwise(offsets)]


def test_prompts_of_every_form(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        ids = served.llm.require_tokenizer().encode("the cat")
        one = await served.post(PATH, {"model": MODEL, "prompt": "the cat", **GREEDY})
        [choice] = one["choices"]
        assert one["object"] == "text_completion" and one["id"].startswith("cmpl-") and one["model"] == MODEL
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None and choice["index"] == 0
        assert one["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": 12,
            "total_tokens": len(ids) + 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        for prompt in (["the cat"], ids, [ids]):
            assert (await served.post(PATH, {"prompt": prompt, **GREEDY}))["choices"] == one["choices"]
        both = await served.post(PATH, {"prompt": ["the cat", "日本"], **GREEDY})
        assert [each["index"] for each in both["choices"]] == [0, 1]
        assert both["choices"][0] == choice and both["choices"][1]["text"] != choice["text"]
        assert both["usage"]["completion_tokens"] == 24

    served(scenario)


def test_null_is_the_default_of_every_field(served: Serve) -> None:
    from inferencex.runtime.server.openai.protocol.completions import CompletionRequest

    async def scenario(served: Served) -> None:
        nothing = {name: None for name in CompletionRequest.model_fields if name != "prompt"}
        answer = await served.post(PATH, {"prompt": "the cat", **nothing})
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"] == (await served.post(PATH, {"prompt": "the cat"}))["choices"]

    served(scenario)


def test_cached_tokens_are_told(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        prompt = "the cat sat on the mat " * 4
        first = await served.post(PATH, {"prompt": prompt, **GREEDY})
        second = await served.post(PATH, {"prompt": prompt, **GREEDY})
        assert first["choices"] == second["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16

    served(scenario)


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_tell_the_chosen_token_and_the_likeliest(served: Serve, count: int) -> None:
    async def scenario(served: Served) -> None:
        answer = await served.post(PATH, {"prompt": "the cat", "logprobs": count, **GREEDY})
        [choice] = answer["choices"]
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {12}
        assert "".join(sliced(found, choice["text"])) == choice["text"]
        for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert len(top) == max(1, count) and top[token] == logprob == max(top.values()) <= 0.0

    served(scenario)


def test_tokens_are_the_slices_of_the_text(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("the cat, naïve 日本語 🙂 on")
        answer = await served.post(PATH, {"prompt": "x", "logprobs": 1, "temperature": 0, "max_tokens": 100})
        [choice] = answer["choices"]
        assert choice["text"] == "the cat, naïve 日本語 🙂 on" and choice["finish_reason"] == "stop"
        found = choice["logprobs"]
        for token, piece in zip(found["tokens"], sliced(found, choice["text"]), strict=True):
            # The end of the text adds nothing to it, and a token inside a character has bytes of it.
            assert token == piece or token == "<|end|>" or token.startswith("bytes:\\x")
        assert any(token.startswith("bytes:") for token in found["tokens"])

    served(scenario)


def test_a_stop_text_is_cut_off_and_so_are_the_offsets(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("one two three four")
        body = {"prompt": "x", "logprobs": 0, "temperature": 0, "max_tokens": 50, "stop": ["four", "three"]}
        whole = await served.post(PATH, body)
        [choice] = whole["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two ", "stop", "three")
        assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"])
        *chunks, last = await served.events(PATH, body)
        choices = [chunk["choices"][0] for chunk in [*chunks, last]]
        assert "".join(each["text"] for each in choices) == "one two "
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [value for each in choices for value in each["logprobs"][key]] == choice["logprobs"][key]
        kept = await served.post(PATH, {**body, "include_stop_str_in_output": True})
        assert kept["choices"][0]["text"] == "one two three"

    served(scenario)


def test_echo_puts_the_prompt_in_front(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        prompt = "the cat, naïve 日本語"
        ids = served.llm.require_tokenizer().encode(prompt)
        plain = await served.post(PATH, {"prompt": prompt, **GREEDY})
        echoed = await served.post(PATH, {"prompt": prompt, "echo": True, **GREEDY})
        assert echoed["choices"][0]["text"] == prompt + plain["choices"][0]["text"]
        assert echoed["usage"] | {"prompt_tokens_details": None} == plain["usage"] | {"prompt_tokens_details": None}
        told = await served.post(PATH, {"prompt": ids, "echo": True, "logprobs": 2, **GREEDY})
        [choice] = told["choices"]
        assert choice["text"] == echoed["choices"][0]["text"]
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {len(ids) + 12}
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(value <= 0.0 for value in found["token_logprobs"][1:])
        assert "".join(sliced(found, choice["text"])) == choice["text"]
        assert found["text_offset"][len(ids)] == len(prompt)

    served(scenario)


def test_what_lm_eval_sends(served: Serve) -> None:
    """`local-completions` scores a continuation with `echo`, one token of output that it ignores, and token ids."""

    async def scenario(served: Served) -> None:
        tokenizer = served.llm.require_tokenizer()
        context, ids = tokenizer.encode("the cat"), tokenizer.encode("the cat sat on")
        body = {"model": MODEL, "prompt": [ids, ids], "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
        for max_tokens in (1, 0):
            answer = await served.post(PATH, {**body, "max_tokens": max_tokens})
            for choice in answer["choices"]:
                values = choice["logprobs"]["token_logprobs"]
                assert len(values) == len(choice["logprobs"]["top_logprobs"]) == len(ids) + max_tokens
                scored = values[len(context) : len(values) - max_tokens]
                assert math.isfinite(sum(scored)) and len(scored) == len(ids) - len(context)
            assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert answer["choices"][0]["text"] == "the cat sat on"
        assert answer["choices"][0]["finish_reason"] == "length"
        stopped = {"prompt": "the cat", "max_tokens": 8, "temperature": 0, "stop": ["\n\n", "Q:"], "seed": 1234}
        assert (await served.post(PATH, stopped))["choices"][0]["text"]

    served(scenario)


def test_several_answers_are_different_and_reproducible(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {"prompt": ["the cat", "on"], "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 10}
        first, second = await served.post(PATH, body), await served.post(PATH, body)
        assert first["choices"] == second["choices"]
        assert [choice["index"] for choice in first["choices"]] == list(range(6))
        assert len({choice["text"] for choice in first["choices"]}) == 6
        events = await served.events(PATH, body)
        texts = [""] * 6
        for event in events:
            [choice] = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in first["choices"]]

    served(scenario)


def test_the_best_of_several_is_the_likeliest_by_token(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {"prompt": "the cat", "seed": 7, "temperature": 2.0, "max_tokens": 6, "logprobs": 0}
        every = await served.post(PATH, {**body, "n": 5})
        best = await served.post(PATH, {**body, "n": 2, "best_of": 5})
        means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 6 for c in every["choices"]}
        assert [c["text"] for c in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
        assert best["usage"]["completion_tokens"] == 30
        assert (await served.refused(PATH, {**body, "n": 3, "best_of": 2}))["param"] == "best_of"
        assert (await served.refused(PATH, {**body, "best_of": 2, "stream": True}))["param"] == "best_of"

    served(scenario)


def test_a_stream_byte_for_byte(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say('cat "日"\n')
        body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        answer = await served.client.post(PATH, json=body, headers={"X-Request-Id": "abc"})
        frames = answer.content.split(b"\n\n")
        assert frames[-2:] == [b"data: [DONE]", b""]
        created = frames[0].split(b'"created":')[1].split(b",")[0].decode()
        head = f'data: {{"id":"cmpl-abc","object":"text_completion","created":{created},"model":"{MODEL}",'
        head += '"system_fingerprint":null,"choices":['
        texts = [frame.decode().removeprefix(head) for frame in frames[:-2]]
        assert texts[0] == '{"index":0,"text":"c","logprobs":null,"finish_reason":null}],"usage":null}'
        assert '{"index":0,"text":"\\u65e5","logprobs":null,"finish_reason":null}],"usage":null}' in texts
        assert texts[-2].endswith('"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}')
        count = len(served.llm.require_tokenizer().encode('cat "日"\n')) + 1
        assert texts[-1] == (
            f'],"usage":{{"prompt_tokens":1,"completion_tokens":{count},"total_tokens":{count + 1},'
            '"prompt_tokens_details":{"cached_tokens":0}}}'
        )

    served(scenario)


def test_a_stream_with_everything(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {"prompt": "the cat", "logprobs": 2, "return_token_ids": True, **GREEDY}
        [whole] = (await served.post(PATH, body))["choices"]
        choices = [event["choices"][0] for event in await served.events(PATH, body)]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
        assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        for key, values in whole["logprobs"].items():
            assert [value for choice in choices for value in choice["logprobs"][key]] == values
        echoed = [
            event["choices"][0] for event in await served.events(PATH, {"prompt": "the cat", "echo": True, **GREEDY})
        ]
        assert "".join(choice["text"] for choice in echoed) == "the cat" + whole["text"]
        assert (await served.refused(PATH, {**body, "echo": True, "stream": True}))["param"] == "echo"

    served(scenario)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
        ({"guided_regex": "(yes|no)"}, "regex"),
        ({"guided_grammar": 'start: "yes" | "no"'}, "lark"),
        ({"guided_json": {"enum": ["yes", "no"]}}, "json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}}, "json"),
    ],
)
def test_the_form_of_the_answer_can_be_demanded(served: Serve, field: dict[str, Any], kind: str) -> None:
    async def scenario(served: Served) -> None:
        answer = await served.post(PATH, {"prompt": "the cat", "max_tokens": 20, **field})
        expected = ('"yes"', '"no"') if kind == "json" else ("yes", "no")
        assert answer["choices"][0]["text"] in expected and answer["choices"][0]["finish_reason"] == "stop"

    served(scenario)


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(text_bundle: Path, backend: Any, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True, "temperature": 0}
        [choice] = (await served.post(PATH, body))["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 6
        choices = [event["choices"][0] for event in await served.events(PATH, body)]
        assert [each["token_ids"] for each in choices] == [[token] for token in choice["token_ids"]]
        assert "no tokenizer" in (await served.refused(PATH, {"prompt": "the cat"}))["message"]
        for fields, param in (({"logprobs": 1}, "logprobs"), ({"echo": True}, "echo")):
            assert (await served.refused(PATH, {**body, **fields}))["param"] == param
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert (await served.refused("/v1/chat/completions", chat))["param"] == "messages"
        assert (await served.refused("/tokenize", {"prompt": "x"}))["param"] == "prompt"

    folder = tmp_path / "bundle"
    shutil.copytree(text_bundle, folder)
    (folder / "tokenizer.json").unlink()
    serve(folder, scenario, backend, num_kv_blocks=64)
