"""What an answer's first token does not wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import BundleError, OptionError, RequestError
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.aside import Aside, Once
from inferencex.runtime.backends.base import BackendOptions

HEAVY = (
    "jinja2",
    "onnx",
    "onnx_ir",
    "ml_dtypes",
    "numpy.random",
    "importlib.metadata",
    "concurrent.futures",
    "hashlib",
    "inferencex.runtime.parallel.backend",
    "inferencex.runtime.server",
)


def test_the_cpu_backend_runs_a_bundle_without_what_it_has_no_use_for(tiny_bundle: Path) -> None:
    script = f"""
import dataclasses, gc, importlib.abc, os, sys

class Noting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            print("idle BLAS threads:", os.environ.get("OPENBLAS_THREAD_TIMEOUT"))
sys.meta_path.insert(0, Noting())

made, dataclass = [], dataclasses.dataclass
def noting(cls=None, /, **options):
    if cls is None:
        return lambda cls: noting(cls, **options)
    made.append(cls.__module__ + "." + cls.__qualname__)
    return dataclass(cls, **options)
dataclasses.dataclass = noting  # it takes six times as long as a record, which is one once its fields are asked for

collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
from inferencex.runtime import LLM, SamplingParams
assert gc.isenabled() and len(collections) < 10, len(collections)  # numpy alone makes for a hundred

(result,) = LLM(sys.argv[1], backend="cpu", threads=1).generate([[3, 5]], SamplingParams(temperature=0.0, max_tokens=2))
print(len(result.outputs[0].token_ids), [name for name in {HEAVY!r} if name in sys.modules])
print([name for name in made if name.startswith("inferencex.") and name != "inferencex.runtime.params.SamplingParams"])
import onnx
from inferencex.formats import onnx_messages
assert onnx.ModelProto is onnx_messages.ModelProto and onnx.load
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    lines = ["idle BLAS threads: 4", "2 []", "[]"]
    assert done.stdout.splitlines() == lines and not done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.architectures.comparison import write_bundle
    from tests.architectures.zoo import tiny_config, tiny_model

    return write_bundle(tiny_model("llama"), tiny_config("llama"), tmp_path_factory.mktemp("tiny"), "rtn-int4")


def test_the_tokenizer_can_be_left_alone(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend, load_tokenizer=False)
    assert llm.tokenizer is None
    (result,) = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4))
    assert list(result.outputs[0].token_ids) == hash_backend.model.greedy([5, 6, 7], 4) and not result.outputs[0].text
    with pytest.raises(RequestError, match="token ids"):
        llm.generate("text", SamplingParams(max_tokens=4))
    with pytest.raises(OptionError, match="load_tokenizer='no'"):
        LLM(text_bundle, backend=hash_backend, load_tokenizer="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("calls", [True, False])
def test_the_tokenizer_is_loaded_once_whether_or_not_the_backend_has_time_for_it(
    text_bundle: Path, hash_backend: Any, calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inferencex.runtime import llm as module

    loads: list[Path] = []
    load, compile_ = module._load_tokenizer, hash_backend.compile

    def counting(folder: Path) -> Any:
        loads.append(folder)
        return load(folder)

    def compiled(bundle: Path, options: BackendOptions) -> Any:
        if calls and options.meanwhile is not None:
            options.meanwhile()
        return compile_(bundle, options)

    monkeypatch.setattr(module, "_load_tokenizer", counting)
    monkeypatch.setattr(hash_backend, "compile", compiled)
    assert LLM(text_bundle, backend=hash_backend).tokenizer is not None
    assert loads == [text_bundle]


def test_work_aside_runs_on_a_thread_and_hands_over_what_it_ends_with() -> None:
    thread = Aside(threading.current_thread)
    assert thread.result() is not threading.current_thread() and thread.result() is thread.result()
    failing = Aside(lambda: int("x"))
    failing.wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="'x'"):
            failing.result()


def test_work_done_once_is_tried_again_when_it_failed() -> None:
    results = iter([BundleError("not yet"), 7])

    def work() -> int:
        found = next(results)
        if isinstance(found, BundleError):
            raise found
        return found

    once = Once(work)
    with pytest.raises(BundleError):
        once.result()
    assert (once.result(), once.result()) == (7, 7)
