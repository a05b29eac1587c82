"""The chat on a terminal: turns, their history, and a few commands."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console

from inferencex.formats.errors import RequestError
from inferencex.runtime.cli.answer import stoppable, stream, stream_text
from inferencex.runtime.cli.options import with_parameters
from inferencex.runtime.cli.requests import RunRequest
from inferencex.runtime.params import SamplingParams

if TYPE_CHECKING:
    from inferencex.runtime.llm import LLM

_PROMPT, _CONTINUED = ">>> ", "... "
_HELP = """\
/reset              forget the conversation
/system [TEXT]      show or set the system prompt (setting it forgets the conversation)
/params [NAME=VALUE ...]  show or set sampling parameters, such as temperature=0.7
/help               this list
/exit               leave (also Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""


class Chat:
    """A conversation with a bundle; without a chat template (or with `raw`) each line is continued on its own."""

    def __init__(self, llm: LLM, params: SamplingParams, raw: bool, system: str | None, console: Console) -> None:
        self._llm = llm
        self._params = params
        self._raw = raw or not llm.chat_template
        self._system = system
        self._console = console
        self._turns: list[dict[str, Any]] = []

    def run(self) -> None:
        """Talk until the input ends or the user leaves."""
        if importlib.util.find_spec("readline") is not None:  # not every Python is built with it
            importlib.import_module("readline")  # gives `input` line editing and history
        kind = "text completion" if self._raw else "chat"
        self._console.print(f"{kind}; /help lists the commands, Ctrl-D leaves", markup=False)
        while True:
            try:
                line = self._read()
                if not line.strip():
                    continue
                if line.startswith("/"):
                    if not self.command(line):
                        return
                else:
                    self.answer(line)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\n(Ctrl-D leaves)")
            except RequestError as error:
                self._console.print(f"error: {error}", markup=False)

    def answer(self, text: str) -> None:
        """Answer a turn and remember both; an answer that was stopped counts as far as it came.

        Raises RequestError, and forgets the turn, when it cannot be served.
        """
        if self._raw:
            request = RunRequest(self._params, prompt=text)
        else:
            start = [] if self._system is None else [{"role": "system", "content": self._system}]
            request = RunRequest(self._params, messages=[*start, *self._turns, {"role": "user", "content": text}])
        with stoppable() as stopped:
            answer, interrupted = stream_text(stream(self._llm, request, self._raw, None), stopped)
        if interrupted:
            self._console.print("(stopped)")
        if not self._raw:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> bool:
        """Carry out a line that starts with a slash; return false when it ends the chat."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/reset":
            self._turns = []
            self._console.print("(the conversation is forgotten)")
        elif name == "/system":
            self._set_system(rest)
        elif name == "/params":
            self._set_params(rest)
        elif name == "/help":
            self._console.print(_HELP, markup=False)
        else:
            self._console.print(f"there is no command {name}; /help lists them", markup=False)
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._system, self._turns = text, []
        self._console.print(f"system prompt: {self._system or '(none)'}", markup=False)

    def _set_params(self, text: str) -> None:
        values: dict[str, Any] = {}
        for entry in text.split():
            name, separator, value = entry.partition("=")
            if not separator:
                raise RequestError(f"{entry!r} is not NAME=VALUE, such as temperature=0.7")
            values[name] = _value(value)
        self._params = with_parameters(self._params, values)
        resolved = self._params.with_defaults(self._llm.default_params)
        shown = {field.name: getattr(resolved, field.name) for field in fields(resolved)}
        text = ", ".join(f"{name}={value}" for name, value in shown.items() if value not in (None, (), {}, False))
        self._console.print(text, markup=False)

    def _read(self) -> str:
        lines = [_read_line(_PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(_read_line(_CONTINUED))
        return "\n".join(lines)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _read_line(prompt: str) -> str:
    """Read a line from the terminal; the prompt goes to standard output only where that is the terminal too."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()
