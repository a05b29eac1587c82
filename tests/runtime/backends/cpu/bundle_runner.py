"""Compile bundles and run steps in a process of its own, where that may crash or hang.

As a program it reads one JSON request a line and answers with one line: what became of the bundle.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

MEMORY_LIMIT = 6 << 30
"""Bytes of address space: what asks for more gets an error, not the machine's last memory."""

_ROOT = Path(__file__).parents[4]
_ANSWER = "answer: "
_TOKENS, _BLOCKS, _BLOCK_SIZE, _SEQUENCES = 12, 8, 4, 2


@dataclass(frozen=True)
class Outcome:
    """What became of a bundle: it `ran`, was `refused` with an error of the project, raised another `error`, or
    `crashed` the process; `text` says how."""

    what: str
    text: str = ""


class BundleRunner:
    """The process; started when needed, and again after a crash."""

    def __init__(self, patience: float = 120.0) -> None:
        """`patience`: seconds after which a bundle that still runs counts as one that hangs."""
        self._patience = patience
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def run(self, bundle: Path, *, spoil: int | None = None, **options: Any) -> Outcome:
        """Compile the bundle with these `BackendOptions`, and run a few steps.

        spoil: seed of a change to the lowered program, see `spoilt_programs`; None: as it was lowered
        """
        if self._process is None:
            command = [sys.executable, "-m", "tests.runtime.backends.cpu.bundle_runner"]
            self._process = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"bundle": str(bundle), "options": options, "spoil": spoil}) + "\n")
        process.stdin.flush()
        alarm = threading.Timer(self._patience, process.kill)
        alarm.start()
        answer = _answer(process.stdout)
        alarm.cancel()
        if answer is not None:
            return Outcome(**json.loads(answer))
        self._process = None
        _, errors = process.communicate()
        number = -process.returncode
        name = signal.Signals(number).name if number > 0 else f"exit code {process.returncode}"
        hint = f", perhaps because {self._patience} seconds had passed" if name == "SIGKILL" else ""
        return Outcome("crashed", f"{name}{hint}\n{errors[-6000:]}")


def _answer(lines: IO[str]) -> str | None:
    for line in lines:
        if line.startswith(_ANSWER):
            return line.removeprefix(_ANSWER)
    return None


def _attempt(bundle: Path, options: dict[str, Any], spoil: int | None) -> Outcome:
    from inferencex.formats.errors import InferenceXError

    changes: list[str] = []
    try:
        _run(bundle, options, spoil, changes)
    except InferenceXError as error:
        return Outcome("refused", str(error))
    except Exception:  # whatever it is, the test shows it
        return Outcome("error", "\n".join([*changes, traceback.format_exc()]))
    return Outcome("ran")


def _run(bundle: Path, options: dict[str, Any], spoil: int | None, changes: list[str]) -> None:
    """Run a prompt, then that sequence beside a new one, then both one token further."""
    from inferencex.formats.bundle import Bundle
    from inferencex.runtime.backends.base import BackendOptions
    from inferencex.runtime.backends.cpu.backend import compile_bundle, lower_bundle
    from inferencex.runtime.backends.cpu.executable import CpuExecutable, begin_program
    from tests.runtime.backends.cpu.spoilt_programs import spoilt

    all_options = BackendOptions(
        num_blocks=_BLOCKS, block_size=_BLOCK_SIZE, max_num_seqs=_SEQUENCES, max_num_batched_tokens=_TOKENS, **options
    )
    if spoil is None:
        executable = compile_bundle(Bundle.open(bundle), all_options)
    else:
        lowered = lower_bundle(Bundle.open(bundle), all_options)
        program, change = spoilt(lowered.program, spoil)
        changes.append(change)
        print(change, file=sys.stderr, flush=True)  # for a crash, which says nothing itself
        begun = begin_program(options.get("threads", 1), [])
        executable = CpuExecutable(begun, program, lowered.options, lowered.facts)
    limit = executable.facts.max_model_len
    for step in ([(0, 0, 5)], [(0, 5, 6), (1, 0, 9)], [(0, 6, 7), (1, 9, 10)]):
        chunks = [(sequence, first, last) for sequence, first, last in step if last <= limit]
        if chunks:
            batch = _batch(chunks)
            logits = executable.step(batch)
            expected = (len(batch.logit_rows), executable.facts.vocab_size)
            assert logits.shape == expected, f"logits are {logits.shape}, expected {expected}"
            assert logits.sum() is not None, "every element can be read"


def _batch(chunks: list[tuple[int, int, int]]) -> Any:
    import numpy as np

    from inferencex.runtime.backends.base import StepBatch

    counts = [last - first for _, first, last in chunks]
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    return StepBatch(
        token_ids=np.arange(sum(counts), dtype=np.int32) * 7,
        positions=np.array([p for _, first, last in chunks for p in range(first, last)], np.int32),
        sequence_offsets=offsets,
        context_lengths=np.array([last for _, _, last in chunks], np.int32),
        block_tables=np.array([[sequence, sequence + 2, sequence + 4] for sequence, _, _ in chunks], np.int32),
        logit_rows=offsets[1:] - 1,
        prompt_lengths=np.array([5 + 4 * sequence for sequence, a, b in chunks for _ in range(a, b)], np.int32),
    )


def main() -> None:
    """Answer requests until there are no more."""
    if "INFERENCEX_NATIVE_BUILD" in os.environ:  # the build under test, here as in the tests' own process
        import tests.native.other_build  # noqa: F401
    if "ASAN_OPTIONS" not in os.environ:  # a sanitizer's shadow takes more addresses than any limit would leave
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in sys.stdin:
        request = json.loads(line)
        outcome = _attempt(Path(request["bundle"]), request["options"], request["spoil"])
        print(_ANSWER + json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
