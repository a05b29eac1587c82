"""What every row is measured against: the source's predictions on windows of a text, in float32."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from bench.accuracy.plain import decoder_of, head_of, load_model, logits_of
from inferencex.runtime.text import Tokenizer

_LARGEST_DIFFERENCE = 1e-3  # of logits computed from hidden states, for rounding of the same sums in another order


@dataclass(frozen=True)
class Reference:
    """The source on `windows`, int64 `[W, T]`: what its head reads, float32 `[W, T, H]`, and the head, `[V, H]`.

    A vocabulary's logits would take gigabytes on a disk; from these they come back in less time than from there.
    """

    windows: NDArray[np.int64]
    hidden: torch.Tensor
    head: torch.Tensor

    def logits(self) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of each window, float32 `[T, V]`."""
        for hidden in self.hidden:
            yield (hidden @ self.head.T).numpy()


def evaluation_windows(checkpoint: Path, text: Path, count: int, length: int) -> NDArray[np.int64]:
    """Cut the first `count` windows of a text that do not overlap, int64 `[count, length]`.

    Raises ValueError when the text has fewer.
    """
    ids = Tokenizer.load(checkpoint).encode(text.read_text(encoding="utf-8"))
    if len(ids) < count * length:
        raise ValueError(f"{text} has {len(ids)} tokens; {count} windows of {length} need {count * length}")
    return np.asarray(ids[: count * length], dtype=np.int64).reshape(count, length)


def reference_of(checkpoint: Path, windows: NDArray[np.int64], folder: Path) -> Reference:
    """Run the source on `windows`, or read from `folder` what an earlier call found for the same ones.

    Raises ValueError for a model whose logits are not its head times what `get_decoder` returns.
    """
    digest = hashlib.sha256(windows.astype("<i8").tobytes() + (checkpoint / "config.json").read_bytes()).hexdigest()
    kept = folder / f"reference-{digest[:16]}.safetensors"
    if not kept.exists():
        partial = kept.with_suffix(".partial")
        save_file(_run(checkpoint, windows), partial)
        partial.rename(kept)
    tensors = load_file(kept)
    return Reference(windows, tensors["hidden"], tensors["head"])


def _run(checkpoint: Path, windows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    model = load_model(checkpoint)
    head = head_of(model).weight.detach()
    hidden = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.from_numpy(window)[None]
            hidden.append(decoder_of(model)(ids, use_cache=False).last_hidden_state[0])
    expected = torch.from_numpy(logits_of(model)(windows[0]))
    difference = float((hidden[0] @ head.T - expected).abs().max())
    if not difference <= _LARGEST_DIFFERENCE:
        raise ValueError(
            f"{checkpoint}: logits differ by {difference:.3g} from the head times the decoder's output; "
            "models that change logits behind the head are not supported"
        )
    return {"hidden": torch.stack(hidden).clone(), "head": head.clone().contiguous()}
