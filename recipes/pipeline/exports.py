"""Steps that export: `inferencex export`, once for each bundle and format."""

from __future__ import annotations

import shutil
from pathlib import Path

from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline.base import Estimate, Inputs, JsonObject, Outcome, Step
from inferencex.recipes.pipeline.conversions import BUNDLE, ConvertStep
from inferencex.recipes.pipeline.estimates import copy_estimate
from inferencex.recipes.pipeline.hashing import file_digest, json_digest, visible_files
from inferencex.recipes.pipeline.tools import EXPORTING, versions

EXPORT = "export"


class ExportStep(Step):
    """A bundle in one format of another tool."""

    def __init__(self, conversion: ConvertStep, format_name: str, gates: tuple[str, ...]) -> None:
        super().__init__("export", f"{conversion.name}:{format_name}", (conversion.id,), gates)
        self.conversion = conversion
        self.format = format_name

    def ingredients(self) -> JsonObject:
        """See `Step`."""
        return {"format": self.format, "tools": versions(EXPORTING)}

    def estimate(self) -> Estimate:
        """See `Step`."""
        return copy_estimate(self.conversion.estimate().disk)

    def _written(self, folder: Path) -> Path:
        """Return what the command writes: a file where the format is one."""
        return folder / EXPORT / "model.gguf" if self.format == "gguf" else folder / EXPORT

    def command(self, folder: Path, inputs: Inputs, threads: int | None) -> list[str] | None:
        """See `Step`; what an interrupted export left is written again."""
        shutil.rmtree(folder / EXPORT, ignore_errors=True)
        if self.format == "gguf":
            (folder / EXPORT).mkdir()
        bundle = inputs[self.conversion.id].folder / BUNDLE
        return ["export", str(bundle), f"--format={self.format}", f"--output={self._written(folder)}"]

    def finish(self, folder: Path, inputs: Inputs, status: int, log: str) -> Outcome:
        """See `Step`."""
        if status != 0 or not self._written(folder).exists():
            raise RecipeError(f"{self.id}: {log}")
        root = folder / EXPORT
        files = {path.relative_to(root).as_posix(): file_digest(path) for path in visible_files(root)}
        return Outcome(json_digest(files), {"bytes": sum(path.stat().st_size for path in visible_files(root))})
