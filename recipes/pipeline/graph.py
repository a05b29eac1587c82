"""A recipe as a graph of steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from inferencex.formats.errors import InferenceXError, RecipeError
from inferencex.formats.export.export import FORMATS
from inferencex.recipes.evaluation.recipe import load_recipe
from inferencex.recipes.pipeline.base import Step
from inferencex.recipes.pipeline.conversions import ConvertStep, expand
from inferencex.recipes.pipeline.destinations import destination, shown
from inferencex.recipes.pipeline.evaluations import EvaluateStep
from inferencex.recipes.pipeline.exports import ExportStep
from inferencex.recipes.pipeline.hashing import json_digest
from inferencex.recipes.pipeline.publications import PublishStep
from inferencex.recipes.pipeline.recipe import Pipeline, Source
from inferencex.recipes.pipeline.source import ResolvedSource
from inferencex.recipes.shipped import recipe_file
from inferencex.recipes.yaml_source import Place, YamlSource, read_yaml

MAX_CONVERSIONS = 200


@dataclass(frozen=True)
class Graph:
    """The steps of a recipe, each after those it waits for."""

    recipe: Pipeline
    steps: tuple[Step, ...]

    def resolve(self, source: ResolvedSource) -> None:
        """Tell the conversions what the source is."""
        for step in self.steps:
            if isinstance(step, ConvertStep):
                step.resolved, step.nbytes = source, source.nbytes


def read_pipeline(path: Path, settings: Sequence[str] = ()) -> tuple[Pipeline, YamlSource]:
    """Read a recipe with `key=value` settings put in; raises RecipeError naming file, line and column."""
    yaml = read_yaml(path).with_values(settings)
    return yaml.validate(Pipeline), yaml


def build_graph(recipe: Pipeline, yaml: YamlSource, folder: Path, nbytes: int | None = None) -> Graph:
    """Return the steps of a recipe whose file lies in `folder`.

    Raises RecipeError, with line and column, for options that the commands do not have, names that do not fit, and
    places that nothing can be published to.
    """
    return _Builder(recipe, yaml, folder, nbytes).build()


class _Builder:
    def __init__(self, recipe: Pipeline, yaml: YamlSource, folder: Path, nbytes: int | None) -> None:
        self.recipe, self.yaml, self.folder, self.nbytes = recipe, yaml, folder, nbytes
        self.conversions: dict[str, ConvertStep] = {}
        self.gates: dict[str, list[EvaluateStep]] = {}
        self.exports: dict[tuple[str, str], ExportStep] = {}
        self.published: dict[str, Place] = {}

    def build(self) -> Graph:
        for index in range(len(self.recipe.conversions)):
            self._convert(index)
        for index in range(len(self.recipe.gates)):
            self._gate(index)
        for index in range(len(self.recipe.exports)):
            self._export(index)
        publications = [step for index in range(len(self.recipe.publish)) for step in self._publish(index)]
        gates = [gate for name in self.conversions for gate in self.gates.get(name, ())]
        return Graph(self.recipe, (*self.conversions.values(), *gates, *self.exports.values(), *publications))

    def _convert(self, index: int) -> None:
        conversion, place = self.recipe.conversions[index], ("conversions", index)
        both = sorted(set(conversion.options) & set(conversion.matrix))
        if both:
            raise self.yaml.error((*place, "matrix", both[0]), f"{both[0]} is among the options as well; leave one out")
        for name, options in expand(conversion):
            if name in self.conversions:
                raise self.yaml.error((*place, "name"), f"there are two conversions named {name}; name one differently")
            try:
                self.conversions[name] = ConvertStep(name, options, self.recipe.source, self.nbytes)
            except RecipeError as error:
                raise self._at_option((*place,), error) from error
            if len(self.conversions) > MAX_CONVERSIONS:
                raise self.yaml.error(place, f"more than {MAX_CONVERSIONS} conversions; make the matrix smaller")

    def _gate(self, index: int) -> None:
        gate, place = self.recipe.gates[index], ("gates", index)
        path = self.folder / gate.recipe
        if not path.is_file():
            try:
                path = recipe_file(gate.recipe)
            except InferenceXError as error:
                raise self.yaml.error((*place, "recipe"), str(error)) from error
        baseline: ConvertStep | str | None = gate.baseline
        if gate.baseline is not None:
            baseline = self.conversions.get(gate.baseline, gate.baseline)
        if baseline == "source":
            baseline = self._source_argument(self.recipe.source, place)
        elif isinstance(baseline, str) and not Path(baseline).exists():
            names = ", ".join(self.conversions)
            raise self.yaml.error(
                (*place, "baseline"), f"{baseline} is neither source, nor a conversion ({names}), nor a path"
            )
        for conversion in self._chosen(gate.of, place):
            if any(other.gate.name == gate.name for other in self.gates.get(conversion.name, ())):
                raise self.yaml.error((*place, "name"), f"{conversion.name} has two gates named {gate.name}")
            try:
                step = EvaluateStep(conversion, gate, path, baseline)
            except RecipeError as error:
                raise self._at_option(place, error) from error
            self.gates.setdefault(conversion.name, []).append(step)
            load_recipe(path, step.settings)

    def _source_argument(self, source: Source, place: Place) -> str:
        if source.revision is not None or source.random_weights or source.allow_pickle or source.trust_remote_code:
            raise self.yaml.error(
                (*place, "baseline"),
                "source is read with options of its own here; add a conversion without quantization, and name that one",
            )
        return source.model

    def _export(self, index: int) -> None:
        export, place = self.recipe.exports[index], ("exports", index)
        if export.format not in FORMATS:
            raise self.yaml.error(
                (*place, "format"), f"there is no format {export.format}; known are {', '.join(FORMATS)}"
            )
        for conversion in self._chosen(export.of, place):
            key = (conversion.name, export.format)
            if key in self.exports:
                raise self.yaml.error(place, f"{conversion.name} is exported to {export.format} twice; leave one out")
            self.exports[key] = ExportStep(conversion, export.format, self._gates_of(conversion))

    def _publish(self, index: int) -> list[PublishStep]:
        publication, place = self.recipe.publish[index], ("publish", index)
        steps = []
        identity = (self.recipe.name, json_digest(self.recipe.model_dump(exclude={"publish", "description"})))
        for conversion in self._chosen(publication.of, place):
            of: ConvertStep | ExportStep | None = conversion
            if publication.artifact != "bundle":
                of = self.exports.get((conversion.name, publication.artifact))
            if of is None:
                raise self.yaml.error(
                    (*place, "artifact"), f"{conversion.name} is not exported to {publication.artifact}; add an export"
                )
            try:
                to = publication.to.format(name=conversion.name, recipe=self.recipe.name)
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                raise self.yaml.error(
                    (*place, "to"), f"{publication.to}: only {{name}} and {{recipe}} can be filled in"
                ) from error
            if to in self.published:
                raise self.yaml.error(
                    (*place, "to"), f"{shown(to)} is published to twice; put {{name}} into it, or choose with of"
                )
            self.published[to] = place
            try:
                destination(to)
            except RecipeError as error:
                raise self.yaml.error((*place, "to"), str(error)) from error
            sign = None if publication.sign is None else Path(os.path.expandvars(publication.sign)).expanduser()
            if sign is not None and not sign.is_file():
                raise self.yaml.error((*place, "sign"), f"{sign}: there is no such file; inferencex sign makes one")
            steps.append(PublishStep(conversion, of, to, sign, self._gates_of(conversion), identity))
        return steps

    def _gates_of(self, conversion: ConvertStep) -> tuple[str, ...]:
        return tuple(gate.id for gate in self.gates.get(conversion.name, ()))

    def _chosen(self, of: list[str] | None, place: Place) -> list[ConvertStep]:
        """Return the conversions that `of` names; each entry has to name one at least."""
        if of is None:
            return list(self.conversions.values())
        chosen: dict[str, ConvertStep] = {}
        for index, pattern in enumerate(of):
            found = {name: step for name, step in self.conversions.items() if fnmatchcase(name, pattern)}
            if not found:
                raise self.yaml.error(
                    (*place, "of", index), f"no conversion is named {pattern}; there are {', '.join(self.conversions)}"
                )
            chosen |= found
        return list(chosen.values())

    def _at_option(self, place: Place, error: RecipeError) -> RecipeError:
        """Return the error with the place of the option that it begins with."""
        name, _, text = str(error).partition(":")
        for part in ("options", "matrix"):
            if (*place, part, name) in self.yaml.places:
                key = any(words in text for words in ("there is no such option", "sets this option itself"))
                return RecipeError(f"{self.yaml.where((*place, part, name), key=key)}: {name}:{text}")
        return RecipeError(f"{self.yaml.where(place)}: {error}")
