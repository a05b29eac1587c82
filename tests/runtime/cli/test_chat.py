"""The chat, on a real pseudo-terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect  # type: ignore[import-untyped]
import pytest

from inferencex.cli.console import stderr_console
from inferencex.formats.errors import RequestError
from inferencex.runtime.cli.answer import write
from inferencex.runtime.cli.chat import Chat
from inferencex.runtime.params import SamplingParams

READY = re.escape(">>> ")


class Terminal:
    """The command at a terminal."""

    def __init__(self, program: list[str], *arguments: str) -> None:
        self.child = pexpect.spawn(program[0], [*program[1:], *arguments], encoding="utf-8", timeout=30, echo=False)
        self.child.expect(READY)

    def say(self, text: str) -> str:
        """Send a line and return what is shown until the next prompt."""
        self.child.sendline(text)
        self.child.expect(READY)
        return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", self.child.before).replace("\r", "").strip("\n")

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        status: int = self.child.exitstatus
        return status


@pytest.fixture
def terminal(program: list[str], bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "dumb")
    started = Terminal(program, str(bundle))
    yield started
    started.child.close(force=True)


def test_turns_are_remembered_and_commands_change_them(terminal: Terminal) -> None:
    assert terminal.say("Hi").endswith("Hi")
    assert terminal.say("Yo").endswith("HiHiYo")  # the model repeats the whole conversation
    assert "forgotten" in terminal.say("/reset")
    assert terminal.say("Ho").endswith("Ho") and "HiHi" not in terminal.say("Ho")
    assert "system prompt: Be kind." in terminal.say("/system Be kind.")
    assert terminal.say("Hi").endswith("Be kind.Hi")
    assert "/reset" in terminal.say("/help")
    assert "no command /nonsense" in terminal.say("/nonsense")
    assert "max_tokens=6" in terminal.say("/params max_tokens=6")
    terminal.say("/reset")
    assert terminal.say("long text").endswith("Be ki")
    assert "temperature is -1" in terminal.say("/params temperature=-1")
    assert "is not NAME=VALUE" in terminal.say("/params warm")
    terminal.child.sendline("/exit")
    assert terminal.end() == 0
    assert "KV blocks" in terminal.child.before


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(terminal: Terminal) -> None:
    terminal.child.sendline("forever")
    terminal.child.expect("xxxx")
    terminal.child.sendintr()
    terminal.child.expect(re.escape("(stopped)"))
    terminal.child.expect(READY)
    assert "forgotten" in terminal.say("/reset")
    assert terminal.say("Hi").endswith("Hi")
    terminal.child.sendintr()
    terminal.child.expect(re.escape("(Ctrl-D leaves)"))
    terminal.child.expect(READY)
    assert terminal.say("line one\\\nline two").count("line two") >= 1
    terminal.child.sendeof()
    assert terminal.end() == 0


def make_chat(bundle: Path, raw: bool = False) -> Any:
    from inferencex.runtime.llm import LLM

    scripted = sys.modules["scripted"]
    llm = LLM(bundle, backend=scripted.ScriptedBackend())
    return Chat(llm, SamplingParams(max_tokens=11), raw, None, stderr_console())


def test_a_turn_that_cannot_be_served_is_forgotten(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = make_chat(bundle)
    chat.answer("one")
    with pytest.raises(RequestError, match="4096"):
        chat.answer("y" * 5000)
    chat.answer("two")
    assert capsys.readouterr().out == "one\noneonetw\n"


def test_raw_lines_stand_alone(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = make_chat(bundle, raw=True)
    chat.answer("one")
    chat.answer("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_control_characters_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]0;title\x07b\tc\nd\x9b2J\x7f"
    write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write(text)
    assert capsys.readouterr().out == "a␛]0;title␇b\tc\nd\ufffd2J␡"


def test_a_prompt_on_a_terminal_is_streamed_and_can_be_stopped(program: list[str], bundle: Path) -> None:
    child = pexpect.spawn(
        program[0], [*program[1:], str(bundle), "--raw", "-p", "forever"], encoding="utf-8", timeout=30
    )
    child.expect("xxxx")
    child.sendintr()
    child.expect("interrupted")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
