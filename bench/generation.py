"""Tokens per second of a bundle: prefill of one prompt, decode of several sequences at once.

    python -m bench.generation BUNDLE [--prefill 512] [--decode 1 8] [--tokens 32] [--repeat 3] [--backend auto]

Prompts are pieces of Python's language reference, each sequence its own. Figures are medians after a warm-up.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from inferencex.recipes.compare import builtin_text
from inferencex.runtime import LLM, SamplingParams

SHORT_PROMPT = 32


def _prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    ids = llm.require_tokenizer().encode(builtin_text()[: 16 * count * length])
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def _seconds(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(list(prompts), params)
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    llm = LLM(options.bundle, backend=options.backend, enable_prefix_caching=False)
    print(f"{options.bundle}, {platform.machine()}, {os.cpu_count()} processors, median of {options.repeat}")
    prompt = _prompts(llm, 1, options.prefill)
    _seconds(llm, prompt, 1)
    seconds = statistics.median(_seconds(llm, prompt, 1) for _ in range(options.repeat))
    print(f"prefill {options.prefill:>5}      {options.prefill / seconds:8.1f} tokens/s")
    for count in options.decode:
        prompts = _prompts(llm, count, SHORT_PROMPT)
        _seconds(llm, prompts, 2)
        rates = []
        for _ in range(options.repeat):
            first = _seconds(llm, prompts, 1)
            rates.append(count * options.tokens / max(_seconds(llm, prompts, options.tokens + 1) - first, 1e-9))
        print(f"decode x{count:<3} at {SHORT_PROMPT:>3} {statistics.median(rates):8.1f} tokens/s")


if __name__ == "__main__":
    main()
