"""A small tokenizer in the files of a checkpoint, with and without a token in front of every text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 300
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def write(folder: Path, *, begins: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> dict[str, Path]:
    """Write a tokenizer trained on a little English, and return its files by name as a checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the rain in the plain and the river that runs through it"] * 3, trainer)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}


def numbered_lines(count: int, of: str = "line") -> str:
    """Return a text in which every line is another."""
    return "".join(f"{of} {i}: the rain in the plain {i * i}\n" for i in range(count))
