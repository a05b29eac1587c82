"""The check at the end of a conversion: the staged bundle against what its source computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from inferencex.convert import fidelity
from inferencex.convert.capture import Captured
from inferencex.convert.capture.export import PARAMETER_PREFIX
from inferencex.convert.oracle import source_logits
from inferencex.convert.probe_text import probe_tokens
from inferencex.convert.report import Report
from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.errors import FidelityError

# Bytes of float32 weights up to which the source runs beside other work; a larger one runs alone, to save memory.
_BESIDE = 4 << 30

# How far a correct bundle may be from its source, mean KL in nats per token, by the coarsest format in it. Wrong
# weights are far above: a shuffled layer gives several nats.
_LIMITS = {
    "int3": 4.0,
    "int4": 1.5,
    "int5": 0.5,
    "int6": 0.2,
    "nvfp4": 1.5,
    "mxfp4": 2.0,
    "int8": 0.1,
    "fp8": 0.3,
    "activations": 0.5,
    "float16": 0.02,
}
_PLAIN_LIMIT = 1e-3


class Verification:
    """Runs the source on a short text, at once and in the background where memory allows, and the bundle later."""

    def __init__(self, token_ids: list[int], run_source: Callable[[], Tensor], background: Executor | None) -> None:
        self.token_ids = token_ids
        self._run_source = run_source
        self._future = None if background is None else background.submit(run_source)

    def check(self, staged: Path, model_id: str, report: Report, limit: float | None) -> fidelity.Fidelity:
        """Read the bundle back from disk and compare; raises FidelityError when it is off."""
        source = self._run_source() if self._future is None else self._future.result()
        if not bool(torch.isfinite(source).all()):
            raise FidelityError(
                f"{model_id}: the model's own logits are not finite (NaN or infinity) before any conversion; its "
                "weights or config.json are damaged. Nothing was kept"
            )
        bundle = fidelity.bundle_logits(staged, self.token_ids)
        result = fidelity.compare_logits(source, bundle, torch.tensor(self.token_ids))
        fidelity.check(result, limit if limit is not None else _limit(report), model_id)
        return result


def _limit(report: Report) -> float:
    formats = " ".join([*(w.format for w in report.weights), *(layer.format for layer in report.kv_cache)])
    return max((limit for name, limit in _LIMITS.items() if name in formats), default=_PLAIN_LIMIT)


@contextmanager
def verification(
    checkpoint: Checkpoint, captured: Captured, sources: Mapping[str, ParameterSource], *, tokens: int
) -> Iterator[Verification]:
    """Begin to run the source on `tokens` tokens; what the source computes does not wait for the bundle."""
    table = captured.module.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    tokenizer = checkpoint.files.get("tokenizer.json")
    token_ids = probe_tokens(tokenizer.parent if tokenizer is not None else None, table.shape[0], tokens)
    elements = sum(parameter.numel() for parameter in captured.module.parameters())

    def run_source() -> Tensor:
        return source_logits(captured.program, PARAMETER_PREFIX, sources, torch.tensor(token_ids))

    with ThreadPoolExecutor(1) as pool:
        yield Verification(token_ids, run_source, pool if 4 * elements <= _BESIDE else None)
