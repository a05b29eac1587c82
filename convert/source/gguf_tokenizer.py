"""The tokenizer inside a GGUF file, written out as the files that a Hugging Face checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from inferencex.convert.source.gguf_file import GgufFile
from inferencex.formats.errors import SourceError

# Names of `tokenizer.ggml.pre` whose text is cut by GPT-2's rule, which transformers' GPT-2 tokenizer applies.
_GPT2_SPLIT = {"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "dolma", "trillion"}
# The same after every digit is set apart.
_DIGITS_THEN_GPT2_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def write_tokenizer(part: GgufFile, directory: Path) -> list[str]:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `directory`.

    Returns warnings: one when the file has no tokenizer, one when the way it cuts text into words before merging is
    unknown. Raises SourceError when transformers cannot rebuild the tokenizer.
    """
    if "tokenizer.ggml.tokens" not in part.strings:
        return [f"{part.path.name} holds no tokenizer: the bundle can take token ids, not text"]
    warnings = []
    try:
        architecture, vocabulary, settings = get_gguf_tokenizer(str(part.path))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    except Exception as error:  # the tokenizers library raises bare Exception for a vocabulary it cannot use
        raise SourceError(f"{part.path}: transformers cannot rebuild the tokenizer ({error})") from error
    split = vocabulary.get("pre_tokenizer_type")
    if vocabulary.get("tokenizer_type") == "gpt2" and split not in GGUF_PRE_TOKENIZER_SPLITS:
        if split in _DIGITS_THEN_GPT2_SPLIT:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif split not in _GPT2_SPLIT:
            warnings.append(
                f"{part.path.name} cuts text by the unknown rule {split!r}: GPT-2's is used, and token ids may differ"
            )
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, clean_up_tokenization_spaces=False, **settings)
    tokenizer.save_pretrained(directory)
    return warnings
