"""What an evaluation recipe may say, as models that a JSON Schema is made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inferencex.recipes.yaml_source import YamlSource, read_yaml

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]


class Model(BaseModel):
    """All parts of a recipe: fields that are not known are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineOptions(Model):
    """How bundles are run; what is left out is as `inferencex run` does it."""

    backend: str = Field(default="auto", description="Backend that runs the bundles.")
    threads: Positive | None = Field(default=None, description="Threads to compute with; left out: one for each core.")
    activation_dtype: Literal["auto", "int8", "float32"] = Field(
        default="auto", description="How linears with INT4 and INT8 weights read activations."
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = Field(
        default="auto", description="How keys and values are kept."
    )
    max_model_len: Positive | None = Field(
        default=None, description="Longest context; left out: what the model was made for."
    )
    max_num_seqs: Positive = Field(default=64, description="Most sequences in progress at once.")
    max_num_batched_tokens: Positive = Field(default=1024, description="Most tokens computed in one step.")
    kv_cache_memory: Positive | None = Field(default=None, description="Bytes for keys and values.")


class TextMeasure(Model):
    """Consecutive windows of a text, each read on its own."""

    text: str = Field(
        default="builtin",
        description="builtin (English that ships with Python), a UTF-8 file, or NAME[:CONFIG[:SPLIT]] on the hub.",
    )
    column: str = Field(default="text", description="Column of a dataset that holds the text.")
    windows: Positive = Field(default=16, description="Most windows of the text.")
    length: int = Field(default=512, ge=2, description="Tokens of a window.")


class TaskOptions(Model):
    """A task of lm-eval, with its data from the hub or from a file."""

    path: Path | None = Field(default=None, description="JSON Lines with the questions; left out: the hub's dataset.")
    labels: Path | None = Field(default=None, description="One label a line for the questions in `path` (PIQA).")
    fewshot_path: Path | None = Field(
        default=None, description="JSON Lines with examples; left out: other questions of path."
    )
    num_fewshot: int | None = Field(
        default=None, ge=0, description="Examples in front of each question; left out: the task's."
    )
    limit: Positive | None = Field(default=None, description="Most questions, the first ones; left out: all.")
    metric: str | None = Field(
        default=None,
        description="The score that counts: acc_norm, or exact_match,flexible-extract with the name of a filter.",
    )
    generation: dict[str, Any] = Field(
        default_factory=dict, description="Overrides the task's generation_kwargs: max_gen_toks, temperature, until."
    )

    @model_validator(mode="after")
    def _belongs_to_a_file(self) -> Self:
        if self.path is None and (self.labels is not None or self.fewshot_path is not None):
            raise ValueError("labels and fewshot_path are for questions from a file; give path too")
        return self


class Thresholds(Model):
    """What must hold, or the evaluation fails."""

    max_kl: NotNegative | None = Field(
        default=None, description="Mean KL divergence from the baseline, nats per token."
    )
    max_p99_kl: NotNegative | None = Field(default=None, description="99th percentile of the KL divergence of a token.")
    min_same_top1: Share | None = Field(
        default=None, description="Share of positions with the baseline's most likely token."
    )
    max_perplexity: Annotated[float, Field(ge=1.0)] | None = Field(default=None, description="Perplexity of the text.")
    max_relative_perplexity: NotNegative | None = Field(default=None, description="Perplexity by that of the baseline.")
    min_relative_accuracy: NotNegative | None = Field(
        default=None,
        description="Score of every task by that of the baseline, such as 0.99; where less is better, the other way "
        "round.",
    )
    min_score: dict[str, float] = Field(default_factory=dict, description="Lowest score by name of the task.")


class EvaluationRecipe(Model):
    """What is measured of a bundle, and what must hold."""

    name: str = Field(default="evaluation", description="What reports call this recipe.")
    description: str = Field(default="", description="When to use it.")
    baseline: str | None = Field(
        default=None,
        description="What to compare with: a bundle, or a checkpoint that is converted without quantization.",
    )
    engine: EngineOptions = Field(default_factory=EngineOptions)
    perplexity: TextMeasure | None = Field(default=None, description="Perplexity of a text.")
    fidelity: TextMeasure | None = Field(
        default=None, description="How far the predictions on a text are from those of the baseline."
    )
    tasks: dict[str, TaskOptions | None] = Field(default_factory=dict, description="Tasks of lm-eval, by name.")
    chat_template: bool = Field(default=False, description="Put the questions of tasks as a user would in a chat.")
    system_prompt: str | None = Field(default=None, description="What chats begin with.")
    fewshot_as_multiturn: bool = Field(default=True, description="With a chat template, examples are earlier turns.")
    seed: int = Field(default=1234, description="Chooses examples, and answers where a task asks for chance.")
    thresholds: Thresholds = Field(default_factory=Thresholds)

    def task(self, name: str) -> TaskOptions:
        """Return a task's options; one without any has the defaults."""
        return self.tasks[name] or TaskOptions()


def load_recipe(path: Path, settings: tuple[str, ...] = ()) -> EvaluationRecipe:
    """Read a recipe from a file, with `key=value` settings put in; see `recipe_of`."""
    return recipe_of(read_yaml(path).with_values(settings), path.parent)


def recipe_of(source: YamlSource, folder: Path) -> EvaluationRecipe:
    """Return a recipe from a document; relative paths in it are seen from `folder`.

    Raises RecipeError, with line and column, for what is not known, out of range, or asks for something that the
    recipe does not measure.
    """
    recipe = source.validate(EvaluationRecipe)
    if recipe.perplexity is None and recipe.fidelity is None and not recipe.tasks:
        raise source.error((), "measures nothing; give perplexity, fidelity or tasks")
    limits = recipe.thresholds
    needs = {
        "fidelity": ("max_kl", "max_p99_kl", "min_same_top1"),
        "perplexity or fidelity": ("max_perplexity", "max_relative_perplexity"),
        "tasks": ("min_relative_accuracy",),
    }
    has = {
        "fidelity": recipe.fidelity is not None,
        "perplexity or fidelity": recipe.perplexity is not None or recipe.fidelity is not None,
        "tasks": bool(recipe.tasks),
    }
    for section, names in needs.items():
        for name in names:
            if getattr(limits, name) is not None and not has[section]:
                raise source.error(("thresholds", name), f"{name} is about {section}, which the recipe does not have")
    for name in limits.min_score:
        if name not in recipe.tasks:
            known = ", ".join(recipe.tasks) or "none"
            raise source.error(("thresholds", "min_score", name), f"there is no task {name}; the recipe has {known}")
    return _with_paths(recipe, folder)


def digest(recipe: EvaluationRecipe) -> str:
    """Return the SHA-256 of what a recipe asks: how it is written, run and judged, and where files are, is no part."""
    document = recipe.model_dump(mode="json", exclude={"name", "description", "baseline", "engine", "thresholds"})
    for part in (document["perplexity"], document["fidelity"], *document["tasks"].values()):
        for name in ("text", "path", "labels", "fewshot_path"):
            if part and part.get(name):
                part[name] = Path(part[name]).name
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def schema() -> Mapping[str, Any]:
    """Return the JSON Schema of recipes."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **EvaluationRecipe.model_json_schema()}


def _with_paths(recipe: EvaluationRecipe, folder: Path) -> EvaluationRecipe:
    """Return the recipe with its paths seen from the current folder."""

    def text(measure: TextMeasure | None) -> TextMeasure | None:
        if measure is None or not (folder / measure.text).is_file():
            return measure
        return measure.model_copy(update={"text": str(folder / measure.text)})

    def files(options: TaskOptions | None) -> TaskOptions | None:
        if options is None:
            return None
        given = {name: getattr(options, name) for name in ("path", "labels", "fewshot_path")}
        return options.model_copy(update={name: folder / path for name, path in given.items() if path is not None})

    baseline = recipe.baseline
    if baseline is not None and (folder / baseline).exists():
        baseline = str(folder / baseline)
    return recipe.model_copy(
        update={
            "baseline": baseline,
            "perplexity": text(recipe.perplexity),
            "fidelity": text(recipe.fidelity),
            "tasks": {name: files(options) for name, options in recipe.tasks.items()},
        }
    )
