"""SmolLM2-135M-Instruct for tests about text: converted once for all workers of a test run."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme

MODEL = "smollm2-135m-instruct"

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Q: What is 12 times 12?\nA:",
    "The three laws of thermodynamics are",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "Liebe Freunde, heute möchte ich",
    "Le petit chat noir",
    "In 1969, Neil Armstrong",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Ingredients: flour, sugar, butter, eggs.\n\nInstructions:\n1.",
    "人工智能是",
    "🙂 Emojis are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "The meaning of life",
    "Chapter 1\n\nIt was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when "
    "it was",
    '{"name": "Ada", "born": ',
)


class Quiet:
    """An observer that shows nothing."""

    def stage(self, name: str) -> None: ...

    def advance(self, done: int, total: int, what: str) -> None: ...

    def note(self, text: str) -> None: ...


def bundle(folder: Path, quantization: str) -> Path:
    """Return a bundle of SmolLM2 under `folder`, converting it if no other worker did."""
    path = folder / quantization
    with FileLock(folder / f"{quantization}.lock"):
        if not path.exists():
            convert(ConvertOptions(MODEL, path, parse_scheme(quantization)), Quiet())
    return path
