"""Code that comes with a checkpoint: trusted for its configuration and its model alike, or not run at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.errors import SourceError
from tests.architectures import zoo
from tests.smollm2 import Quiet

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_defined_in_the_checkpoint_converts_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "source"
    zoo.tiny_model("llama").save_pretrained(source)  # type: ignore[operator]
    (source / "modeling_own.py").write_text(CODE)
    config = json.loads((source / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (source / "config.json").write_text(json.dumps(config))
    options = {"model_id": str(source), "output": tmp_path / "out", "scheme": parse_scheme("none")}
    with pytest.raises(SourceError, match="--trust-remote-code"):
        convert(ConvertOptions(**options), Quiet())
    report = convert(ConvertOptions(**options, trust_remote_code=True), Quiet())
    assert report.fidelity is not None and report.fidelity.mean_kl < 1e-6
    assert json.loads((tmp_path / "out" / "bundle.json").read_text())["architecture"]["class"] == "OwnForCausalLM"
