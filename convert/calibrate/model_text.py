"""Let a model write its own calibration text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.calibrate.self_text import Sampler
from inferencex.formats.bundle.staging import scratch_folder


def model_text(make_bundle: Callable[[Path], None], beside: Path, threads: int | None) -> Sampler:
    """Return a sampler that runs a plain bundle of the model, which `make_bundle(path)` writes when first needed.

    The bundle, as large as the model, lies beside `beside` while it is needed.

    Tokens are drawn at temperature 1 from the whole vocabulary, each window with a seed of its own.
    """

    def sample(starts: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
        from inferencex.runtime.llm import LLM
        from inferencex.runtime.params import SamplingParams

        with scratch_folder(beside) as scratch:
            bundle = scratch / "bundle"
            make_bundle(bundle)
            llm = LLM(bundle, max_model_len=length, threads=threads, load_tokenizer=False)
            missing = length - starts.shape[1]
            outputs = llm.generate(
                [start.tolist() for start in starts],
                [
                    SamplingParams(
                        temperature=1.0, top_k=0, top_p=1.0, max_tokens=missing, ignore_eos=True, seed=seed + index
                    )
                    for index in range(len(starts))
                ],
            )
            written = np.array([output.outputs[0].token_ids for output in outputs], dtype=np.int64)
            return np.concatenate([starts, written], axis=1)

    return sample
