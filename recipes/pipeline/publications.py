"""Steps that publish: a bundle or an export with its model card, provenance, bill of materials and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from inferencex.formats.bundle.layout import MANIFEST_FILE
from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline.base import Estimate, Finished, Inputs, JsonObject, Outcome, Step
from inferencex.recipes.pipeline.conversions import BUNDLE, ConvertStep
from inferencex.recipes.pipeline.destinations import destination, shown
from inferencex.recipes.pipeline.estimates import copy_estimate
from inferencex.recipes.pipeline.exports import EXPORT, ExportStep
from inferencex.recipes.pipeline.hashing import file_digest, json_digest, visible_files
from inferencex.recipes.pipeline.tools import CONVERTING, versions
from inferencex.recipes.provenance.bom import BOM_FILE, bill_of_materials
from inferencex.recipes.provenance.checksums import SIGNATURE_FILE, SUMS_FILE, write_checksums
from inferencex.recipes.provenance.model_card import CARD_FILE, model_card
from inferencex.recipes.provenance.signing import public_key_of, sign_file
from inferencex.recipes.provenance.statement import STATEMENT_FILE, Origin, statement

_WORK = ".published"


class PublishStep(Step):
    """One folder at one destination.

    of:      the step whose output is published: the conversion, or an export of it
    gates:   steps whose figures go into the model card
    recipe:  its name and the hash of what it says
    """

    def __init__(
        self,
        conversion: ConvertStep,
        of: ConvertStep | ExportStep,
        to: str,
        sign: Path | None,
        gates: tuple[str, ...],
        recipe: tuple[str, str],
    ) -> None:
        artifact = of.format if isinstance(of, ExportStep) else BUNDLE
        name = f"{conversion.name}:{artifact}:{hashlib.sha256(to.encode()).hexdigest()[:8]}"
        super().__init__("publish", name, tuple(dict.fromkeys((conversion.id, of.id, *gates))))
        self.conversion, self.of, self.to, self.sign, self.gates = conversion, of, to, sign, gates
        self.artifact = artifact
        self.recipe, self.recipe_digest = recipe

    def ingredients(self) -> JsonObject:
        """See `Step`."""
        key = None if self.sign is None else public_key_of(self.sign)
        return {"to": self.to, "recipe": self.recipe, "recipe_digest": self.recipe_digest, "key": key,
                "tools": versions(CONVERTING)}  # fmt: skip

    def estimate(self) -> Estimate:
        """See `Step`."""
        return copy_estimate(self.of.estimate().disk)

    def still_there(self, finished: Finished) -> bool:
        """See `Step`: whether the destination holds what was put there."""
        there = destination(self.to).checksums()
        return there is not None and hashlib.sha256(there).hexdigest() == finished.outcome.facts["sums"]

    def finish(self, folder: Path, inputs: Inputs, status: int, log: str) -> Outcome:
        """See `Step`; publishing twice what is the same does no harm, so an interrupted one begins anew."""
        work = folder / _WORK
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        made = inputs[self.of.id].folder / (EXPORT if isinstance(self.of, ExportStep) else BUNDLE)
        for name in _published_files(made):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            _link(made / name, work / name)
        self._describe(work, inputs)
        sums = write_checksums(work)
        if self.sign is not None:
            sign_file(sums, self.sign, work / SIGNATURE_FILE)
        digest = file_digest(sums)
        nbytes = sum(path.stat().st_size for path in visible_files(work))
        destination(self.to).put(work)
        shutil.rmtree(work)
        return Outcome(digest, {"to": shown(self.to), "sums": digest, "bytes": nbytes})

    def _describe(self, work: Path, inputs: Inputs) -> None:
        """Write the model card, the provenance and the bill of materials beside what is published."""
        source = self.conversion.resolved
        if source is None:
            raise RecipeError(f"{self.id}: the source is not known yet")
        files = {path.relative_to(work).as_posix(): file_digest(path) for path in visible_files(work)}
        taken = sorted({CARD_FILE, BOM_FILE, STATEMENT_FILE, SUMS_FILE} & set(files))
        for name in taken:  # such as the card of the source
            del files[name]
            (work / name).unlink()
        origin = Origin(
            source.name,
            source.revision,
            source.files,
            self.recipe,
            self.recipe_digest,
            self.conversion.name,
            self.conversion.options,
            versions(CONVERTING),
        )
        facts = inputs[self.conversion.id].outcome.facts
        gates = {gate: dict(inputs[gate].outcome.facts.get("figures", {})) for gate in self.gates}
        metrics = {
            f"{kind}:{name}": value for kind in ("fidelity", "held_out") for name, value in facts.get(kind, {}).items()
        }
        metrics |= {f"{gate}:{name}": value for gate, figures in gates.items() for name, value in figures.items()}
        bom = bill_of_materials(origin, json_digest(files), _architecture(work), metrics, files)
        (work / BOM_FILE).write_text(bom, encoding="utf-8")
        card = model_card(origin, self.artifact, facts, gates, BOM_FILE)
        (work / CARD_FILE).write_text(card, encoding="utf-8")
        (work / STATEMENT_FILE).write_text(statement(origin, files), encoding="utf-8")


def _published_files(made: Path) -> list[str]:
    """Return what is published of a step's output: of a bundle what its manifest lists, for reports hold timings."""
    manifest = made / MANIFEST_FILE
    if not manifest.is_file():
        return [path.relative_to(made).as_posix() for path in visible_files(made)]
    return [MANIFEST_FILE, *json.loads(manifest.read_text(encoding="utf-8"))["files"]]


def _architecture(folder: Path) -> str | None:
    config = folder / "config.json"
    if not config.is_file():
        return None
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)  # a file system without links
