"""Tasks on local files: the scores of lm-eval's own `hf` model, and what is wrong with files said where it is."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")

from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation import tasks
from inferencex.recipes.evaluation.generation import sampling_params
from inferencex.recipes.evaluation.local_docs import read_docs
from inferencex.recipes.evaluation.progress import Unwatched
from inferencex.recipes.evaluation.recipe import EvaluationRecipe, TaskOptions, load_recipe
from inferencex.recipes.evaluation.run import load
from inferencex.recipes.evaluation.task_files import definitions, find_definition
from tests.recipes.evaluation import questions


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> EvaluationRecipe:
    folder = tmp_path_factory.mktemp("recipe")
    questions.write_all(folder)
    (folder / "recipe.yaml").write_text("engine: {threads: 1}\n" + questions.TASKS)
    return load_recipe(folder / "recipe.yaml")


def _hf_scores(checkpoint: Path, recipe: EvaluationRecipe) -> dict[str, dict[str, Any]]:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    with tasks._quiet_lm_eval(), tempfile.TemporaryDirectory() as folder:
        loaded = tasks._load(recipe, Path(folder))
        model = HFLM(str(checkpoint), device="cpu", dtype="float32", max_length=62, batch_size=1)
        found = evaluate(lm=model, task_dict=loaded.as_dict, log_samples=False)
    assert found is not None
    return {name: dict(values) for name, values in found["results"].items()}


def test_scores_are_those_of_the_hf_model(bundle: Path, checkpoint: Path, recipe: EvaluationRecipe) -> None:
    with load(bundle, recipe.engine) as llm:
        run = tasks.run_tasks(llm, recipe, None, Unwatched())
    wanted = _hf_scores(checkpoint, recipe)
    assert [score.task for score in run.scores] == ["arc_easy", "piqa", "lambada_openai", "gsm8k"]
    for score in run.scores:
        for name, value in score.metrics.items():
            metric, _, kind = name.partition(",")
            assert value == pytest.approx(wanted[score.task][f"{metric},{kind or 'none'}"], rel=1e-4), name
    assert [score.samples for score in run.scores] == [4, 3, 2, 3]
    assert [score.metric for score in run.scores] == ["acc", "acc", "acc", "exact_match,flexible-extract"]
    assert run.scores[0].stderr is not None and run.scores[3].num_fewshot == 1
    assert {"acc", "acc_norm"} <= set(run.scores[0].metrics) and "perplexity" in run.scores[2].metrics


def test_limits_and_chats(none_bundle: Path, recipe: EvaluationRecipe) -> None:
    chat = recipe.model_copy(
        update={"chat_template": True, "system_prompt": "be", "tasks": {"piqa": recipe.tasks["piqa"]}}
    )
    with load(none_bundle, recipe.engine) as llm:
        run = tasks.run_tasks(llm, chat, 2, Unwatched())
    assert [score.samples for score in run.scores] == [2]


@pytest.mark.parametrize(
    ("task", "file"),
    [
        ("arc_easy", "arc/arc_easy.yaml"),
        ("winogrande", "winogrande/default.yaml"),
        ("mmlu_anatomy", "mmlu/default/mmlu_anatomy.yaml"),
    ],
)
def test_definitions_are_found(task: str, file: str) -> None:
    assert find_definition(task, definitions()) == definitions() / file


def test_templates_are_those_of_the_hub_s_data(tmp_path: Path) -> None:
    """What our form of a question gives the template is what the dataset's row gives it."""
    folder = tmp_path
    [row] = read_docs("arc_easy", questions.lines(folder / "a.jsonl", questions.ARC[:1]))
    assert row == {
        "question": "which way is up?",
        "choices": {"text": ["that way", "the dog", "so on", "a cat"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    }
    assert read_docs("arc_easy", questions.lines(folder / "b.jsonl", [row])) == [row]
    other = [{"anything": 1}]
    assert read_docs("some_task", questions.lines(folder / "c.jsonl", other)) == other


def test_shared_benchmarks_are_read(shared_data: Path) -> None:
    folder = shared_data / "benchmarks"
    assert len(read_docs("arc_easy", folder / "arc_easy.jsonl")) > 2000
    piqa = read_docs("piqa", folder / "piqa_valid.jsonl", folder / "piqa_valid-labels.lst")
    assert len(piqa) > 1800 and {row["label"] for row in piqa} == {0, 1}
    assert len(read_docs("lambada_openai", folder / "lambada_test.jsonl")) > 5000
    assert len(read_docs("gsm8k", folder / "gsm8k_test.jsonl")) == 1319


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"query": "a", "choices": ["b"], "gold": 0}\n{"query": \n', r"q.jsonl:2: is not JSON"),
        ("[1]", r"q.jsonl:1: is a int; expected an object"),
        ("", "holds no questions"),
        ('{"query": "a", "choices": ["b"], "gold": 4}', "question 1 has the fields query, choices, gold"),
        ('{"text": "a"}', "'question' is missing or wrong"),
    ],
)
def test_defects_of_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_docs("arc_easy", tmp_path / "q.jsonl")


def test_defects_of_labels_are_named(tmp_path: Path) -> None:
    questions.write_all(tmp_path)
    (tmp_path / "labels").write_text("0\n1\n")
    with pytest.raises(RecipeError, match="has 2 labels for the 3 questions"):
        read_docs("piqa", tmp_path / "piqa.jsonl", tmp_path / "labels")
    (tmp_path / "labels").write_text("0\n1\nx\n")
    with pytest.raises(RecipeError, match="labels:3: the label is 'x'"):
        read_docs("piqa", tmp_path / "piqa.jsonl", tmp_path / "labels")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_docs("piqa", tmp_path / "absent.jsonl")


def test_a_metric_that_is_not_there(none_bundle: Path, recipe: EvaluationRecipe) -> None:
    piqa = recipe.task("piqa").model_copy(update={"metric": "f1"})
    with (
        load(none_bundle, recipe.engine) as llm,
        pytest.raises(RecipeError, match=r"tasks\.piqa\.metric: lm-eval gives acc, acc_norm, not f1"),
    ):
        tasks.run_tasks(llm, recipe.model_copy(update={"tasks": {"piqa": piqa}}), None, Unwatched())


def test_a_task_without_its_data_says_what_to_do(none_bundle: Path, recipe: EvaluationRecipe) -> None:
    with (
        load(none_bundle, recipe.engine) as llm,
        pytest.raises(RecipeError, match=r"tasks\.piqa: cannot be loaded: .*give path for questions from a file"),
    ):
        tasks.run_tasks(llm, recipe.model_copy(update={"tasks": {"piqa": None}}), None, Unwatched())


def test_generation_is_for_tasks_that_generate(recipe: EvaluationRecipe, tmp_path: Path) -> None:
    options = recipe.task("piqa").model_copy(update={"generation": {"max_gen_toks": 8}})
    with pytest.raises(RecipeError, match=r"tasks\.piqa\.generation: the task generates nothing"):
        tasks._load(recipe.model_copy(update={"tasks": {"piqa": options}}), tmp_path)


def test_the_recipe_s_length_goes_before_the_task_s_by_whatever_name() -> None:
    class Task:
        def __init__(self) -> None:
            self.kwargs: dict[str, Any] = {"max_gen_toks": 1280, "until": ["x"]}

        def get_config(self, key: str) -> Any:
            return {"output_type": "generate_until", "generation_kwargs": self.kwargs}.get(key)

        def set_config(self, key: str, value: Any, update: bool = False) -> None:
            if key == "generation_kwargs":
                self.kwargs = {**self.kwargs, **value}

        def set_fewshot_seed(self, seed: int) -> None:
            pass

    task = Task()
    tasks._set_up(task, TaskOptions(generation={"max_new_tokens": 64}), 0)
    assert sampling_params(task.kwargs, 256, 0)[0].max_tokens == 64


def test_a_tag_has_no_score(none_bundle: Path, recipe: EvaluationRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything runs. (What lm-eval loads is made up here: its real index takes long to build.)"""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(
        TaskManager, "load", lambda self, names: {"tasks": {"arc_easy": None, "arc_challenge": None}, "groups": {}}
    )
    asked = recipe.model_copy(update={"tasks": {"piqa": recipe.tasks["piqa"]}})
    with (
        load(none_bundle, recipe.engine) as llm,
        pytest.raises(RecipeError, match=r"tasks\.piqa: is a tag, .* name its tasks: arc_easy, arc_challenge"),
    ):
        tasks.run_tasks(llm, asked, None, Unwatched())
