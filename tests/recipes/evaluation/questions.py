"""Small files with questions, in the forms that benchmarks are passed around in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARC = [
    {"query": "Question: which way is up?", "choices": ["that way", "the dog", "so on", "a cat"], "gold": 0},
    {"query": "Question: the cat sat on what?", "choices": ["the floor", "the mat"], "gold": 1},
    {"query": "Question: what lay on the floor?", "choices": ["the dog", "the cat", "the mat"], "gold": 0},
    {"query": "Question: what is café?", "choices": ["naïve", "日本語", "0123"], "gold": 2},
]
PIQA = [
    {"goal": "sit", "sol1": "on the mat", "sol2": "on the cat"},
    {"goal": "lie", "sol1": "on the up", "sol2": "on the floor"},
    {"goal": "go up", "sol1": "that way", "sol2": "and so on"},
]
LAMBADA = [
    {"text": "the cat sat on the mat and the dog lay on the floor"},
    {"text": "Question: which way is up? Answer: that way is up"},
]
GSM8K = [
    {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    {"question": "2 + 3?", "answer": "It is 5.\n#### 5"},
    {"question": "9 - 9?", "answer": "0\n#### 0"},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_all(folder: Path) -> None:
    lines(folder / "arc.jsonl", ARC)
    lines(folder / "piqa.jsonl", PIQA)
    (folder / "piqa.lst").write_text("0\n1\n0\n")
    lines(folder / "lambada.jsonl", LAMBADA)
    lines(folder / "gsm8k.jsonl", GSM8K)


TASKS = """
tasks:
  arc_easy: {path: arc.jsonl}
  piqa: {path: piqa.jsonl, labels: piqa.lst}
  lambada_openai: {path: lambada.jsonl}
  gsm8k:
    path: gsm8k.jsonl
    num_fewshot: 1
    metric: exact_match,flexible-extract
    generation: {max_gen_toks: 8}
"""
