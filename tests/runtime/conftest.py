"""A model without weights, whose answers show whether scheduling and paging are right, and a bundle's text files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from inferencex.runtime.backends.base import BackendOptions, Draws, Float32Array, Int32Array, ModelFacts, StepBatch
from inferencex.runtime.engine.sampler import SequenceSampler
from inferencex.runtime.params import SamplingParams

VOCAB_SIZE = 50


def hash_logits(context: Sequence[int], vocab_size: int) -> Float32Array:
    """Logits that depend on every token of the context and on their order."""
    digest = hashlib.blake2b(np.asarray(context, dtype=np.int32).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(vocab_size).astype(np.float32)


class HashModel:
    """An executable that keeps token ids in its pages and reads every context back through the block table.

    A wrong table, position, length or a reused block changes the context, so the logits and the output. Each
    step also checks the batch against the contract.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = VOCAB_SIZE,
        max_model_len: int = 4096,
        length_independent_up_to: int | None = None,
    ) -> None:
        self.facts = ModelFacts(vocab_size, max_model_len, 1, 4, length_independent_up_to)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.batches: list[StepBatch] = []
        self.before_step: Callable[[StepBatch], None] | None = None
        self.transform: Callable[[list[int], Float32Array], Float32Array] | None = None
        self._pages = np.full((num_blocks, block_size), -1, dtype=np.int32)

    def step(self, batch: StepBatch) -> Float32Array:
        self.batches.append(batch)
        if self.before_step is not None:
            self.before_step(batch)
        contexts: dict[int, list[int]] = {}
        written: set[tuple[int, int]] = set()
        read: list[tuple[int, int]] = []
        offsets = batch.sequence_offsets
        assert offsets[0] == 0 and offsets[-1] == len(batch.token_ids) == len(batch.positions)
        assert len(batch.prompt_lengths) == len(batch.token_ids)
        for row in range(len(batch.context_lengths)):
            length, table = int(batch.context_lengths[row]), batch.block_tables[row]
            begin, end = int(offsets[row]), int(offsets[row + 1])
            assert begin < end, "a sequence without new tokens"
            first = length - (end - begin)
            assert batch.positions[begin:end].tolist() == list(range(first, length))
            slots = [(int(table[p // self.block_size]), p % self.block_size) for p in range(length)]
            assert all(0 <= block < self.num_blocks for block, _ in slots)
            for token, slot in zip(batch.token_ids[begin:end], slots[first:], strict=True):
                assert slot not in written, "two sequences write to one slot"
                written.add(slot)
                self._pages[slot] = token
            read += slots[:first]
            context = [int(self._pages[slot]) for slot in slots]
            for token_row in range(begin, end):
                contexts[token_row] = context[: first + 1 + token_row - begin]
        assert not written & set(read), "a shared slot is written to"
        assert (np.diff(batch.logit_rows) > 0).all()
        logits = np.empty((len(batch.logit_rows), self.facts.vocab_size), dtype=np.float32)
        for index, token_row in enumerate(batch.logit_rows):
            context = contexts[int(token_row)]
            logits[index] = hash_logits(context, self.facts.vocab_size)
            if self.transform is not None:
                logits[index] = self.transform(context, logits[index])
        return logits

    @property
    def num_computed(self) -> int:
        return sum(len(batch.token_ids) for batch in self.batches)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What the model answers, computed without any paging."""
        tokens = list(prompt)
        for _ in range(count):
            logits = hash_logits(tokens, self.facts.vocab_size)
            if self.transform is not None:
                logits = self.transform(tokens, logits)
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


class Launched:
    """Tokens of a step of a LaunchingHashModel."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def result(self) -> Int32Array:
        return np.array(self.tokens, np.int32)


class LaunchingHashModel(HashModel):
    """A HashModel that chooses tokens itself, as backends on GPUs do, and takes steps behind steps."""

    def launch(
        self, batch: StepBatch, draws: Draws, previous: Launched | None = None, rows: Int32Array | None = None
    ) -> Launched:
        if previous is not None:
            assert rows is not None
            batch = replace(batch, token_ids=previous.result()[rows])
        logits, tokens = self.step(batch), []
        for row, values in enumerate(logits):
            params = SamplingParams(
                temperature=float(draws.temperature[row]),
                top_k=int(draws.top_k[row]),
                top_p=float(draws.top_p[row]),
                min_p=float(draws.min_p[row]),
            )
            sampler = SequenceSampler(params, 0, (), ())
            tokens.append(sampler.choose(values, float(draws.uniform[row])) if np.isfinite(values).all() else -1)
        return Launched(tokens)


class HashBackend:
    """Runs any folder as a HashModel with the vocabulary of its tokenizer."""

    name = "hash"

    def __init__(self, vocab_size: int, max_model_len: int = 256) -> None:
        self.facts = ModelFacts(vocab_size, max_model_len, 1, 4)
        self.model: HashModel | None = None

    def supports(self, bundle: Path) -> Sequence[str]:
        return () if bundle.is_dir() else (f"{bundle} is no folder",)

    def compile(self, bundle: Path, options: BackendOptions) -> HashModel:
        self.model = HashModel(
            options.blocks_for(self.facts), options.block_size, self.facts.vocab_size, self.facts.max_model_len
        )
        return self.model


@pytest.fixture(params=[HashModel, LaunchingHashModel], ids=["steps", "launches"])
def hash_model(request: pytest.FixtureRequest) -> type[HashModel]:
    """Each test that takes it runs on a model that gives logits, and on one that gives tokens."""
    model: type[HashModel] = request.param
    return model


@pytest.fixture(scope="session")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text side of a bundle: a byte-level tokenizer, a chat template, no weights."""
    folder = tmp_path_factory.mktemp("bundle")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, naïve café, 日本語のテキスト, 🙂🚀 and so on"] * 8, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return folder


@pytest.fixture(scope="session")
def hash_backend_class(text_bundle: Path) -> Callable[[], HashBackend]:
    tokenizer = tokenizers.Tokenizer.from_file(str(text_bundle / "tokenizer.json"))
    return partial(HashBackend, tokenizer.get_vocab_size())


@pytest.fixture
def hash_backend(hash_backend_class: Callable[[], HashBackend]) -> HashBackend:
    return hash_backend_class()
