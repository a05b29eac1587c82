from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from inferencex.convert.source.open import open_checkpoint
from inferencex.formats.errors import SourceError


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_one_file(llama_directory: Path) -> None:
    checkpoint = open_checkpoint(str(llama_directory))
    assert checkpoint.kind == "local" and checkpoint.revision is None
    assert isinstance(checkpoint.config, LlamaConfig)
    assert checkpoint.config_dict["hidden_size"] == 32
    assert torch.equal(checkpoint.tensors["a"].load(), torch.arange(6.0).reshape(2, 3))
    assert checkpoint.nbytes == 40
    assert "no tokenizer" in checkpoint.warnings[0]


def test_shards_are_one_checkpoint(sharded_directory: Path) -> None:
    checkpoint = open_checkpoint(str(sharded_directory))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert [file.path.name[:11] for file in checkpoint.weight_files] == ["model-00001", "model-00002"]


def test_provenance_hashes_on_request_and_names_no_local_folder(llama_directory: Path) -> None:
    checkpoint = open_checkpoint(str(llama_directory))
    weights = llama_directory / "model.safetensors"
    entry = {"name": "model.safetensors", "size": weights.stat().st_size}
    facts = checkpoint.provenance()
    assert facts == {"id": "llama", "kind": "local", "revision": None, "files": [entry]}
    entry["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert checkpoint.provenance(hash_files=True)["files"] == [entry]


def test_shared_model_reads_as_the_library_reads_it(shared_data: Path) -> None:
    directory = shared_data / "stories260k"
    checkpoint = open_checkpoint(str(directory))
    expected = load_file(directory / "model.safetensors")
    assert set(checkpoint.tensors) == set(expected)
    for name, value in expected.items():
        handle = checkpoint.tensors[name]
        assert torch.equal(handle.load(), value) and handle.dtype == value.dtype
        assert torch.equal(handle.rows(3, 7), value[3:7])
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(checkpoint.files)
    assert not any(name.endswith(".safetensors") for name in checkpoint.files)
    assert checkpoint.warnings == ()


def test_loading_maps_the_file_instead_of_reading_it(tmp_path: Path, tiny: dict[str, Any]) -> None:
    LlamaConfig(**tiny).save_pretrained(tmp_path)
    save_file({"w": torch.zeros(1 << 24)}, tmp_path / "model.safetensors")  # 64 MiB
    handle = open_checkpoint(str(tmp_path)).tensors["w"]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    before = resident()
    value = handle.load()
    assert value[5] == 0
    assert resident() - before < 16 << 20
    value.sum()
    del value
    assert resident() - before < 16 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].update(c="model-00003-of-00003.safetensors"), "not there: model-00003"),
        (lambda index: index["weight_map"].update(c="model-00001-of-00002.safetensors"), "model-00001.* lacks 1 .* c"),
        (lambda index: index["weight_map"].update(b="model-00001-of-00002.safetensors"), "lacks 1 .* b"),
        (lambda index: index["weight_map"].update(c="../model.safetensors"), "not a plain file name"),
        (lambda index: index["weight_map"].update(c=3), "not a plain file name"),
        (lambda index: index.update(weight_map=[]), "no weight_map"),
        (lambda index: index.pop("weight_map"), "no weight_map"),
    ],
)
def test_index_that_disagrees_with_the_shards(
    sharded_directory: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_json(sharded_directory / "model.safetensors.index.json", change)
    with pytest.raises(SourceError, match=message):
        open_checkpoint(str(sharded_directory))


def test_tensor_that_the_index_does_not_name(sharded_directory: Path) -> None:
    path = sharded_directory / "model-00001-of-00002.safetensors"
    save_file({**load_file(path), "extra": torch.ones(1)}, path)
    with pytest.raises(SourceError, match=r"model-00001.*holds tensor 'extra', which .* does not name"):
        open_checkpoint(str(sharded_directory))


def test_tensor_in_two_shards(sharded_directory: Path) -> None:
    path = sharded_directory / "model-00002-of-00002.safetensors"
    save_file({**load_file(path), "a": torch.ones(2, 3)}, path)
    with pytest.raises(SourceError, match=r"model-00002.*tensor 'a' is also in model-00001"):
        open_checkpoint(str(sharded_directory))


def test_swapped_shards(sharded_directory: Path) -> None:
    first, second = sorted(sharded_directory.glob("*.safetensors"))
    bytes_of_first = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(bytes_of_first)
    with pytest.raises(SourceError, match=r"model-00001.*holds tensor 'b', which .* places in model-00002"):
        open_checkpoint(str(sharded_directory))


def test_truncated_shard_is_named_before_any_tensor_is_read(sharded_directory: Path) -> None:
    path = sharded_directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"model-00002.*truncated"):
        open_checkpoint(str(sharded_directory))


def test_absent_shard_is_named(sharded_directory: Path) -> None:
    (sharded_directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match=r"not there: model-00002-of-00002.safetensors"):
        open_checkpoint(str(sharded_directory))


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b'{"weight_map": {}, "weight_map": {}}'])
def test_index_that_is_not_an_object(sharded_directory: Path, raw: bytes) -> None:
    (sharded_directory / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(SourceError, match=r"index.json"):
        open_checkpoint(str(sharded_directory))


def test_no_config(llama_directory: Path) -> None:
    (llama_directory / "config.json").unlink()
    with pytest.raises(SourceError, match=r"config\.json: not found.*model\.safetensors"):
        open_checkpoint(str(llama_directory))


def test_no_weights(llama_directory: Path) -> None:
    (llama_directory / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"no weights.*--random-weights"):
        open_checkpoint(str(llama_directory))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.update(quantization_config={"quant_method": "aqlm"}),
            "method 'aqlm', which is not read",
        ),
        (lambda config: config.update(compression_config={"format": "x"}), "method None, which is not read"),
        (
            lambda config: config.update(text_config={"quantization_config": {"quant_method": "hqq"}}),
            "text_config: quantization_config.*'hqq'",
        ),
        (lambda config: config.update(model_type="from_the_future"), "not known.*upgrade"),
        (lambda config: config.pop("model_type"), "not known"),
        (lambda config: config.update(hidden_size="wide"), "cannot make a configuration"),
    ],
)
def test_config_that_cannot_be_used(
    llama_directory: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_json(llama_directory / "config.json", change)
    with pytest.raises(SourceError, match=message):
        open_checkpoint(str(llama_directory))


@pytest.fixture
def directory_with_code(llama_directory: Path) -> Path:
    """A model type that only the checkpoint's own code defines; running the code leaves a file behind."""

    def own_type(config: dict[str, Any]) -> None:
        config.update(model_type="homemade", auto_map={"AutoConfig": "configuration_homemade.HomemadeConfig"})

    edit_json(llama_directory / "config.json", own_type)
    (llama_directory / "configuration_homemade.py").write_text(
        "import os, pathlib\n"
        "from transformers import LlamaConfig\n"
        "pathlib.Path(os.environ['HOMEMADE_CODE_RAN']).touch()\n"
        "class HomemadeConfig(LlamaConfig):\n"
        "    model_type = 'homemade'\n"
    )
    return llama_directory


def test_code_in_the_checkpoint_runs_only_when_trusted(
    directory_with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setenv("HOMEMADE_CODE_RAN", str(ran))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(SourceError, match=r"Python code inside the checkpoint.*--trust-remote-code"):
        open_checkpoint(str(directory_with_code))
    assert not ran.exists()
    trusted = open_checkpoint(str(directory_with_code), trust_remote_code=True)
    assert ran.exists() and trusted.trust_remote_code
    assert trusted.config.model_type == "homemade"
    assert "configuration_homemade.py" in trusted.files


def test_code_beside_a_known_model_type_is_neither_run_nor_copied(llama_directory: Path) -> None:
    edit_json(llama_directory / "config.json", lambda config: config.update(auto_map={"AutoConfig": "code.Config"}))
    (llama_directory / "code.py").write_text("raise SystemExit('ran')\n")
    checkpoint = open_checkpoint(str(llama_directory))
    assert type(checkpoint.config) is LlamaConfig
    assert "code.py" not in checkpoint.files


def test_side_files_are_found_and_weights_are_not(llama_directory: Path) -> None:
    wanted = [
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "LICENSE",
    ]
    for name in [*wanted, "README.md", "pytorch_model.bin", "model.onnx", "training_args.bin"]:
        (llama_directory / name).write_text("{}")
    (llama_directory / "additional_chat_templates").mkdir()
    (llama_directory / "additional_chat_templates" / "rag.jinja").write_text("x")
    files = open_checkpoint(str(llama_directory)).files
    assert set(files) == {*wanted, "config.json", "additional_chat_templates/rag.jinja"}


def test_older_tokenizer_gets_a_tokenizer_json(llama_directory: Path) -> None:
    alphabet = ["<|endoftext|>", "h", "i", "Ġ", "Ġh"]
    (llama_directory / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(alphabet)}))
    (llama_directory / "merges.txt").write_text("#version: 0.2\nĠ h\n")
    (llama_directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    checkpoint = open_checkpoint(str(llama_directory))
    assert checkpoint.warnings == ()
    assert json.loads(checkpoint.files["tokenizer.json"].read_text())["model"]["type"] == "BPE"
    tokenizer = AutoTokenizer.from_pretrained(llama_directory)
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(checkpoint.files["tokenizer.json"]))
    assert made.encode("hi hi").ids == tokenizer("hi hi").input_ids == [1, 2, 4, 2]


def test_tokenizer_that_cannot_be_loaded_is_named(llama_directory: Path) -> None:
    (llama_directory / "vocab.json").write_text("{")
    (llama_directory / "merges.txt").write_text("")
    (llama_directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(SourceError, match=r"llama: transformers cannot load its tokenizer.*--trust-remote-code"):
        open_checkpoint(str(llama_directory))


def test_tokenizer_code_in_the_checkpoint_runs_only_when_trusted(
    llama_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setenv("HOMEMADE_CODE_RAN", str(ran))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (llama_directory / "vocab.txt").write_text("a\nb\n")
    code = {"tokenizer_class": "HomemadeTokenizer", "auto_map": {"AutoTokenizer": ["homemade.HomemadeTokenizer", None]}}
    (llama_directory / "tokenizer_config.json").write_text(json.dumps(code))
    (llama_directory / "homemade.py").write_text(
        "import os, pathlib\n"
        "from transformers import PythonBackend\n"
        "pathlib.Path(os.environ['HOMEMADE_CODE_RAN']).touch()\n"
        "class HomemadeTokenizer(PythonBackend):\n"
        "    vocab_size = 2\n"
        "    def get_vocab(self): return {'a': 0, 'b': 1}\n"
        "    def _convert_token_to_id(self, token): return 0\n"
    )
    with pytest.raises(SourceError, match="--trust-remote-code"):
        open_checkpoint(str(llama_directory))
    assert not ran.exists()
    trusted = open_checkpoint(str(llama_directory), trust_remote_code=True)
    assert ran.exists()
    assert "HomemadeTokenizer" in trusted.warnings[0] and "no tokenizer.json form" in trusted.warnings[0]


def test_safetensors_are_preferred_to_pickles(llama_directory: Path) -> None:
    torch.save({"c": torch.ones(1)}, llama_directory / "pytorch_model.bin")
    assert set(open_checkpoint(str(llama_directory), allow_pickle=True).tensors) == {"a", "b"}


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, ("payload-ran",))


def test_pickles_are_read_only_on_request_and_run_nothing(
    llama_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (llama_directory / "model.safetensors").unlink()
    path = llama_directory / "pytorch_model.bin"
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, path)
    with pytest.raises(SourceError, match=r"pytorch_model\.bin.*--allow-pickle"):
        open_checkpoint(str(llama_directory))
    handle = open_checkpoint(str(llama_directory), allow_pickle=True).tensors["a"]
    assert torch.equal(handle.load(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(handle.rows(1, 2), torch.tensor([[3.0, 4.0, 5.0]]))
    assert (handle.nbytes, handle.stored, handle.shape) == (24, "float32", (2, 3))

    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(1), "b": Payload()}, path)
    with pytest.raises(SourceError, match=r"pytorch_model\.bin"):
        open_checkpoint(str(llama_directory), allow_pickle=True)
    assert not (tmp_path / "payload-ran").exists()
    for content in ([torch.ones(1)], {"a": 1}, {3: torch.ones(1)}):
        torch.save(content, path)
        with pytest.raises(SourceError, match=r"pytorch_model\.bin"):
            open_checkpoint(str(llama_directory), allow_pickle=True)
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin"):
        open_checkpoint(str(llama_directory), allow_pickle=True)


def test_sharded_pickles(llama_directory: Path) -> None:
    (llama_directory / "model.safetensors").unlink()
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for name, file in names.items():
        torch.save({name: torch.ones(2)}, llama_directory / file)
    (llama_directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert set(open_checkpoint(str(llama_directory), allow_pickle=True).tensors) == {"a", "b"}
