"""Commands that take plain values past Typer's converters understand every value as Typer does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.core import TyperCommand

from inferencex.cli.plain_values import PromptCommand

_heard: list[dict[str, Any]] = []


def _listen(
    place: Annotated[Path, typer.Argument()],
    text: Annotated[str | None, typer.Option("--text")] = None,
    texts: Annotated[list[str] | None, typer.Option("--texts")] = None,
    count: Annotated[int | None, typer.Option("--count")] = None,
    small: Annotated[int, typer.Option("--small", min=0, max=9)] = 3,
    share: Annotated[float, typer.Option("--share")] = 0.5,
    kind: Annotated[Literal["one", "two"], typer.Option("--kind")] = "one",
    flag: Annotated[bool, typer.Option("--flag/--no-flag")] = False,
    file: Annotated[Path | None, typer.Option("--file", exists=True)] = None,
    upper: Annotated[str, typer.Option("--upper", parser=str.upper)] = "a",
    loud: Annotated[str, typer.Option("--loud", callback=lambda value: value + "!")] = "a",
) -> None:
    _heard.append(dict(locals()))


def _outcome(kind: type[TyperCommand], arguments: list[str]) -> Any:
    """What the command hears, or the message that it fails with."""
    app = typer.Typer(add_completion=False)
    app.command(cls=kind)(_listen)
    command = typer.main.get_command(app)
    _heard.clear()
    try:
        with command.make_context("listen", list(arguments)) as context:
            command.invoke(context)
    except typer.TyperException as error:
        return type(error).__name__, error.format_message()
    return [(name, type(value), value) for name, value in _heard.pop().items()]


def _same(arguments: list[str]) -> None:
    assert _outcome(PromptCommand, arguments) == _outcome(TyperCommand, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a"],
        ["/"],
        ["a", "--text", "", "--texts", "x", "--texts", "y z"],
        ["a", "--count", "7", "--small", "9", "--share", "1e3", "--kind", "two", "--flag"],
        ["a", "--count", "x"],
        ["a", "--count", "1_000"],
        ["a", "--count", "-0"],
        ["a", "--count", "007"],
        ["a", "--count", "9" * 40],
        ["a", "--count", "1.0"],
        ["a", "--small", "10"],
        ["a", "--share", "nothing"],
        ["a", "--kind", "three"],
        ["a", "--kind", "TWO"],
        ["a", "--no-flag", "--file", "/nowhere"],
        ["a", "--file", "/"],
        ["a", "--upper", "b", "--loud", "b"],
        ["a", "--unknown"],
        ["a", "b"],
    ],
)
def test_every_value_is_understood_as_by_typer(arguments: list[str]) -> None:
    _same(arguments)


@given(value=st.text(max_size=6), option=st.sampled_from(["--text", "--texts", "--count", "--small", "--kind"]))
def test_so_are_values_at_random(value: str, option: str) -> None:
    _same(["a", f"{option}={value}"])


def test_a_path_that_cannot_be_read_is_left_to_typer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # for the superuser may read everything
    _same([str(tmp_path)])
    assert _outcome(PromptCommand, [str(tmp_path)])[0] == "BadParameter"


def test_running_a_bundle_does_without_pydantic() -> None:
    code = (
        "import sys; from inferencex.runtime.cli.command import main; import atexit\n"
        "atexit.register(lambda: print('pydantic' in sys.modules))\n"
        "sys.argv = ['x', '/nowhere', '--prompt', 'hi', '--max-tokens', '1', '--device', 'cpu']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False"
    assert "/nowhere: is not a folder" in done.stderr
