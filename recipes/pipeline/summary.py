"""What a run came to: a table for people, JSON for machines, and JUnit for CI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline.evaluations import JUNIT_FILE, RESULTS
from inferencex.recipes.pipeline.log import duration
from inferencex.recipes.pipeline.schedule import StepResult

MARKDOWN_FILE, JSON_FILE = "summary.md", "summary.json"
_MARKS = {"done": "✔", "cached": "✔", "failed gate": "✘", "failed": "✘", "skipped": "–"}


def why(result: StepResult) -> str:
    """Return what there is to say about a step: why it failed, or what it made."""
    facts = {} if result.finished is None else result.finished.outcome.facts
    if result.message:
        return " ".join(result.message.split())
    if facts.get("failures"):
        return "; ".join(facts["failures"])
    told = [f"{name} {value:.4g}" for name, value in facts.get("figures", {}).items()]
    if "to" in facts:
        told.append(f"{facts['to']}")
    if "bytes" in facts:
        told.append(f"{facts['bytes'] / 2**20:.1f} MiB")
    kl = (facts.get("held_out") or facts.get("fidelity") or {}).get("mean_kl")
    if kl is not None:
        told.append(f"mean KL {kl:.3g}")
    return ", ".join(told)


def headline(name: str, results: Sequence[StepResult]) -> str:
    """Return the run in a sentence."""
    bad = [result for result in results if not result.good]
    if not bad:
        fresh = sum(result.state == "done" for result in results)
        return f"{name}: all {len(results)} steps are done ({fresh} now, {len(results) - fresh} before)"
    gates = [result.step.id for result in bad if result.state == "failed gate"]
    failed = [result.step.id for result in bad if result.state == "failed"]
    parts = [f"did not pass: {', '.join(gates)}"] if gates else []
    parts += [f"failed: {', '.join(failed)}"] if failed else []
    skipped = len(bad) - len(gates) - len(failed)
    return f"{name}: " + "; ".join(parts) + (f"; {skipped} steps were not begun because of that" if skipped else "")


def rows(results: Sequence[StepResult]) -> list[tuple[str, str, str, str]]:
    """Return step, state, time and remarks for each step."""
    return [
        (
            result.step.id,
            f"{_MARKS[result.state]} {result.state}",
            duration(result.seconds) if result.seconds else "",
            why(result),
        )
        for result in results
    ]


def markdown(name: str, results: Sequence[StepResult]) -> str:
    """Return the table as Markdown."""
    lines = [f"# {headline(name, results)}", "", "| step | | time | |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows(results)]
    return "\n".join(lines) + "\n"


def write_reports(folder: Path, name: str, results: Sequence[StepResult]) -> None:
    """Write summary.md, summary.json and junit.xml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKDOWN_FILE).write_text(markdown(name, results), encoding="utf-8")
    document = {
        "pipeline": name,
        "passed": all(result.good for result in results),
        "steps": [
            {
                "step": result.step.id,
                "state": result.state,
                "seconds": round(result.seconds, 3),
                "message": result.message,
                "folder": None if result.finished is None else str(result.finished.folder),
                "digest": None if result.finished is None else result.finished.outcome.digest,
                "facts": {} if result.finished is None else result.finished.outcome.facts,
            }
            for result in results
        ],
    }
    (folder / JSON_FILE).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    ElementTree.ElementTree(junit(name, results)).write(folder / JUNIT_FILE, encoding="utf-8", xml_declaration=True)


def junit(name: str, results: Sequence[StepResult]) -> ElementTree.Element:
    """Return the steps as a test suite, followed by the suites of the evaluations."""
    root = ElementTree.Element("testsuites", name=name)
    counts = {
        "tests": len(results),
        "failures": sum(result.state == "failed gate" for result in results),
        "errors": sum(result.state == "failed" for result in results),
        "skipped": sum(result.state == "skipped" for result in results),
    }
    attributes = {"name": name, **{key: str(value) for key, value in counts.items()}}
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{name}.{result.step.kind}", name=result.step.name,
            time=f"{result.seconds:.3f}",
        )  # fmt: skip
        kind = {"failed gate": "failure", "failed": "error", "skipped": "skipped"}.get(result.state)
        if kind is not None:
            ElementTree.SubElement(case, kind, message=why(result)).text = why(result)
    for result in results:
        path = None if result.finished is None else result.finished.folder / RESULTS / JUNIT_FILE
        if path is not None and path.is_file():
            try:
                found = ElementTree.parse(path).getroot()
            except ElementTree.ParseError as error:
                raise RecipeError(f"{path}: is not XML: {error}") from error
            for part in [found] if found.tag == "testsuite" else list(found):
                part.set("name", f"{result.step.name}: {part.get('name', '')}")
                root.append(part)
    return root
