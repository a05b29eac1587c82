"""A tiny checkpoint with a tokenizer, and its bundle: what scores are compared on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")
pytest.importorskip("torch", reason="needs the package torch")

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from tests.architectures import zoo
from tests.smollm2 import Quiet

CONTEXT = 64
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CORPUS = [
    "the cat sat on the mat and the dog lay on the floor",
    "Question: which way is up? Answer: that way is up.",
    "naïve café, 日本語のテキスト, 🙂🚀 and so on 0123456789",
]


@pytest.fixture(scope="session", autouse=True)
def offline() -> None:
    """Nothing here may ask the hub for anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield  # type: ignore[misc]


def _tokenizer(begins_with_bos: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    if begins_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _checkpoint(folder: Path, begins_with_bos: bool) -> Path:
    tokenizer = _tokenizer(begins_with_bos)
    model = zoo.tiny_model("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT)
    model.config._attn_implementation = "eager"
    model.generation_config.eos_token_id = model.config.eos_token_id = 1
    model.generation_config.bos_token_id = model.config.bos_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def converted(source: Path, output: Path, scheme: str = "none") -> Path:
    convert(ConvertOptions(str(source), output, parse_scheme(scheme)), Quiet())
    return output


@pytest.fixture(scope="session", params=[False, True], ids=["plain", "bos"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory.mktemp("source"), request.param)


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(checkpoint, tmp_path_factory.mktemp("bundles") / "none")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, for tests that do not depend on how its tokenizer begins a text."""
    return _checkpoint(tmp_path_factory.mktemp("tiny"), False)


@pytest.fixture(scope="session")
def none_bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tiny, tmp_path_factory.mktemp("bundles") / "none")


@pytest.fixture(scope="session")
def int4_bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tiny, tmp_path_factory.mktemp("bundles") / "int4", "rtn-int4-g32")
