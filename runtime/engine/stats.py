"""Running totals of an engine, for statistics and metrics."""

from __future__ import annotations

from inferencex.formats.records import record


@record
class EngineStats:
    """Totals since the engine started. Times in seconds; a step's time is split by the tokens of each kind.

    num_prompt_tokens:    of finished requests; `num_cached_tokens` of them came from the prefix cache
    num_prefill_tokens:   computed to read prompts, recomputation after preemption included
    num_decode_tokens:    generated tokens that were fed back one at a time
    """

    num_kv_blocks: int
    num_steps: int = 0
    num_finished_requests: int = 0
    num_aborted_requests: int = 0
    num_failed_requests: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    time_to_first_token_total: float = 0.0
    num_first_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_peak: int = 0
    num_running: int = 0
    num_waiting: int = 0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens computed per second; None before the first."""
        return self.num_prefill_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens per second over all sequences together; None before the first."""
        return self.num_decode_tokens / self.decode_seconds if self.decode_seconds > 0 else None

    @property
    def mean_time_to_first_token(self) -> float | None:
        """Mean seconds from a request's arrival to its first token; None before the first."""
        return self.time_to_first_token_total / self.num_first_tokens if self.num_first_tokens else None

    def add_step(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_prefill_tokens += num_prefill_tokens
        self.num_decode_tokens += num_decode_tokens
        prefill_share = num_prefill_tokens / (num_prefill_tokens + num_decode_tokens)
        self.prefill_seconds += seconds * prefill_share
        self.decode_seconds += seconds * (1.0 - prefill_share)
