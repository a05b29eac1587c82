"""Tuning visits each shape of quantized linear once, and is refused where nothing can be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.tune import tune_bundle
from inferencex.runtime.backends.triton.tuning import Config
from tests import triton_kernels


def test_each_shape_once(tmp_path: Path) -> None:
    from tests.architectures.comparison import write_bundle
    from tests.architectures.shrink import tiny_config
    from tests.architectures.zoo import tiny_model

    bundle = write_bundle(tiny_model("qwen2"), tiny_config("qwen2"), tmp_path, quantization="rtn-int4")
    visited = []

    def tune(tuner: Any, weight: Any, dtype: Any, tokens: Any) -> dict[str, Config]:
        visited.append(weight.shape)
        return {f"{weight.shape} {count}": Config.of(BLOCK_N=64) for count in tokens}

    tuned = list(tune_bundle(bundle, tokens=(1, 16), tuner=object(), tune=tune))  # type: ignore[arg-type]
    assert len(visited) == len(set(visited)) and len(visited) >= 3
    assert len(tuned) == 2 * len(visited)


@pytest.mark.skipif(triton_kernels.device() == "cuda", reason="a GPU can be measured")
def test_the_interpreter_measures_nothing(tiny_bundle: Path) -> None:
    with pytest.raises(BackendError, match="tuning needs a GPU"):
        list(tune_bundle(tiny_bundle))
