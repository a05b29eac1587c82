"""Model card, provenance and bill of materials: right in form, the same for equal inputs."""

from __future__ import annotations

import json
from dataclasses import replace

import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from inferencex.recipes.provenance.bom import bill_of_materials
from inferencex.recipes.provenance.model_card import model_card
from inferencex.recipes.provenance.statement import Origin, statement

DIGEST = "ab" * 32
ORIGIN = Origin(
    "someone/model", "c0ffee" * 6 + "beef", {"model.safetensors": DIGEST, "config.json": "cd" * 32}, "demo", DIGEST,
    "int4", {"quantization": "int4", "exclude": ["*x*"]}, {"inferencex": "0.1.0", "torch": "2.13"},
)  # fmt: skip
FACTS = {"bytes": 3 << 20, "source_bytes": 9 << 20, "held_out": {"mean_kl": 0.0123, "tokens": 512}}


def test_bill_of_materials_is_cyclonedx() -> None:
    text = bill_of_materials(ORIGIN, DIGEST, "LlamaForCausalLM", {"held_out:mean_kl": 0.0123}, {"weights": DIGEST})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    card = document["metadata"]["component"]["modelCard"]
    assert card["modelParameters"] == {"task": "text-generation", "modelArchitecture": "LlamaForCausalLM"}
    assert card["quantitativeAnalysis"]["performanceMetrics"] == [{"type": "held_out:mean_kl", "value": "0.0123"}]
    assert document["components"][0]["version"] == ORIGIN.revision
    again = bill_of_materials(ORIGIN, DIGEST, "LlamaForCausalLM", {"held_out:mean_kl": 0.0123}, {"weights": DIGEST})
    assert again == text
    bare = bill_of_materials(replace(ORIGIN, revision=None), DIGEST, None, {}, {})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bare) is None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace('"file"', '"fil"')) is not None


def test_statement_names_source_recipe_and_tools() -> None:
    document = json.loads(statement(ORIGIN, {"bundle.json": DIGEST}))
    assert document["subject"] == [{"name": "bundle.json", "digest": {"sha256": DIGEST}}]
    build = document["predicate"]["buildDefinition"]
    assert build["externalParameters"]["source"] == f"someone/model@{ORIGIN.revision}"
    assert {"name": "demo", "digest": {"sha256": DIGEST}} in build["resolvedDependencies"]
    assert len(build["resolvedDependencies"]) == 3
    assert document["predicate"]["runDetails"]["builder"]["version"]["torch"] == "2.13"


def test_model_card() -> None:
    card = model_card(ORIGIN, "bundle", FACTS, {"evaluate:int4:fidelity": {"mean_kl": 0.02}}, "bom.cdx.json")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "someone/model", "library_name": "inferencex", "pipeline_tag": "text-generation",
        "tags": ["inferencex", "bundle"],
    }  # fmt: skip
    assert "# model, int4" in body and "3.0 MiB of 9.0 MiB" in body and DIGEST in body
    assert "| Text held out from calibration: mean KL from the source (nats per token) | 0.0123 |" in body
    assert "| evaluate:int4:fidelity: mean_kl | 0.02 |" in body
