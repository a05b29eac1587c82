"""`bom.cdx.json`: a bundle as a machine-learning bill of materials, CycloneDX 1.6 with a model card."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from inferencex.recipes.provenance.statement import Origin

BOM_FILE = "bom.cdx.json"
_NAMESPACE = uuid.UUID("6f6c3f0e-52a4-5d2b-9a55-0a2f0d3c7b11")


def bill_of_materials(
    origin: Origin,
    digest: str,
    architecture: str | None,
    metrics: Mapping[str, float],
    files: Mapping[str, str],
) -> str:
    """Return the document as JSON text; equal arguments give equal bytes.

    digest:        sha256 of the folder's content, which the document's serial number is made of
    architecture:  the model's class, `LlamaForCausalLM`
    metrics:       measured figures by name
    files:         sha256 by name of what the folder holds
    """
    card: dict[str, Any] = {
        "modelParameters": {"task": "text-generation"},
        "properties": [{"name": f"inferencex:{name}", "value": str(origin.options[name])} for name in origin.options],
    }
    if architecture is not None:
        card["modelParameters"]["modelArchitecture"] = architecture
    if metrics:
        card["quantitativeAnalysis"] = {
            "performanceMetrics": [{"type": name, "value": str(metrics[name])} for name in sorted(metrics)]
        }
    model = f"{origin.model}#{origin.conversion}"
    source: dict[str, Any] = {"type": "machine-learning-model", "bom-ref": "source", "name": origin.model}
    if origin.revision is not None:
        source["version"] = origin.revision
    source["components"] = _files("source", origin.source_files)
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, digest + origin.recipe_digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": model,
                "version": digest[:16],
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "modelCard": card,
                "pedigree": {"ancestors": [{"type": "machine-learning-model", "name": origin.model}]},
            },
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": origin.tools[name]}
                    for name in sorted(origin.tools)
                ]
            },
            "properties": [
                {"name": "inferencex:recipe", "value": origin.recipe},
                {"name": "inferencex:recipe:sha256", "value": origin.recipe_digest},
            ],
        },
        "components": [source, *_files("model", files)],
        "dependencies": [{"ref": "model", "dependsOn": ["source"]}, {"ref": "source"}],
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _files(owner: str, digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "bom-ref": f"{owner}/{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": digests[name]}],
        }
        for name in sorted(digests)
    ]
