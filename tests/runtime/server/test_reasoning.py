from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.server.reasoning import ReasoningSplitter, thinks
from tests.runtime.server.tools.reading import cut

OPENED, CLOSED = "<|assistant|>\n<think>\n", "<|assistant|>\n"


def split(prompt: str | None, pieces: Iterable[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(prompt)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    return tuple("".join(part.text for part in parts if part.is_reasoning is kind) for kind in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        (CLOSED, "<think>\nHm. So.\n</think>\n\nYes.", "Hm. So.", "Yes."),
        (CLOSED, "\n <think>Hm</think>Yes", "Hm", "Yes"),
        (CLOSED, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        (CLOSED, " Yes", "", " Yes"),
        (CLOSED, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (CLOSED, "<think>for ever", "for ever", ""),
        (CLOSED, "<thi", "", "<thi"),
        (CLOSED, "", "", ""),
        (None, "<think>a</think>b", "a", "b"),
        (OPENED, "Hm.\n\nSo.\n</think>\n\nYes </think>.", "Hm.\n\nSo.", "Yes </think>."),
        (OPENED, "<think>\nHm</think>Yes", "Hm", "Yes"),
        (OPENED, "for ever </thi", "for ever </thi", ""),
        (OPENED + "\n\n</think>\n\n", "Yes", "", "Yes"),
    ],
)
def test_thoughts_and_answers_are_parted(prompt: str | None, text: str, reasoning: str, content: str) -> None:
    assert split(prompt, [text]) == (reasoning, content)
    assert split(prompt, text) == (reasoning, content)


@given(
    prompt=st.sampled_from([OPENED, CLOSED]),
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a", "é"])).map("".join),
    places=st.lists(st.integers(0, 40), max_size=8),
)
def test_however_the_text_is_cut_the_parts_are_the_same(prompt: str, text: str, places: list[int]) -> None:
    assert split(prompt, cut(text, places)) == split(prompt, [text])


def test_templates_tell_who_thinks(shared_data: Path) -> None:
    found = {path.stem: thinks(path.read_text("utf-8")) for path in (shared_data / "chat-templates").glob("*.jinja")}
    assert found["Qwen-Qwen3-0.6B"] and found["deepseek-ai-DeepSeek-V3.1"] and found["HuggingFaceTB-SmolLM3-3B"]
    assert not found["Qwen-Qwen2.5-7B-Instruct"] and not found["mistralai-Mistral-Nemo-Instruct-2407"]
