"""Show an answer while it is written, and stop early: python examples/stream.py BUNDLE."""

import sys
from contextlib import closing

from inferencex.runtime import LLM, SamplingParams


def main(bundle: str) -> None:
    llm = LLM(bundle)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=64)
    written = 0
    with closing(llm.stream("Once upon a time", params)) as deltas:
        for delta in deltas:
            print(delta.text, end="", flush=True)
            written += len(delta.text)
            if written > 120:  # closing the iterator ends the request and frees its blocks
                break
    print()


if __name__ == "__main__":
    main(sys.argv[1])
