from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from inferencex.formats.errors import BundleError, RequestError
from inferencex.runtime.text import Tokenizer


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def assert_same(folder: Path, texts: list[str]) -> None:
    ours, theirs = Tokenizer.load(folder), reference(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    for text in texts:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), (text[:40], add)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (text[:40], skip)
    chance = random.Random(7)
    for _ in range(200):
        ids = [chance.randrange(ours.vocab_size + 3) for _ in range(chance.randrange(12))]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_no_text_has_fewer_tokens_than_is_said(tokenizer_folder: Path, nasty: list[str]) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    for text in [*nasty, *(text * 50 for text in nasty), " " * 5000, "\n" * 3000, "a" * 4000, "\u00e9\U0001f642" * 500]:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text)), text[:40]


def test_equals_transformers_on_every_family(tokenizer_folder: Path, nasty: list[str]) -> None:
    assert_same(tokenizer_folder, nasty)


@pytest.mark.shared
@pytest.mark.parametrize("model", ["stories260k", "babyllama-char105"])
def test_equals_transformers_on_published_models(shared_data: Path, model: str, nasty: list[str]) -> None:
    sample = (shared_data / "eval" / "tinystories-sample.txt").read_text(encoding="utf-8")[:4000]
    assert_same(shared_data / model, [*nasty, sample])


def test_legacy_files_add_tokens_as_transformers_does(
    tmp_path: Path, tokenizer_folders: dict[str, Path], nasty: list[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folders["byte-level"] / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "mask_token": {"content": "<mask>", "lstrip": True, "rstrip": False}})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"middle": 500, "<s>": 501}))
    assert_same(tmp_path, nasty)
    assert Tokenizer.load(tmp_path).bos_token == "<s>"


def test_works_with_tokenizer_json_alone(tmp_path: Path, tokenizer_folders: dict[str, Path]) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folders["byte-level"] / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("naïve 東京")) == "naïve 東京"
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 3, 5]}, {"eos_token_id": 9}, (3, 5)),
        ({"eos_token_id": 4}, {}, (4,)),
        ({}, {"eos_token_id": 9}, (9,)),
        ({}, {"text_config": {"eos_token_id": [8]}}, (8,)),
        (None, {}, (0,)),
    ],
)
def test_end_of_sequence_ids_come_from_the_first_file_that_names_them(
    tmp_path: Path,
    tokenizer_folders: dict[str, Path],
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folders["byte-level"] / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_missing_and_damaged_files_are_named(tmp_path: Path, tokenizer_folders: dict[str, Path]) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json: not found"):
        Tokenizer.load(tmp_path)
    good = (tokenizer_folders["byte-level"] / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(good[: len(good) // 2])
    with pytest.raises(BundleError, match=r"tokenizer\.json: is not a usable tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match=r"tokenizer\.json: is not a usable tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(good)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        for content, message in (("[1]", "holds a JSON list"), ("{", "not valid JSON")):
            (tmp_path / name).write_text(content)
            with pytest.raises(BundleError, match=message):
                Tokenizer.load(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(BundleError, match="eos_token_id is '</s>'"):
        Tokenizer.load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 3}')
    with pytest.raises(BundleError, match="bos_token: 3 is not a token"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": "y"}}')
    with pytest.raises(BundleError, match="added_tokens_decoder"):
        Tokenizer.load(tmp_path)


def test_unusable_requests_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match="between 0 and"):
        tokenizer.decode([-1])
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(10**6) is None


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import inferencex.runtime.text, inferencex.runtime.cli, inferencex.cli.main"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LOADED_AGAIN = """
import random, resource, sys
from pathlib import Path
from inferencex.runtime.text import Tokenizer

chance = random.Random(5)
text = " ".join("".join(chance.choices("etaoinshrdlu", k=12)) for _ in range(12_000))

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def use():
    Tokenizer.load(Path(sys.argv[1])).encode(text)

use(), use()
before = resident()
for _ in range(8):
    use()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_a_tokenizer_that_is_gone_leaves_no_words_behind(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(["the order in which the rain that was nearest fell upon the hillside"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", LOADED_AGAIN, tmp_path]
    kept = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    # 47 MB with the words; without them what the allocator happens to keep of the work.
    assert kept < 20e6, f"{kept} bytes more after 8 tokenizers came and went"
