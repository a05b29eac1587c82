"""Small tokenizers of every family, each in a folder with the files that a bundle has beside its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from inferencex.runtime.text import Tokenizer

CORPUS = [
    "Once upon a time there was a little girl who didn't like the rain.",
    "She said: 'I can't, we've lost them!' and they're gone.",
    "Größe, naïve café, señor; 東京は日本の首都です。 Привет, мир! 😀👍🏽",
    "def f(x):\n    return x ** 2  # 1234567890\n",
] * 3

NASTY = [
    "",
    " ",
    "   leading and trailing   ",
    "a",
    "Héllo wörld naïve café Ångström",
    "e\u0301 versus \u00e9, \u1e9b\u0323",
    "東京は日本の首都です。한국어 中文繁體",
    "العربية עברית हिन्दी ไทย",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "tab\tnewline\ncarriage\r\nnull\x00bell\x07escape\x1b[0m\x7f\x85",
    "zero\u200bwidth\u200djoin\ufeffbom\u2028line\u00a0nbsp",
    "\ufffd\uffff\U0010ffff",
    "<s>begin</s> middle <unk> <|im_start|>user\nhi<|im_end|>",
    "<s><s></s></s>x<s>",
    "word <mask> word,<mask>word",
    "<0x41><0xFF> ▁ ▁▁a Ġ ##ing",
    "x" * 5000,
    "ab" * 3000 + " " * 2000 + "\n" * 500,
    "1234567890" * 50,
    "don't I'm we've they're he's isn't , . ! ?",
]


def byte_level() -> Backend:
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("日本", special=False)])
    return tokenizer


def unigram() -> Backend:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(piece, -3.0) for piece in ("▁", "▁the", "▁a", "in", "g", "▁time", "東", "é", "▁rain", "ing", "'", "t")]
    pieces += [(letter, -5.0) for letter in "abcdefhijklmnopqrsuvwxyz"]
    tokenizer = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def sentencepiece_bpe() -> Backend:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "é", "東"]:
        vocabulary[piece] = len(vocabulary)
    model = models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("▁", "the")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Backend(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Backend:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "rain", "do", "don", "it", "he", "re", "ve", "'", "'s", "'m", "n't"]
    words += [",", ".", "!", "?", "##ing"]
    letters = [prefix + letter for letter in "abcdefghijklmnopqrstuvwxyz" for prefix in ("", "##")]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*words, *letters]))}
    tokenizer = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    return tokenizer


def word_ends() -> Backend:
    vocabulary = {"<unk>": 0, "the</w>": 1, "a</w>": 2, "ra": 3, "in</w>": 4, "</w></w>": 5, "!": 6}
    tokenizer = Backend(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def no_decoder() -> Backend:
    return Backend(models.WordLevel({"<unk>": 0, "the": 1, "rain": 2, ",": 3}, unk_token="<unk>"))


def deferred() -> Backend:
    tokenizer = Backend(models.WordLevel({"<pad>": 0, "a": 1, "b": 2, "|": 3}, unk_token="<pad>"))
    tokenizer.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|")
    return tokenizer


FAMILIES: dict[str, tuple[Callable[[], Backend], dict[str, Any]]] = {
    "byte-level": (byte_level, {"eos_token": "<|endoftext|>", "clean_up_tokenization_spaces": True}),
    "unigram": (unigram, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram-clean-up": (unigram, {"eos_token": "</s>", "clean_up_tokenization_spaces": True}),
    "sentencepiece-bpe": (sentencepiece_bpe, {"bos_token": "<s>", "add_bos_token": True, "eos_token": "</s>"}),
    "word-piece": (word_piece, {"unk_token": "[UNK]", "clean_up_tokenization_spaces": True}),
    "word-ends": (word_ends, {"unk_token": "<unk>"}),
    "no-decoder": (no_decoder, {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}),
    "deferred": (deferred, {"unk_token": "<pad>"}),
    "added-tokens": (
        byte_level,
        {
            "eos_token": "<|endoftext|>",
            "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False},
            "additional_special_tokens": ["<|im_start|>", "<extra>"],
            "image_token": "<image>",
            "added_tokens_decoder": {
                "0": {"content": "<|endoftext|>", "special": True},
                "421": {"content": "日本", "special": True, "normalized": False},
                "9000": {"content": "<s>", "special": False, "normalized": False, "lstrip": True},
            },
        },
    ),
    "split-special": (byte_level, {"eos_token": "<|endoftext|>", "split_special_tokens": True}),
}


def write_tokenizer(folder: Path, backend: Backend, config: dict[str, Any] | None) -> Path:
    """Write a bundle's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    if config is not None:
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by family name."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(root / name, build(), config) for name, (build, config) in FAMILIES.items()}


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def tokenizer_folder(request: pytest.FixtureRequest, tokenizer_folders: dict[str, Path]) -> Path:
    """One folder after the other."""
    return tokenizer_folders[request.param]


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """One loaded tokenizer after the other."""
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def nasty() -> list[str]:
    """Texts that tokenizers get wrong."""
    return NASTY
