"""Is it still the same model? A bundle, read back from disk, against the model it was made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import FidelityError
from inferencex.runtime.backends.base import BackendOptions, StepBatch
from inferencex.runtime.backends.reference.backend import compile_bundle

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Fidelity:
    """How the logits of a bundle differ from its source's, over `tokens` positions.

    mean_kl, max_kl: Kullback-Leibler divergence of the bundle's distribution from the source's, in nats per token
    same_top1:       share of positions at which both find the same token most likely
    max_difference:  largest absolute difference of two logits
    source_perplexity, bundle_perplexity: of the compared text
    """

    tokens: int
    mean_kl: float
    max_kl: float
    same_top1: float
    max_difference: float
    source_perplexity: float
    bundle_perplexity: float

    def to_json(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


def compare_logits(source: Tensor, other: Tensor, token_ids: Tensor) -> Fidelity:
    """Compare logits float32 `[T, vocab]` of the text `token_ids [T]`."""
    log_p, log_q = torch.log_softmax(source.double(), -1), torch.log_softmax(other.double(), -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)
    after = token_ids[1:, None]

    def perplexity(log_probabilities: Tensor) -> float:
        if len(after) == 0:
            return math.nan
        return math.exp(min(50.0, -float(log_probabilities[:-1].gather(1, after).mean())))

    return Fidelity(
        tokens=len(token_ids),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        same_top1=float((source.argmax(-1) == other.argmax(-1)).double().mean()),
        max_difference=float((source - other).abs().max()),
        source_perplexity=perplexity(log_p),
        bundle_perplexity=perplexity(log_q),
    )


def bundle_logits(path: Path, token_ids: Sequence[int], *, keep_weights: bool | None = None) -> Tensor:
    """Run one sequence through a bundle as the runtime does: in two chunks, beside a second sequence.

    Returns logits, float32 `[T, vocab]`. A layer that works only on whole sequences, alone, shows here.
    """
    tokens = len(token_ids)
    blocks = -(-tokens // BLOCK_SIZE)
    options = BackendOptions(num_blocks=2 * blocks, block_size=BLOCK_SIZE)
    executable = compile_bundle(Bundle.open(path), options, keep_weights=keep_weights)
    first = max(1, tokens // 3)
    tables = np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks)
    other = list(reversed(token_ids))[:first]
    one = executable.step(_batch([(token_ids[:first], 0, tokens)], tables[:1])).copy()
    two = executable.step(_batch([(other, 0, first), (token_ids[first:], first, tokens)], tables[[1, 0]]))
    return torch.from_numpy(np.concatenate([one, two[len(other) :]]))


def _batch(parts: Sequence[tuple[Sequence[int], int, int]], tables: NDArray[np.int32]) -> StepBatch:
    """Lay out chunks `(token ids, position of the first, length of the whole prompt)`; all rows give logits."""
    ids = [token for tokens, _, _ in parts for token in tokens]
    positions = [start + i for tokens, start, _ in parts for i in range(len(tokens))]
    prompts = [length for tokens, _, length in parts for _ in tokens]
    offsets = np.cumsum([0, *(len(tokens) for tokens, _, _ in parts)])

    def int32(values: object) -> NDArray[np.int32]:
        return np.asarray(values, dtype=np.int32)

    return StepBatch(
        token_ids=int32(ids),
        positions=int32(positions),
        sequence_offsets=int32(offsets),
        context_lengths=int32([start + len(tokens) for tokens, start, _ in parts]),
        block_tables=int32(tables),
        logit_rows=int32(range(len(ids))),
        prompt_lengths=int32(prompts),
    )


def check(fidelity: Fidelity, limit: float, what: str) -> None:
    """Raise FidelityError when a bundle is further from its source than its format explains."""
    if math.isnan(fidelity.mean_kl):
        raise FidelityError(
            f"the written bundle's logits are not finite (NaN or infinity), those of {what} are; nothing was kept. "
            "Some weight or activation is too large for the format asked for: try another --dtype or --quantization"
        )
    if not fidelity.mean_kl <= limit:
        raise FidelityError(
            f"the written bundle does not compute what {what} computes: mean KL {fidelity.mean_kl:.4g} nats per token "
            f"over {fidelity.tokens} tokens, expected at most {limit:g} for this format; nothing was kept. "
            "Raise the limit with --verify-limit if this loss is what you want."
        )
