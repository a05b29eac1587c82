"""What is measured: one entry for each line of the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.engines.base import Capacity
from bench.limits import Limits
from bench.models import Model

Kind = Literal["prefill", "decode", "first_token", "memory", "disk"]
FIRST_TOKEN_PROMPT = 4
SHORT = 32
LONG = 2048


@dataclass(frozen=True)
class Column:
    """One measurement.

    sequences:  prompts in progress together
    context:    tokens of each prompt
    tokens:     tokens that each prompt is continued by
    """

    name: str
    title: str
    kind: Kind
    unit: str
    sequences: int = 1
    context: int = 0
    tokens: int = 1

    @property
    def higher_is_better(self) -> bool:
        """Whether the figure is a rate rather than a cost."""
        return self.kind in ("prefill", "decode")

    def is_better(self, value: float, than: float) -> bool:
        """Whether one figure of this column is better than another."""
        return value > than if self.higher_is_better else value < than

    @property
    def needs_session(self) -> bool:
        """Whether it is measured on a loaded model."""
        return self.higher_is_better

    def limit(self, model: Model, limits: Limits) -> float | None:
        """What the machine allows, in `unit`; None for what has no such limit, or where it was not measured.

        Prefill: the linears' multiply-adds at the int8 peak, and attention's at half of it, for they are of 16 bits.
        Decode: whichever is longer, reading weights, keys and values once, or the linears' multiply-adds.
        Memory: packed weights, and the keys and values of the column that has most.
        Disk: stored weights.
        """
        if self.kind == "prefill" and limits.int8_operations_per_second:
            linears = self.context * model.linear_weights + model.head_weights
            attention = self.context * (self.context + 1) // 2 * model.attention_operations_per_pair
            return self.context * limits.int8_operations_per_second / (2 * (linears + 2 * attention))
        if self.kind == "decode" and limits.bytes_per_second:
            held = self.sequences * (self.context + self.tokens / 2)
            seconds = (model.weight_bytes + held * model.kv_bytes_per_token) / limits.bytes_per_second
            if limits.int8_operations_per_second:
                operations = 2 * self.sequences * (model.linear_weights + model.head_weights)
                seconds = max(seconds, operations / limits.int8_operations_per_second)
            return self.sequences / seconds
        if self.kind == "memory":
            return (model.weight_bytes + most_tokens(COLUMNS.values()) * model.kv_bytes_per_token) / 1e6
        return model.stored_bytes / 1e6 if self.kind == "disk" else None


COLUMNS = {
    column.name: column
    for column in (
        Column("prefill-512", "prefill 512", "prefill", "tokens/s", context=512),
        Column("prefill-4096", "prefill 4096", "prefill", "tokens/s", context=4096),
        Column("decode-1", f"decode x1, {SHORT} tokens", "decode", "tokens/s", 1, SHORT, 64),
        Column("decode-8", f"decode x8, {SHORT} tokens", "decode", "tokens/s", 8, SHORT, 64),
        Column("decode-32", f"decode x32, {SHORT} tokens", "decode", "tokens/s", 32, SHORT, 64),
        Column("decode-1-long", f"decode x1, {LONG} tokens", "decode", "tokens/s", 1, LONG, 64),
        Column("decode-8-long", f"decode x8, {LONG} tokens", "decode", "tokens/s", 8, LONG, 64),
        Column("first-token", "process start to first token", "first_token", "s", context=FIRST_TOKEN_PROMPT),
        Column("memory", "peak resident memory", "memory", "MB"),
        Column("disk", "size on disk", "disk", "MB"),
    )
}
QUICK = ("prefill-512", "decode-1", "decode-8", "decode-32")


def most_tokens(columns: Iterable[Column]) -> int:
    """Return the most tokens that a column has in progress at once."""
    return max((column.sequences * (column.context + column.tokens) for column in columns), default=64)


def capacity_for(columns: Sequence[Column], threads: int) -> Capacity:
    """The room that these columns need, no more."""
    return Capacity(
        threads=threads,
        max_sequences=max((column.sequences for column in columns), default=1),
        max_length=max((column.context + column.tokens for column in columns), default=64),
        max_tokens=most_tokens(columns),
    )
