"""What transformers computes from exported checkpoints, beside what the bundle computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferencex.formats.export import export_bundle
from tests.formats.export import models
from tests.formats.export.conftest import Bundles


def _loaded(folder: Path, **options: Any) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        logits = model(torch.tensor([models.IDS])).logits[0].float().numpy()
    return logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("quantization", "symmetric"), [("rtn-int4-g32", True), ("rtn-int8", True), ("rtn-int4-g32", False)]
)
def test_compressed_tensors(bundles: Bundles, tmp_path: Path, quantization: str, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import CompressedTensorsConfig

    path = bundles("llama", quantization, symmetric=symmetric)
    export_bundle(path, "compressed-tensors", tmp_path / "out")
    # Packed zero points are read by this way of loading alone.
    options = {} if symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    logits = _loaded(tmp_path / "out", **options)
    assert models.divergence(models.computed(path), models.log_softmax(logits)) < (1e-9 if symmetric else 1e-4)


@pytest.mark.parametrize("format_name", ["awq", "gptq"])
def test_gptqmodel(bundles: Bundles, tmp_path: Path, format_name: str) -> None:
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    pytest.importorskip("optimum", reason="optimum is not installed")
    path = bundles("llama", "rtn-int4-g32")
    export_bundle(path, format_name, tmp_path / "out")
    assert models.divergence(models.computed(path), models.log_softmax(_loaded(tmp_path / "out"))) < 1e-4
