"""Our engine under the same load, without a server; runs in a process of its own.

    python -m bench.serve.offline BUNDLE LOAD

LOAD is JSON: see `Load`. It prints one line a measurement: generated tokens a second.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

from bench.run import ROOT
from bench.serve.load import Load, prompts


class OfflineError(Exception):
    """The process failed; the message is the last line that it wrote."""


def offline_rates(bundle: Path, load: Load) -> list[float]:
    """Return generated tokens a second, once for each repetition; OfflineError when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(load.threads)}
    command = [sys.executable, "-m", "bench.serve.offline", str(bundle), load.dump()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise OfflineError((done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300])
    return [float(line) for line in done.stdout.split()]


def main(bundle: Path, load: Load) -> None:
    """Measure, after a warm-up of one repetition."""
    from inferencex.runtime import LLM, SamplingParams

    engine = LLM(bundle, threads=load.threads, max_model_len=load.longest, max_num_seqs=load.concurrency).engine
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    batches = prompts(load, bundle, as_text=False, seed="offline")
    for repetition, batch in enumerate(itertools.islice(batches, load.repeat + 1)):
        began = time.perf_counter()
        for place, prompt in enumerate(batch):
            engine.add_request(f"{repetition}.{place}", cast(list[int], prompt.content), params)
        tokens = 0
        while engine.has_unfinished:
            for delta in engine.step():
                if delta.output is not None and delta.output.error is not None:
                    raise delta.output.error
                tokens += len(delta.token_ids)
        rate = tokens / (time.perf_counter() - began)
        if repetition:
            print(rate, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Load.parse(sys.argv[2]))
