"""The same comparison on a trained model with a SentencePiece-like tokenizer, whose pieces carry their spaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")

from lm_eval.api.instance import Instance

from inferencex.recipes.evaluation.lm import EngineLM
from inferencex.runtime import LLM
from tests.recipes.evaluation.conftest import converted

PAIRS = [
    ("Once upon a time, there was", " a little girl"),
    ("Once upon a time, there was ", "a little girl"),
    ("", "Once upon a time"),
    ("Lily liked to play in the", " park"),
    ("Lily liked to play in the", " park with her mom."),
]


def _instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each, place) for place, each in enumerate(arguments)]  # type: ignore[arg-type]


def test_a_trained_model_scores_and_writes_as_the_hf_model_does(shared_data: Path, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    source = shared_data / "stories260k"
    bundle = converted(source, tmp_path / "bundle")
    with LLM(bundle, threads=1, num_kv_blocks=128) as llm:
        ours = EngineLM(llm)
        hf = HFLM(str(source), device="cpu", dtype="float32", max_length=ours.max_length, batch_size=1)
        for found, wanted in zip(
            ours.loglikelihood(_instances("loglikelihood", PAIRS)),
            hf.loglikelihood(_instances("loglikelihood", PAIRS), disable_tqdm=True),
            strict=True,
        ):
            assert found == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
        asked = _instances(
            "generate_until", [(text, {"until": ["."], "max_gen_toks": 24}) for text, _ in PAIRS if text]
        )
        assert ours.generate_until(asked) == hf.generate_until(asked, disable_tqdm=True)
        rolling = _instances("loglikelihood_rolling", [("Once upon a time, there was a little girl. " * 60,)])
        assert ours.loglikelihood_rolling(rolling) == pytest.approx(
            hf.loglikelihood_rolling(rolling, disable_tqdm=True), rel=1e-5
        )
