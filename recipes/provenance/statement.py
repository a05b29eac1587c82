"""`provenance.json`: what a published folder was made from and how, as an in-toto statement with SLSA's predicate.

See https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1. Nothing in it depends on when or where it was
written, so that equal inputs give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATEMENT_FILE = "provenance.json"
BUILD_TYPE = "urn:inferencex:pipeline:1"


@dataclass(frozen=True)
class Origin:
    """Where a published folder comes from.

    model, revision:  the source as it was named, and its commit where it is of the hub
    source_files:     sha256 of the source's files, by name
    recipe, recipe_digest:  the recipe's name, and the sha256 of what it says (comments apart), `--set` included
    conversion:       the conversion's name, and `options` its options
    tools:            versions of the programs that made it
    """

    model: str
    revision: str | None
    source_files: Mapping[str, str]
    recipe: str
    recipe_digest: str
    conversion: str
    options: Mapping[str, Any]
    tools: Mapping[str, str]


def statement(origin: Origin, subjects: Mapping[str, str]) -> str:
    """Return the statement about the files `subjects` (sha256 by name), as JSON text."""
    source = origin.model if origin.revision is None else f"{origin.model}@{origin.revision}"
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": subjects[name]}} for name in sorted(subjects)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "source": source,
                    "recipe": origin.recipe,
                    "conversion": origin.conversion,
                    "options": dict(origin.options),
                },
                "internalParameters": {},
                "resolvedDependencies": [
                    {"name": origin.recipe, "digest": {"sha256": origin.recipe_digest}},
                    *(
                        {"name": f"{source}/{name}", "digest": {"sha256": origin.source_files[name]}}
                        for name in sorted(origin.source_files)
                    ),
                ],
            },
            "runDetails": {"builder": {"id": "inferencex pipeline", "version": dict(origin.tools)}},
        },
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
