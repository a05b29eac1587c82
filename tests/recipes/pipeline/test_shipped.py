"""Each shipped recipe, in its small form: a tiny model, a little text, wide gates, and the real commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from inferencex.cli.console import exit_status
from inferencex.recipes.pipeline.cli import app
from inferencex.recipes.provenance.verify import verify

WIDE = "thresholds.max_kl=2, thresholds.min_same_top1=0.1, fidelity.windows=1, fidelity.length=64"
LITTLE_TEXT = {"calibration_samples": 4, "calibration_length": 64}
# The options that make each recipe small, by conversion, and the folders that it then publishes.
SMALL: dict[str, tuple[dict[str, dict[str, object]], tuple[str, ...]]] = {
    "chat-int4-balanced": ({"int4": LITTLE_TEXT}, ("int4",)),
    "int4-smallest-under-kl": ({"smallest": {**LITTLE_TEXT, "max_kl": 0.5}}, ("smallest",)),
    "int8-w8a8-cpu": ({"w8a8": {}}, ("w8a8-smoothquant-int8",)),
    "fp8-gpu": ({"fp8": LITTLE_TEXT}, ("fp8", "fp8-compressed-tensors")),
    "moe": ({"int4": LITTLE_TEXT}, ("int4",)),
    "long-context": ({"int4-kv8": {**LITTLE_TEXT, "max_model_len": 512}}, ("int4-kv8",)),
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def small_settings(name: str, shared_data: Path, tmp_path: Path) -> list[str]:
    """Return the settings that make a recipe small."""
    model, conversions = shared_data / "stories260k", SMALL[name][0]
    settings = []
    if name == "moe":
        folder = tmp_path / "tiny-moe"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MOE), encoding="utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (model / file).is_file():
                shutil.copy(model / file, folder)
        model = folder
        settings.append("source.random_weights=true")
    settings.append(f"source.model={model}")
    for conversion, options in conversions.items():
        settings += [f"conversions.{conversion}.options.{key}={value}" for key, value in options.items()]
    kv_cache = ", engine.kv_cache_dtype=int8" if name == "long-context" else ""
    return [*settings, f"gates.fidelity.options.set=[{WIDE}{kv_cache}]"]


@pytest.mark.parametrize("name", SMALL)
def test_small_form(
    name: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"--set={setting}" for setting in small_settings(name, shared_data, tmp_path)]
    status = exit_status(app, "inferencex pipeline", [name, *settings, "--work-dir=work"])
    captured = capfd.readouterr()
    assert status == 0, captured.out + captured.err
    published = tmp_path / "published" / name
    assert {path.name for path in published.iterdir()} == set(SMALL[name][1])
    for folder in published.iterdir():
        assert verify(folder).checks
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "mean KL" in card and "fidelity: mean_kl" in card
    status = exit_status(app, "inferencex pipeline", [name, *settings, "--work-dir=work", "--log-format=json"])
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert status == 0 and {event["state"] for event in events if event["event"] == "ended"} == {"cached"}
