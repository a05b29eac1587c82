"""The line of figures at the end of a run."""

from __future__ import annotations

from inferencex.runtime.engine.stats import EngineStats


def describe(stats: EngineStats) -> str:
    """Say what was computed and how fast: tokens per second, seconds to the first token, KV blocks at the peak."""
    parts = [
        f"prefill {stats.num_prefill_tokens} tokens{_speed(stats.prefill_tokens_per_second)}",
        f"decode {stats.num_decode_tokens} tokens{_speed(stats.decode_tokens_per_second)}",
    ]
    if stats.num_cached_tokens:
        parts.insert(1, f"{stats.num_cached_tokens} from the prefix cache")
    if stats.mean_time_to_first_token is not None:
        parts.append(f"first token after {stats.mean_time_to_first_token:.3f} s")
    parts.append(f"KV blocks {stats.kv_blocks_peak} of {stats.num_kv_blocks}")
    if stats.num_preemptions:
        parts.append(f"{stats.num_preemptions} preemptions")
    return " | ".join(parts)


def _speed(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f" at {tokens_per_second:.1f} tokens/s"
