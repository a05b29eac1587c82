"""Answers on standard output: streamed, and without the control characters that could drive a terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from inferencex.runtime.cli.requests import RunRequest, encode
from inferencex.runtime.outputs import CompletionDelta, RequestOutput

if TYPE_CHECKING:
    from inferencex.runtime.llm import LLM

# Shown as their pictures: a model's text must not move the cursor, set the title or fill the clipboard.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: "\u2421"} | {code: "\ufffd" for code in range(0x80, 0xA0)}


def write(text: str) -> None:
    """Write a piece of an answer to standard output, at once."""
    sys.stdout.write(text.translate(_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Within this, Ctrl-C only makes the function given return true, so that no step is torn apart.

    A second Ctrl-C, while the first has not been looked at, raises KeyboardInterrupt.
    """
    presses = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)


def stream_text(deltas: Iterator[CompletionDelta], stopped: Callable[[], bool]) -> tuple[str, bool]:
    """Write an answer as it comes, up to its end or until `stopped`; return the text and whether it was stopped."""
    pieces: list[str] = []
    interrupted = False
    try:
        for delta in deltas:
            pieces.append(delta.text)
            write(delta.text)
            if stopped():
                interrupted = True
                break
    finally:
        if isinstance(deltas, Generator):
            deltas.close()  # aborts the request if it has not ended
    text = "".join(pieces)
    if not text.endswith("\n"):
        write("\n")
    return text, interrupted


def stream(llm: LLM, request: RunRequest, raw: bool, system: str | None) -> Iterator[CompletionDelta]:
    """Start answering one request."""
    return llm.stream(encode(llm, request, raw, system)[1], request.params)


def answer_prompts(llm: LLM, requests: list[RunRequest], raw: bool, system: str | None) -> None:
    """Answer prompts on standard output: a single one as it comes, several together and apart by a blank line.

    Ctrl-C raises KeyboardInterrupt once the step in progress is done.
    """
    if len(requests) == 1 and requests[0].params.n == 1:
        with stoppable() as stopped:
            _, interrupted = stream_text(stream(llm, requests[0], raw, system), stopped)
        if interrupted:
            raise KeyboardInterrupt
        return
    prompts = [encode(llm, request, raw, system)[1] for request in requests]
    write("\n".join(_texts(llm.generate(prompts, [request.params for request in requests]))))


def _texts(outputs: list[RequestOutput]) -> Iterator[str]:
    for output in outputs:
        for answer in output.outputs:
            yield answer.text if answer.text.endswith("\n") else answer.text + "\n"
