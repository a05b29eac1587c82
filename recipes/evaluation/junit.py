"""An evaluation as JUnit XML, which CI services show: a test case for each threshold and each task."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from inferencex.recipes.evaluation.results import Check, Evaluation
from inferencex.recipes.evaluation.tasks import TaskScore

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(evaluation: Evaluation) -> str:
    """Return the XML. A task is a case that passes, with its scores as output; a threshold is one that may fail."""
    failures = sum(not check.passed for check in evaluation.checks)
    counts = {"tests": str(len(evaluation.checks) + len(evaluation.tasks)), "failures": str(failures), "errors": "0"}
    seconds = f"{evaluation.seconds or 0.0:.3f}"
    root = ElementTree.Element("testsuites", {"name": "inferencex eval", "time": seconds, **counts})
    name = _text(f"{evaluation.recipe}: {evaluation.bundle}")
    suite = ElementTree.SubElement(root, "testsuite", {"name": name, "time": seconds, "skipped": "0", **counts})
    for task in evaluation.tasks:
        _task(suite, task, evaluation.recipe)
    for check in evaluation.checks:
        _check(suite, check, evaluation.recipe)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _task(suite: ElementTree.Element, task: TaskScore, recipe: str) -> None:
    case = _case(suite, f"task.{task.task}", recipe)
    scores = [f"{name} {value:.6g}" for name, value in task.metrics.items()]
    ElementTree.SubElement(case, "system-out").text = f"{task.samples} questions: {', '.join(scores)}"


def _check(suite: ElementTree.Element, check: Check, recipe: str) -> None:
    case = _case(suite, f"threshold.{check.name}", recipe)
    if check.passed:
        ElementTree.SubElement(case, "system-out").text = _text(str(check))
    else:
        ElementTree.SubElement(case, "failure", {"message": _text(str(check)), "type": "threshold"})


def _case(suite: ElementTree.Element, name: str, recipe: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", {"name": _text(name), "classname": _text(recipe), "time": "0.000"})


def _text(text: str) -> str:
    return _NOT_XML.sub("?", text)
