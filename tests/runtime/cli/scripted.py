"""A bundle whose model repeats its prompt and then ends; one that starts with `forever` never does.

Everything but the arithmetic is real: tokenizer, chat template, engine. Run as a program, this is `inferencex-run`
with that model: `python scripted.py BUNDLE ...`. SCRIPTED_KILL_AT=N kills the process at step N.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inferencex.runtime.backends.base import BackendOptions, Float32Array, ModelFacts, StepBatch

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_bundle(folder: Path, chat: bool = True) -> Path:
    """Write the files that the text side of a bundle consists of."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>"}
    if chat:
        config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "bundle.json").write_text("{}")
    return folder


class ScriptedExecutable:
    """Keeps tokens where a model keeps keys and values."""

    def __init__(self, options: BackendOptions, stop_at: int | None) -> None:
        self.facts = ModelFacts(vocab_size=256 + len(SPECIAL), max_model_len=4096, num_layers=1, bytes_per_token=4)
        self.num_blocks = options.blocks_for(self.facts)
        self.block_size = options.block_size
        self._slots = np.full(self.num_blocks * self.block_size, -1, dtype=np.int64)
        self._steps = 0
        self._stop_at = stop_at

    def step(self, batch: StepBatch) -> Float32Array:
        self._steps += 1
        if str(self._steps) == os.environ.get("SCRIPTED_KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._steps == self._stop_at:
            raise KeyboardInterrupt
        logits = np.zeros((len(batch.logit_rows), self.facts.vocab_size), dtype=np.float32)
        sequence_of = np.repeat(np.arange(len(batch.context_lengths)), np.diff(batch.sequence_offsets))
        for row, token in enumerate(batch.token_ids):
            self._slots[self._slot(batch, sequence_of[row], batch.positions[row])] = token
        for place, row in enumerate(batch.logit_rows):
            logits[place, self._next(batch, sequence_of[row], row)] = 100.0
        return logits

    def _slot(self, batch: StepBatch, sequence: int, position: int) -> int:
        block = batch.block_tables[sequence, position // self.block_size]
        return int(block) * self.block_size + int(position) % self.block_size

    def _next(self, batch: StepBatch, sequence: int, row: int) -> int:
        end, prompt_length = int(batch.positions[row]) + 1, int(batch.prompt_lengths[row])
        text = [int(self._slots[self._slot(batch, sequence, p)]) for p in range(min(end, prompt_length))]
        word = [index for index in text if index < 256][:7]
        if bytes(_BYTES[index] for index in word) == b"forever":
            return _BYTES.index(ord("x"))
        return text[end - prompt_length] if end - prompt_length < len(text) else 256


def _bytes() -> list[int]:
    decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    single = {chr(byte): byte for byte in range(0x21, 0x7F)}
    return [single.get(character, ord(decoder.decode([character])) & 0xFF) for character in alphabet]


_BYTES = _bytes()


class ScriptedBackend:
    """Compiles any folder to the same model."""

    name = "scripted"

    def __init__(self, stop_at: int | None = None) -> None:
        self._stop_at = stop_at

    def supports(self, bundle: Path) -> Sequence[str]:
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> ScriptedExecutable:
        return ScriptedExecutable(options, self._stop_at)


def load(bundle: Path, engine: dict[str, Any], stop_at: int | None = None) -> Any:
    """Stand in for `inferencex.runtime.cli.command.load`."""
    from inferencex.runtime.llm import LLM

    return LLM(bundle, **{**engine, "backend": ScriptedBackend(stop_at)})


if __name__ == "__main__":
    from inferencex.runtime.cli import command

    command.load = load
    sys.argv[0] = "inferencex-run"
    command.main()
