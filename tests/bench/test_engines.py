"""Every adapter keeps the contract; ours also on a real bundle."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engines import NAMES, OURS, find_engine
from bench.engines.base import Capacity
from bench.engines.ours import BACKEND
from bench.run import ROOT, WorkerError, Workers
from bench.sampling import Patience
from bench.worker import Job, decode_rate, prefill_rate
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from tests.smollm2 import Quiet


@pytest.mark.parametrize("name", NAMES)
def test_adapters_are_found_by_name_without_their_packages(name: str) -> None:
    package = {OURS: "inferencex.runtime", "llama.cpp": "llama_cpp"}.get(name, name.replace("-", "_"))
    engine = find_engine(name)
    assert engine.name == name
    assert engine.precision and engine.settings
    script = f"import sys, bench.engines as e; e.find_engine({name!r}); assert {package!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def bundle(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "bundle"
    convert(ConvertOptions(str(shared_data / "stories260k"), path, parse_scheme("rtn-int8"), verify=False), Quiet())
    return path


def test_our_adapter_continues_every_prompt_anew(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND, "reference")
    session = find_engine(OURS).load(bundle, Capacity(threads=1, max_sequences=3, max_length=48, max_tokens=96))
    prompts = [list(range(3, 3 + 20 + place)) for place in range(3)]
    steps = list(session.generate(prompts, 8))
    assert steps[-1] == (8, 8, 8)
    assert all(before[i] <= after[i] for before, after in itertools.pairwise(steps) for i in range(3))
    assert prefill_rate(session, prompts[0]) > 0
    assert decode_rate(session, prompts, 8) > 0


def test_a_worker_reports_its_version(tmp_path: Path) -> None:
    about = Workers(threads=1, patience=Patience(1, 1.0), logs=tmp_path).probe(OURS)
    assert about.version.startswith("inferencex ")


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    workers = Workers(threads=1, patience=Patience(1, 1.0), logs=tmp_path)
    ids = tmp_path / "ids.json"
    ids.write_text("[5, 6, 7, 8]")
    job = Job((), Capacity(1, 1, 8, 8), str(ids), 1, 1.0, 0.0)
    with pytest.raises(WorkerError, match=r"nowhere.*status 1"):
        workers.call("first-token", OURS, tmp_path / "nowhere", job.dump())
