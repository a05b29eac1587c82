"""Bundles that several tests export, converted when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.formats.export import models

Bundles = Callable[..., Path]


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Return a function from `(architecture, quantization, **options)` to a bundle of a tiny model."""
    folder = tmp_path_factory.mktemp("export")
    made: dict[str, Path] = {}

    def make(name: str, quantization: str, *, overrides: dict[str, Any] | None = None, **options: Any) -> Path:
        key = f"{name}-{quantization}-{sorted((overrides or {}).items())}-{sorted(options.items())}"
        if key not in made:
            source = models.checkpoint(folder / f"source{len(made)}", name, **(overrides or {}))
            made[key] = models.bundle(source, folder / f"bundle{len(made)}", quantization, **options)
        return made[key]

    return make
