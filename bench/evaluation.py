"""lm-eval's tasks on our engine beside lm-eval's own `hf` model: the same weights, the same questions, scores and time.

`python -m bench.evaluation --bundle BUNDLE --checkpoint FOLDER --data FOLDER --limit 100`

The bundle is the checkpoint without quantization (`--quantization none`), both compute in float32, on the same threads.
The folder of data has arc_easy.jsonl, piqa_valid.jsonl with piqa_valid-labels.lst, lambada_test.jsonl and
gsm8k_test.jsonl, in the forms that docs/evaluation.md describes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferencex.recipes.evaluation.progress import Unwatched
from inferencex.recipes.evaluation.recipe import EvaluationRecipe
from inferencex.recipes.evaluation.run import load
from inferencex.recipes.evaluation.tasks import TaskScore, run_tasks, score_model


@dataclass(frozen=True)
class Row:
    """A task on both: scores, and seconds of wall and processor time."""

    score: TaskScore
    theirs: TaskScore
    seconds: float
    their_seconds: float
    cpu_seconds: float
    their_cpu_seconds: float


def recipe_for(task: str, data: Path, threads: int) -> EvaluationRecipe:
    """Return the recipe of one task, on float32 activations, keys and values."""
    options = {
        "arc_easy": {"path": str(data / "arc_easy.jsonl")},
        "piqa": {"path": str(data / "piqa_valid.jsonl"), "labels": str(data / "piqa_valid-labels.lst")},
        "lambada_openai": {"path": str(data / "lambada_test.jsonl")},
        "gsm8k": {
            "path": str(data / "gsm8k_test.jsonl"),
            "num_fewshot": 5,
            "metric": "exact_match,flexible-extract",
        },
    }[task]
    return EvaluationRecipe.model_validate(
        {
            "name": task,
            "engine": {"activation_dtype": "float32", "kv_cache_dtype": "float32", "threads": threads},
            "tasks": {task: options},
        }
    )


def measure(
    bundle: Path, checkpoint: Path, data: Path, tasks: list[str], limit: int, threads: int, batch: int
) -> Iterator[Row]:
    """Yield a row for each task; both models are loaded before any clock runs."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(threads)
    theirs = HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", batch_size=batch)
    for task in tasks:
        recipe = recipe_for(task, data, threads)
        with load(bundle, recipe.engine) as llm:
            wall, cpu = time.perf_counter(), time.process_time()
            ours = run_tasks(llm, recipe, limit, Unwatched())
            seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        wall, cpu = time.perf_counter(), time.process_time()
        other = score_model(theirs, recipe, limit)
        yield Row(
            ours.scores[0], other.scores[0], seconds, time.perf_counter() - wall, cpu_seconds, time.process_time() - cpu
        )


def main() -> None:
    """Print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", default="arc_easy,piqa,lambada_openai,gsm8k")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="batch size of lm-eval's hf model")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print("| task | metric | questions | ours | hf | difference | s, ours | s, hf | CPU-s, ours | CPU-s, hf | ratio |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows = measure(
        arguments.bundle, arguments.checkpoint, arguments.data, arguments.tasks.split(","), arguments.limit,
        arguments.threads, arguments.batch,
    )  # fmt: skip
    for row in rows:
        ours, theirs = row.score, row.theirs
        print(
            f"| {ours.task} | {ours.metric} | {ours.samples} | {ours.score:.4f} | {theirs.score:.4f} | "
            f"{ours.score - theirs.score:+.4f} | {row.seconds:.1f} | {row.their_seconds:.1f} | {row.cpu_seconds:.1f} | "
            f"{row.their_cpu_seconds:.1f} | {row.their_seconds / row.seconds:.1f}x |",
            flush=True,
        )


if __name__ == "__main__":
    main()
