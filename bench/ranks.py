"""What dividing a bundle among processes on this machine changes: logits, and the rate of a single sequence.

    python -m bench.ranks BUNDLE --ranks 3 [--threads 3] [--tokens 256]

Logits are those of the built-in text, compared between one process and `--ranks` of them, with the activations that
the bundle has by default and with float32 ones, and between the two kinds of activations on one process. Their mean
absolute differences are printed, over all logits. The rate is that of greedy decoding after a warm-up. `--threads` are
divided among the ranks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from inferencex.recipes.windows import builtin_text
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends.base import BackendOptions, ClosableExecutable, Float32Array, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
DECODED = 64


def logits(bundle: Path, token_ids: list[int], ranks: int, threads: int, activation_dtype: str) -> Float32Array:
    """Return the logits of every position, computed in one step."""
    count = len(token_ids)
    options = BackendOptions(
        num_blocks=-(-count // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        threads=threads,
        max_num_seqs=1,
        max_num_batched_tokens=count,
        activation_dtype=activation_dtype,
        kv_cache_dtype="float32",
    )
    backend = CpuBackend() if ranks == 1 else ParallelBackend(CpuBackend(), ranks)
    executable = backend.compile(bundle, options)
    places = np.arange(count, dtype=np.int32)
    batch = StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=places,
        sequence_offsets=np.array([0, count], np.int32),
        context_lengths=np.array([count], np.int32),
        block_tables=np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)[None],
        logit_rows=places,
        prompt_lengths=np.full(count, count, np.int32),
    )
    result = executable.step(batch).copy()
    if isinstance(executable, ClosableExecutable):
        executable.close()
    return result


def decode_rate(bundle: Path, token_ids: list[int], ranks: int, threads: int) -> float:
    """Return the tokens that one sequence gets a second, after a warm-up."""
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    with LLM(bundle, backend="cpu", tensor_parallel_size=ranks, threads=threads, num_kv_blocks=256) as llm:
        for _ in range(2):
            times = [time.perf_counter() for delta in llm.stream(token_ids, params) if delta.token_ids]
        return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    """Print the differences and the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--threads", type=int, default=None, help="of all ranks together; one each by default")
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    threads = given.threads or given.ranks
    token_ids = Tokenizer.load(given.bundle).encode(builtin_text(), add_special_tokens=False)[: given.tokens]
    kinds = ("auto", "float32")
    alone = {kind: logits(given.bundle, token_ids, 1, threads, kind) for kind in kinds}
    for kind in kinds:
        together = logits(given.bundle, token_ids, given.ranks, threads, kind)
        difference = float(np.abs(together - alone[kind]).mean())
        print(f"activations {kind}: on {given.ranks} ranks logits differ by {difference:.2g} on average")
    difference = float(np.abs(alone["auto"] - alone["float32"]).mean())
    print(f"on one, with activations auto and float32: logits differ by {difference:.2g} on average")
    for ranks in (1, given.ranks):
        rate = decode_rate(given.bundle, token_ids[:32], ranks, threads)
        print(f"{ranks} rank{'s'[: ranks > 1]}, {threads} threads in all: {rate:.1f} tokens/s")


if __name__ == "__main__":
    main()
