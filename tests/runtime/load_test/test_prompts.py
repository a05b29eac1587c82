"""Prompts: exact lengths, each its own; and those of files."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from inferencex.formats.errors import OptionError, RequestError
from inferencex.runtime.load_test.lengths import Uniform
from inferencex.runtime.load_test.prompt_files import FilePrompt, is_text, read_prompts
from inferencex.runtime.load_test.prompts import Prompt, random_prompts, text_prompts
from inferencex.runtime.load_test.words import WORDS, TokenVocabulary, WordVocabulary, token_vocabulary, word_vocabulary


class Words:
    """A tokenizer to which every word is a token; `split` are two, and `special` ids come in front of a text."""

    def __init__(self, split: Sequence[str] = (), special: Sequence[int] = ()) -> None:
        self.split, self.special = split, special
        self.ids: dict[str, int] = {}

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        ids = [*self.special] if special_tokens else []
        for word in text.split():
            ids += [self.ids.setdefault(word, 100 + len(self.ids))] * (2 if word in self.split else 1)
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in ids)


def take(prompts: object, count: int) -> list[Prompt]:
    return [*itertools.islice(prompts, count)]  # type: ignore[call-overload]


def test_ids_are_those_of_words_without_special_tokens() -> None:
    vocabulary = asyncio.run(token_vocabulary(Words(special=(1,))))
    assert len(vocabulary.ids) == len(set(WORDS)) and 1 not in vocabulary.ids


def test_random_ids_have_exact_lengths_and_begin_differently() -> None:
    prompts = take(
        random_prompts(TokenVocabulary(tuple(range(50))), Uniform(20, 40), Uniform(3, 3), random.Random(0)), 200
    )
    assert {len(prompt.content) for prompt in prompts} == {prompt.tokens for prompt in prompts} == {*range(20, 41)}
    assert len({tuple(prompt.content[:8]) for prompt in prompts}) == 200
    assert all(prompt.max_tokens == 3 for prompt in prompts)


def test_a_shared_prefix_comes_on_top() -> None:
    source = random.Random(0)
    prompts = take(random_prompts(TokenVocabulary(tuple(range(50))), Uniform(9, 9), Uniform(1, 1), source, 30), 20)
    assert {len(prompt.content) for prompt in prompts} == {39}
    assert len({tuple(prompt.content[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt.content[30:]) for prompt in prompts}) == 20


@pytest.mark.parametrize("special", [(), (1, 2)])
@pytest.mark.parametrize("shared", [0, 5])
def test_texts_have_exact_lengths_too(special: tuple[int, ...], shared: int) -> None:
    tokenizer = Words(split=("after", "world"), special=special)
    vocabulary = asyncio.run(word_vocabulary(tokenizer, special_tokens=True))
    assert vocabulary.around == len(special) and not {"after", "world"} & set(vocabulary.words)
    prompts = take(random_prompts(vocabulary, Uniform(10, 12), Uniform(1, 1), random.Random(0), shared), 50)
    for prompt in prompts:
        assert isinstance(prompt.content, str)
        assert len(asyncio.run(tokenizer.encode(prompt.content, special_tokens=True))) == prompt.tokens
    assert {prompt.tokens for prompt in prompts} == {10 + shared, 11 + shared, 12 + shared}
    beginnings = {tuple(str(prompt.content).split()[: shared or 8]) for prompt in prompts}
    assert len(beginnings) == (1 if shared else 50)


def test_a_text_is_never_empty() -> None:
    vocabulary = WordVocabulary(("a", "b"), around=4)
    (prompt,) = take(random_prompts(vocabulary, Uniform(2, 2), Uniform(1, 1), random.Random(0)), 1)
    assert str(prompt.content).strip() and prompt.tokens == 5


def test_a_tokenizer_that_knows_no_words_is_refused() -> None:
    with pytest.raises(RequestError, match="0 of"):
        asyncio.run(word_vocabulary(Words(split=WORDS), special_tokens=False))


def test_a_seed_repeats_the_prompts() -> None:
    vocabulary = TokenVocabulary(tuple(range(50)))
    first, again, other = (
        take(random_prompts(vocabulary, Uniform(5, 9), Uniform(1, 9), random.Random(seed)), 20) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_prompts_cut_from_a_text_begin_at_different_places() -> None:
    ids = [*range(1000, 1060)]
    cut = asyncio.run(text_prompts(ids, Uniform(11, 11), Uniform(1, 1), random.Random(0), 50, None))
    assert sorted(prompt.content[0] for prompt in cut) == [*range(1000, 1050)]
    assert all(len(prompt.content) == 11 for prompt in cut)
    with pytest.raises(OptionError, match="60 tokens, too few for 51 prompts of up to 11"):
        asyncio.run(text_prompts(ids, Uniform(11, 11), Uniform(1, 1), random.Random(0), 51, None))
    (text,) = asyncio.run(text_prompts(ids, Uniform(2, 2), Uniform(1, 1), random.Random(0), 1, Words()))
    assert str(text.content).startswith("w1") and text.tokens is None


def read(path: Path, *records: object, endpoint: str = "completions") -> list[FilePrompt]:
    rows = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text(json.dumps(records) if path.suffix == ".json" else "\n\n".join(rows))
    return read_prompts(path, endpoint)  # type: ignore[arg-type]


def test_records_of_every_kind_are_read(tmp_path: Path) -> None:
    shared = {"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    records = [{"prompt": "text"}, {"prompt": [5, 6], "max_tokens": 3}, shared]
    for name in ("prompts.jsonl", "prompts.json"):
        assert read(tmp_path / name, *records) == [FilePrompt("text"), FilePrompt([5, 6], 3), FilePrompt("hi")]
    messages = [{"role": "user", "content": "hi"}]
    assert read(tmp_path / "chat.jsonl", {"messages": messages}, endpoint="chat") == [FilePrompt(messages)]


@pytest.mark.parametrize(
    ("record", "endpoint", "said"),
    [
        ("{", "completions", "line 3: is not JSON"),
        (["prompt"], "completions", "line 3: is a JSON list"),
        ({}, "completions", "line 3: has no prompt"),
        ({"prompt": ""}, "completions", "has no prompt"),
        ({"prompt": [True]}, "completions", "has no prompt"),
        ({"prompt": [[1]]}, "completions", "has no prompt"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "completions", "has no prompt"),
        ({"prompt": "a", "max_tokens": 0}, "completions", "max_tokens"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "completions", "--endpoint chat"),
        ({"prompt": [1, 2]}, "chat", "--endpoint completions"),
    ],
)
def test_a_record_that_is_no_prompt_is_named(tmp_path: Path, record: object, endpoint: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read(tmp_path / "prompts.jsonl", {"prompt": "fine"}, record, endpoint=endpoint)


@pytest.mark.parametrize("content", ["", "{}", "[1]", "{"])
def test_a_list_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"^--prompts "):
        read_prompts(path, "completions")


def test_other_files_are_texts() -> None:
    assert is_text(Path("book.txt")) and is_text(Path("book")) and not is_text(Path("a.JSON"))
