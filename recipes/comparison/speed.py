"""How fast a bundle reads a prompt and writes an answer: a short measurement, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inferencex.runtime import LLM, SamplingParams

PROMPT, ANSWER = 512, 48  # tokens, where the context has room for them
REPEATS = 3


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one sequence alone, the best of a few repeats.

    prompt_tokens, answer_tokens: how long both were
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prompt_tokens: int
    answer_tokens: int


def measure_speed(
    bundle: Path,
    *,
    backend: str = "auto",
    activation_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    threads: int | None = None,
) -> Speed:
    """Load a bundle and measure it; raises what loading and running it raise.

    The prompt is of tokens from all over the vocabulary, so that the experts of a mixture have work to share.
    """
    with LLM(
        bundle,
        backend=backend,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_num_seqs=1,
        max_num_batched_tokens=PROMPT,
        enable_prefix_caching=False,
    ) as llm:
        limits = llm.engine.limits
        room = min(limits.max_model_len, limits.num_slots)
        prompt = max(1, min(PROMPT, room // 2))
        answer = max(2, min(ANSWER, room - prompt))
        tokens = [(7 * position) % limits.vocab_size for position in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        prefill = decode = 0.0
        for _ in range(REPEATS):
            metrics = llm.generate([tokens], params)[0].metrics
            assert metrics.time_to_first_token is not None, "the request has finished"
            prefill = max(prefill, prompt / metrics.time_to_first_token)
            decode = max(decode, metrics.decode_tokens_per_second or 0.0)
    return Speed(prefill, decode, prompt, answer)
