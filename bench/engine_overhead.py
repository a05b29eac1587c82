"""What a decoding step costs outside the backend: planning, layout, sampling, text, deltas and the streams' inbox.

    python -m bench.engine_overhead [--sequences 1 8 32] [--vocab 49152] [--tokens 256] [--step-ms 7] [--sampled]

The backend is a stand-in that returns prepared logits at once. Its clock gives the figures: the time from the end of
one step's computation to the start of the next one's, as `LLM.generate` makes them. The share is that of a step
whose computation takes `--step-ms`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from inferencex.recipes.windows import builtin_text
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends.base import BackendOptions, Float32Array, ModelFacts, StepBatch

PROMPT_LENGTH = 32
TRAINED_TOKENS = 4096
FIRST_WORD = 257  # the tokens before it are the end of text and single bytes
PEAK = 20.0


class PreparedLogits:
    """An executable that computes nothing: every step has other peaks, on tokens of the tokenizer, over noise."""

    def __init__(self, facts: ModelFacts, options: BackendOptions) -> None:
        self.facts = facts
        self.num_blocks = options.blocks_for(facts)
        self.block_size = options.block_size
        self.seconds_between: list[float] = []
        self._random = np.random.default_rng(0)
        self._logits = self._random.standard_normal((options.max_num_seqs, facts.vocab_size), dtype=np.float32)
        self._peaks = np.zeros(options.max_num_seqs, dtype=np.intp)
        self._ended: float | None = None

    def step(self, batch: StepBatch) -> Float32Array:
        """Return logits whose largest entries were moved since the last step."""
        if self._ended is not None:
            self.seconds_between.append(time.perf_counter() - self._ended)
        rows = np.arange(len(self._peaks))
        self._logits[rows, self._peaks] = 0.0
        self._peaks = self._random.integers(FIRST_WORD, TRAINED_TOKENS, len(rows))
        self._logits[rows, self._peaks] = PEAK
        logits = self._logits[: len(batch.logit_rows)]
        self._ended = time.perf_counter()
        return logits


class PreparedBackend:
    """Compiles any folder to PreparedLogits."""

    name = "prepared"

    def __init__(self, vocab_size: int) -> None:
        self._facts = ModelFacts(vocab_size, max_model_len=8192, num_layers=1, bytes_per_token=4)

    def supports(self, bundle: Path) -> Sequence[str]:
        """Every folder will do."""
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> PreparedLogits:
        """Prepare the logits."""
        return PreparedLogits(self._facts, options)


def write_tokenizer(folder: Path) -> None:
    """Train a small byte-level tokenizer on Python's language reference."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(builtin_text().splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def overheads(folder: Path, count: int, vocab_size: int, params: SamplingParams) -> list[float]:
    """Return the seconds outside the backend of each step in which `count` sequences decode."""
    llm = LLM(folder, backend=PreparedBackend(vocab_size), max_num_seqs=count)
    random = np.random.default_rng(1)
    llm.generate(random.integers(FIRST_WORD, TRAINED_TOKENS, (count, PROMPT_LENGTH)).tolist(), params)
    executable = llm.engine.executable
    assert isinstance(executable, PreparedLogits)
    return executable.seconds_between[count * PROMPT_LENGTH // 1024 + 8 :]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=7.0)
    parser.add_argument("--sampled", action="store_true", help="temperature 0.7, top-p 0.9 instead of greedy")
    options = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    if options.sampled:
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=options.tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        print(f"vocabulary of {options.vocab}, {options.tokens} tokens, {'sampled' if options.sampled else 'greedy'}")
        for count in options.sequences:
            seconds = overheads(Path(folder), count, options.vocab, params)
            median, least = 1e6 * statistics.median(seconds), 1e6 * min(seconds)
            share = median / (median + 1e3 * options.step_ms)
            print(
                f"{count:>3} sequences: {median:7.0f} us a step outside the backend (least {least:5.0f}), "
                f"{share:5.1%} of a step of {options.step_ms:g} ms"
            )


if __name__ == "__main__":
    main()
