from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencex.runtime.text import IncrementalDetokenizer, Tokenizer

relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
ids = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 600)), max_size=40)


def stream(tokenizer: Tokenizer, token_ids: list[int], skip: bool, prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt or ())
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    deltas.append(detokenizer.flush())
    assert detokenizer.text == "".join(deltas)
    return deltas


@relaxed
@given(token_ids=ids, skip=st.booleans())
def test_deltas_joined_equal_the_decoded_whole(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    assert "".join(stream(tokenizer, token_ids, skip)) == tokenizer.decode(token_ids, skip)


@relaxed
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_no_delta_ends_inside_a_character(tokenizer_folders: dict[str, Path], text: str) -> None:
    for family in ("byte-level", "sentencepiece-bpe"):
        tokenizer = Tokenizer.load(tokenizer_folders[family])
        deltas = stream(tokenizer, tokenizer.encode(text), skip=False)
        assert "\ufffd" not in "".join(deltas)
        assert "".join(deltas) == tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)


@pytest.mark.parametrize("text", ["😀", "👨‍👩‍👧‍👦 family", "東京 é", "a\ufffdb"])
def test_characters_come_as_soon_as_they_are_complete(tokenizer_folders: dict[str, Path], text: str) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["byte-level"])
    token_ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in token_ids:
        detokenizer.push(token_id)
    assert detokenizer.text == text


def test_invalid_bytes_do_not_hold_the_text_back(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders["byte-level"])
    lead, letter = tokenizer.token_to_id("ð"), tokenizer.token_to_id("a")  # byte F0 starts a character of four
    assert lead is not None and letter is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(token) for token in (lead, lead, letter)] == ["", "\ufffd", "\ufffda"]

    tokenizer = Tokenizer.load(tokenizer_folders["sentencepiece-bpe"])
    bad = tokenizer.token_to_id("<0xFF>")
    good = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "中".encode()]
    assert bad is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(token) for token in good if token is not None] == ["", "", ""]
    assert detokenizer.push(bad) == "\ufffd" * 4
    assert [detokenizer.push(bad) for _ in range(100)] == ["\ufffd"] * 100


def test_a_continuation_keeps_the_space_at_its_start(tokenizer_folders: dict[str, Path]) -> None:
    spelled = {"unigram": "▁the", "word-ends": "the</w>", "word-piece": "the", "no-decoder": "the"}
    for family in ("unigram", "word-piece", "no-decoder", "word-ends", "deferred", "byte-level"):
        tokenizer = Tokenizer.load(tokenizer_folders[family])
        the = tokenizer.token_to_id(spelled.get(family, "a"))
        assert the is not None
        prompt, answer = [the], [the + 1, the]
        joined = tokenizer.decode(prompt + answer)
        assert tokenizer.decode(prompt) + "".join(stream(tokenizer, answer, True, prompt)) == joined


@pytest.mark.shared
def test_published_model_keeps_the_space_of_a_continuation(shared_data: Path) -> None:
    tokenizer = Tokenizer.load(shared_data / "stories260k")
    prompt = tokenizer.encode("Once upon a time")
    whole = tokenizer.encode("Once upon a time there was 東京")
    answer = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, answer, True, prompt)) == " there was 東京"
    assert "".join(stream(tokenizer, answer, True)) == "there was 東京"


def test_the_cost_of_a_token_does_not_grow(tokenizer_folders: dict[str, Path]) -> None:
    """Counts the characters that pass through the stages: a window that grows would square them."""
    tokenizer = Tokenizer.load(tokenizer_folders["byte-level"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    handled = 0

    class Counting:
        def after(self, token: str) -> None: ...

        def push(self, token: str) -> list[str]:
            nonlocal handled
            handled += len(token)
            return [token]

        def end(self) -> list[str]:
            return []

    detokenizer._stages.append(Counting())
    lead = tokenizer.token_to_id("ð")
    assert lead is not None
    for _ in range(20_000):
        detokenizer.push(lead)
    detokenizer.flush()
    assert handled == 20_000 == len(detokenizer.text)
