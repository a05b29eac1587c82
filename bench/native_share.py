"""How much of the time the CPU backend computes, and how much is left to Python, while sequences decode.

    python -m bench.native_share BUNDLE [--sequences 1 8 32] [--tokens 64] [--threads N] [--repeat 5]

The share is the time inside native steps over that of the whole loop: planning, layout, steps, sampling, text. Prompts
are pieces of Python's language reference; their prefill is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from inferencex.recipes.windows import builtin_text
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends.cpu.executable import CpuExecutable

PROMPT_LENGTH = 32


def native_share(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Return tokens per second of decoding, and the share of the time that was inside native steps."""
    executable = llm.engine.executable
    assert isinstance(executable, CpuExecutable), "only the CPU backend counts the time inside its steps"
    elapsed, inside = 0.0, 0.0
    for sign, count in ((-1, 1), (1, tokens + 1)):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, repetition_penalty=1.0)
        began, before = time.perf_counter(), executable.native_seconds
        llm.generate(list(prompts), params)
        elapsed += sign * (time.perf_counter() - began)
        inside += sign * (executable.native_seconds - before)
    return len(prompts) * tokens / elapsed, inside / elapsed


def main() -> None:
    """Print a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(
        options.bundle,
        backend="cpu",
        threads=options.threads,
        max_num_seqs=max(options.sequences),
        enable_prefix_caching=False,
    )
    ids = llm.require_tokenizer().encode(builtin_text()[: 16 * PROMPT_LENGTH * max(options.sequences)])
    for count in options.sequences:
        prompts = [ids[i * PROMPT_LENGTH : (i + 1) * PROMPT_LENGTH] for i in range(count)]
        native_share(llm, prompts, 2)
        results = [native_share(llm, prompts, options.tokens) for _ in range(options.repeat)]
        speed, share = (statistics.median(values) for values in zip(*results, strict=True))
        print(f"{count:>3} sequences: {speed:8.1f} tokens/s, {share:.1%} of the time inside native steps")


if __name__ == "__main__":
    main()
