"""The models that are compared, with what a token costs in each."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_SIZE = 64
INT4_BYTES = 0.5 + 2.5 / GROUP_SIZE  # a nibble, and for each group a 16-bit scale and a 4-bit zero point
INT6_BYTES = 0.75 + 2.75 / GROUP_SIZE
INT8_BYTES = 1.0
KV_BYTES = 2  # a 16-bit float


@dataclass(frozen=True)
class Model:
    """A decoder of the Llama family with a tied head.

    The rules by which limits are computed: linears are INT4 in groups of `GROUP_SIZE`, the head is stored as INT6 and
    computed with as INT8, keys and values are 16 bits wide.
    """

    name: str
    title: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    alias: str | None = None  # what `open_checkpoint` calls it; None: random weights

    @property
    def linear_weights(self) -> int:
        """Weights of all linears but the head: each is one multiply-add for every token."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        """Weights of the head: one multiply-add for every row whose logits are wanted."""
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that a decode step reads, whatever the number of sequences."""
        return self.linear_weights * INT4_BYTES + self.head_weights * INT8_BYTES

    @property
    def stored_bytes(self) -> float:
        """Bytes of weights on disk."""
        return self.linear_weights * INT4_BYTES + self.head_weights * INT6_BYTES

    @property
    def attention_operations_per_pair(self) -> int:
        """Multiply-adds of one token's queries with one token's keys and values, in all layers."""
        return self.layers * self.heads * 2 * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that each token of context adds to what a sequence reads in a step."""
        return self.layers * 2 * self.kv_heads * self.head_dim * KV_BYTES


MODELS = {
    model.name: model
    for model in (
        Model(
            "smollm2",
            "SmolLM2-135M-Instruct",
            hidden=576,
            layers=30,
            heads=9,
            kv_heads=3,
            head_dim=64,
            ffn=1536,
            vocab=49152,
            alias="smollm2-135m-instruct",
        ),
        Model(
            "random-1b",
            "1B-shaped Llama, random weights",
            hidden=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            head_dim=64,
            ffn=8192,
            vocab=128256,
        ),
    )
}
