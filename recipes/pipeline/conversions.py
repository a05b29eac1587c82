"""Steps that convert: `inferencex convert`, once for each combination of a conversion's matrix."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inferencex.formats.bundle.layout import MANIFEST_FILE
from inferencex.formats.errors import OptionError, QuantizationError, RecipeError
from inferencex.recipes.pipeline.base import Estimate, Inputs, JsonObject, Outcome, Step
from inferencex.recipes.pipeline.estimates import conversion_estimate
from inferencex.recipes.pipeline.hashing import file_digest
from inferencex.recipes.pipeline.options import arguments, command_options
from inferencex.recipes.pipeline.recipe import Conversion, Source
from inferencex.recipes.pipeline.source import ResolvedSource
from inferencex.recipes.pipeline.tools import CONVERTING, versions

MODULE = "inferencex.convert.cli"
# What the pipeline says itself.
OWN = ("model-id", "output", "work-dir", "overwrite")
OWN_SOURCE = ("revision", "trust-remote-code", "allow-pickle", "random-weights", "seed")
BUNDLE = "bundle"
_BLOCKS = ".blocks"
_FIGURES = ("mean_kl", "p99_kl", "same_top1", "source_perplexity", "bundle_perplexity", "tokens")


def expand(conversion: Conversion) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the options of each combination of a conversion's matrix."""
    axes = sorted(conversion.matrix)
    for values in itertools.product(*(conversion.matrix[axis] for axis in axes)):
        chosen = dict(zip(axes, values, strict=True))
        name = "-".join([conversion.name, *(_word(axis, value) for axis, value in chosen.items())])
        yield name, {**conversion.options, **chosen}


def _word(axis: str, value: object) -> str:
    if isinstance(value, bool):
        return axis if value else f"no-{axis}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-")


class ConvertStep(Step):
    """One bundle."""

    def __init__(self, name: str, options: Mapping[str, Any], source: Source, nbytes: int | None) -> None:
        super().__init__("convert", name, ())
        self.options = {key.replace("_", "-"): value for key, value in options.items()}
        self.source = source
        self.nbytes = nbytes
        self.resolved: ResolvedSource | None = None
        self.arguments = arguments(MODULE, options, refused=(*OWN, *OWN_SOURCE))
        try:
            self.calibrates = _calibrates(self.options)
        except (OptionError, QuantizationError) as error:
            written = next((key for key in options if key == "quantization"), name)
            raise RecipeError(f"{written}: {error}") from error

    def ingredients(self) -> JsonObject:
        """See `Step`; the source counts by its files, and threads change nothing."""
        if self.resolved is None:
            raise RecipeError(f"{self.id}: the source is not known yet")
        options = {key: value for key, value in self.options.items() if key not in ("threads", "verify")}
        files = [[path.name, file_digest(path)] for path in _calibration_files(options.get("calibration"))]
        source = self.source.model_dump(exclude={"model", "revision"})
        return {
            "source": self.resolved.digest,
            "model": self.resolved.model,
            "reading": source,
            "options": options,
            "verify": self.options.get("verify", True),
            "calibration": files,
            "tools": versions(CONVERTING),
        }

    def estimate(self) -> Estimate:
        """See `Step`."""
        return conversion_estimate(self.nbytes, self.options, os.cpu_count() or 1)

    def command(self, folder: Path, inputs: Inputs, threads: int | None) -> list[str] | None:
        """See `Step`; blocks that an interrupted conversion finished are found again in the folder."""
        if (folder / BUNDLE / MANIFEST_FILE).is_file():
            return None  # a bundle takes its place when it is complete
        if self.resolved is None:
            raise RecipeError(f"{self.id}: the source is not known yet")
        command = ["convert", f"--model-id={self.resolved.model}", f"--output={folder / BUNDLE}", *self.arguments]
        if self.resolved.revision is not None:
            command.append(f"--revision={self.resolved.revision}")
        for flag in ("trust_remote_code", "allow_pickle", "random_weights"):
            if getattr(self.source, flag):
                command.append("--" + flag.replace("_", "-"))
        if self.source.seed is not None:
            command.append(f"--seed={self.source.seed}")
        if threads is not None and "threads" not in self.options:
            command.append(f"--threads={threads}")
        if self.calibrates:
            command.append(f"--work-dir={folder / _BLOCKS}")
        return command

    def finish(self, folder: Path, inputs: Inputs, status: int, log: str) -> Outcome:
        """See `Step`."""
        manifest = folder / BUNDLE / MANIFEST_FILE
        if status != 0 or not manifest.is_file():
            raise RecipeError(f"{self.id}: {log}")
        shutil.rmtree(folder / _BLOCKS, ignore_errors=True)
        report = json.loads((folder / BUNDLE / "report.json").read_text(encoding="utf-8"))
        facts: JsonObject = {"bytes": report["bundle_bytes"], "source_bytes": report["source_bytes"]}
        for kind in ("fidelity", "held_out"):
            found = report.get(kind) or {}
            figures = {name: _rounded(found[name]) for name in _FIGURES if isinstance(found.get(name), int | float)}
            if figures:
                facts[kind] = figures
        # The manifest has the hashes of all files but the reports, which hold timings.
        return Outcome(file_digest(manifest), facts)


def _calibrates(options: Mapping[str, Any]) -> bool:
    """Whether a conversion calibrates, and so has blocks to keep; raises what parsing the scheme does."""
    from inferencex.convert.quantize import parse_mixed_scheme, parse_scheme

    quantization = str(options.get("quantization", "none"))
    budget = any(options.get(name) is not None for name in ("target-bits", "target-size", "max-kl"))
    scheme = parse_mixed_scheme(quantization) if budget else parse_scheme(quantization)
    calibrates = scheme.needs_calibration or options.get("kv-cache", "none") != "none"
    return calibrates or (options.get("calibration") is not None and scheme.linear is not None)


def _calibration_files(text: object) -> list[Path]:
    """Return the files that `--calibration` names, as the converter finds them; raises OptionError as it does."""
    from inferencex.convert.calibrate.local_text import LocalText, is_local

    name = "" if text is None else str(text)
    if "#" in name and not Path(name).exists():
        name = name.rpartition("#")[0]
    return LocalText(name).paths if name and is_local(name) else []


def _rounded(value: float) -> float | str:
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def known_options() -> Mapping[str, Any]:
    """Return the options that a recipe's conversions may state, by name without dashes."""
    refused = {*OWN, *OWN_SOURCE, "help", "debug"}
    return {name: option for name, option in command_options(MODULE).items() if name not in refused}
