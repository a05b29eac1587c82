"""Stand-ins for our commands that take milliseconds: they write what the real ones write, count themselves, and die.

Environment: COUNTS is a file that gets a line for each command that begins; DIE is a point, such as `convert:half`, at
which the pipeline is killed together with the command.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

POINTS = ("half", "whole")


def main() -> None:
    command, *arguments = sys.argv[1:]
    with Path(os.environ["COUNTS"]).open("a", encoding="utf-8") as counts:
        counts.write(f"{command}\n")
    options = dict(
        argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
    )
    {"convert": convert, "eval": evaluate, "export": export}[command](arguments, options)


def die_at(point: str) -> None:
    if os.environ.get("DIE") == point:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()  # the parent's death is this one's as well


def convert(arguments: list[str], options: dict[str, str]) -> None:
    if options["quantization"] == "int8-dynamic":
        print("error: this one cannot be converted", file=sys.stderr)
        sys.exit(1)
    bundle = Path(options["output"])
    staged = bundle.with_name(".staged")
    staged.mkdir(exist_ok=True)
    weights = hashlib.sha256(options["quantization"].encode()).digest() * 100
    (staged / "weights.bin").write_bytes(weights)
    die_at("convert:half")
    record = {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    (staged / "bundle.json").write_text(json.dumps({"files": {"weights.bin": record}}), encoding="utf-8")
    fidelity = {"mean_kl": 0.01, "bundle_perplexity": 9.0}
    report = {"bundle_bytes": len(weights), "source_bytes": 9000, "seconds": time.time(), "fidelity": fidelity}
    (staged / "report.json").write_text(json.dumps(report), encoding="utf-8")
    staged.rename(bundle)
    die_at("convert:whole")


def evaluate(arguments: list[str], options: dict[str, str]) -> None:
    from inferencex.recipes.evaluation.results import Check, Evaluation

    good = (Path(arguments[0]) / "weights.bin").read_bytes()[:1] != hashlib.sha256(b"rtn-int3").digest()[:1]
    check = Check("max_kl", 0.01 if good else 0.5, "at most", 0.02, good)
    output = Path(options["output"])
    output.mkdir()
    die_at("eval:half")
    Evaluation("stand-in", "0" * 64, arguments[0], 1, seconds=time.time(), checks=(check,)).write(output)
    (output / "junit.xml").write_text('<testsuites><testsuite name="stand-in" tests="1"><testcase name="max_kl"/>'
                                      "</testsuite></testsuites>", encoding="utf-8")  # fmt: skip
    die_at("eval:whole")
    sys.exit(0 if good else 1)


def export(arguments: list[str], options: dict[str, str]) -> None:
    output = Path(options["output"])
    output.write_bytes(b"half")
    die_at("export:half")
    output.write_bytes((Path(arguments[0]) / "weights.bin").read_bytes())
    die_at("export:whole")
