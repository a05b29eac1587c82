"""Batch mode: a file of requests, answered with the engine kept full, into a file that can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferencex.formats.errors import BundleError, OptionError, RequestError
from inferencex.runtime.cli.batch_files import Circumstances, InputLine, OutputFile, read_input, short_digest
from inferencex.runtime.cli.progress import BatchProgress
from inferencex.runtime.cli.requests import encode, parse_request
from inferencex.runtime.outputs import CompletionOutput, RequestOutput
from inferencex.runtime.params import SamplingParams

if TYPE_CHECKING:
    from inferencex.runtime.llm import LLM

# Answers wait in memory until all earlier ones are written; this many times `max_num_seqs` lines at most are
# started before the oldest is done, so that a killed run loses little.
_LINES_AHEAD = 8


@dataclass(frozen=True)
class BatchJob:
    """What to answer, with which bundle, and how; `max_model_len` cuts answers that are given no length."""

    bundle: Path
    input: Path
    output: Path
    params: SamplingParams
    raw: bool = False
    system: str | None = None
    max_model_len: int | None = None

    @cached_property
    def circumstances(self) -> Circumstances:
        """Digests of what the answers depend on beside the line itself, for each record.

        Raises BundleError when the folder holds no bundle.
        """
        from inferencex.formats.bundle.layout import MANIFEST_FILE  # here, for it brings onnx, and help needs none

        manifest = self.bundle / MANIFEST_FILE
        try:
            identity = manifest.read_bytes()
        except OSError as error:
            raise BundleError(
                f"{manifest}: cannot be read ({error.strerror or error}); give the folder of a bundle"
            ) from error
        settings = {
            "sampling": asdict(self.params),
            "raw": self.raw,
            "system": self.system,
            "max_model_len": self.max_model_len,
        }
        written = json.dumps(settings, sort_keys=True).encode()
        return {"bundle_sha256": short_digest(identity), "settings_sha256": short_digest(written)}

    def check(self) -> int:
        """Read the whole input and return its number of lines, before any model is loaded.

        Raises RequestError naming the first line that is malformed (nothing of such a file is run), OptionError
        for something that cannot be read twice.
        """
        if self.input.exists() and not self.input.is_file():
            raise OptionError(f"--input {self.input}: is no regular file; it is read twice, so a pipe will not do")
        total = 0
        for line in read_input(self.input):
            try:
                parse_request(line.record, self.params)
            except RequestError as error:
                raise RequestError(f"{self.input}, line {line.number}: {error}") from error
            total += 1
        if total == 0:
            raise RequestError(f"{self.input}: has no lines to answer")
        return total


def run_batch(
    llm: LLM, job: BatchJob, lines: Iterator[InputLine], written: int, output: OutputFile, progress: BatchProgress
) -> int:
    """Answer `lines`, before which `written` others have their records; return how many could not be answered.

    A line that cannot be served (too long for the context, refused by the chat template) gets a record with
    "error" in place of a text, and the others go on. A KeyboardInterrupt leaves the records of all lines before
    the first unfinished one.
    """
    failed = 0
    ready: dict[int, dict[str, Any]] = {}
    running: dict[str, tuple[int, InputLine]] = {}
    position = written
    limit = llm.engine.options.max_num_seqs
    more = True
    while more or running:
        while more and len(running) < 2 * limit and position - written < _LINES_AHEAD * limit:
            line = next(lines, None)
            if line is None:
                more = False
                break
            try:
                _submit(llm, job, line)
                running[_request_id(line)] = (position, line)
            except RequestError as error:
                ready[position] = {**_heading(job, line), "error": str(error)}
            position += 1
        for request_output in _step(llm):
            place, line = running.pop(request_output.request_id)
            ready[place] = _record(llm, job, line, request_output)
            progress.add_tokens(sum(len(answer.token_ids) for answer in request_output.outputs))
        while written in ready:
            record = ready.pop(written)
            output.write(record)
            failed += "error" in record
            written += 1
            progress.advance()
    return failed


def _request_id(line: InputLine) -> str:
    return f"line-{line.number}"


def _submit(llm: LLM, job: BatchJob, line: InputLine) -> None:
    request = parse_request(line.record, job.params)
    text, ids = encode(llm, request, job.raw, job.system)
    llm.engine.add_request(_request_id(line), ids, request.params, prompt=text, priority=request.priority)


def _step(llm: LLM) -> Iterator[RequestOutput]:
    if llm.engine.has_unfinished:
        for delta in llm.engine.step():
            if delta.output is not None:
                yield delta.output


def _heading(job: BatchJob, line: InputLine) -> dict[str, Any]:
    heading: dict[str, Any] = {"line": line.number, "input_sha256": line.digest, **job.circumstances}
    if "id" in line.record:
        heading["id"] = line.record["id"]
    return heading


def _record(llm: LLM, job: BatchJob, line: InputLine, output: RequestOutput) -> dict[str, Any]:
    if output.error is not None:
        return {**_heading(job, line), "error": str(output.error)}
    answers = [_answer(answer, llm.tokenizer is None) for answer in output.outputs]
    record = {
        **_heading(job, line),
        **answers[0],
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(answer.token_ids) for answer in output.outputs),
    }
    if len(answers) > 1:
        record["choices"] = answers
    return record


def _answer(answer: CompletionOutput, textless: bool) -> dict[str, Any]:
    """Return what is said of one answer; without a tokenizer its token ids are all there is to say."""
    shown: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.stop_reason is not None:
        shown["stop_reason"] = answer.stop_reason
    if answer.logprobs is not None or textless:
        shown["token_ids"] = list(answer.token_ids)
    if answer.logprobs is not None:
        shown["logprobs"] = [_position(position) for position in answer.logprobs]
    return shown


def _position(position: Mapping[int, Any]) -> list[dict[str, Any]]:
    """One token's log-probabilities, the chosen token first."""
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token_id, entry in position.items()
    ]
