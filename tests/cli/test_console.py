from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from inferencex.cli.console import DebugOption, debugging, exit_status
from inferencex.formats.errors import OptionError


def application(action: Callable[[], object]) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(number: int = 0, debug: DebugOption = False) -> None:
        action()

    return app


def raising(error: BaseException) -> Callable[[], object]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (OptionError("file [a/b] is not there"), 1, "error: file [a/b] is not there\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("3 of 9 lines"), 130, "interrupted: 3 of 9 lines\n"),
        (typer.Exit(7), 7, ""),
        (typer.Abort(), 1, "error: the input ended before there was an answer\n"),
        (EOFError(), 1, "error: the input ended before there was an answer\n"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "error: unexpected ZeroDivisionError: division by zero (--debug shows where)\n",
        ),
        (typer.BadParameter("no such colour"), 2, "error: Invalid value: no such colour (see: tool --help)\n"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), 1, None),
    ],
)
def test_errors_are_one_line(
    error: BaseException, status: int, printed: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(application(raising(error)), "tool", [], extra="convert") == status
    captured = capsys.readouterr()
    assert captured.out == ""
    if printed is None:
        printed = (
            "error: tool needs the package torch, which is not installed; run: pip install 'inferencex[convert]'\n"
        )
    assert captured.err == printed


@pytest.mark.parametrize("message", ["word " * 100, "a library's message:\n    and its\n\ndetails\n"])
def test_long_errors_stay_on_one_line(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(application(raising(OptionError(message))), "tool", []) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--nope"], "No such option: --nope"), (["--number", "x"], "Invalid value for '--number'"), (["extra"], "extra")],
)
def test_wrong_use_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(application(lambda: None), "tool", arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.endswith("(see: tool --help)\n")


def test_tracebacks_are_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = application(raising(OptionError("wrong")))
    assert exit_status(app, "tool", ["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert exit_status(app, "tool", []) == 1
    assert not debugging()
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("INFERENCEX_DEBUG", "1")
    assert exit_status(app, "tool", []) == 1
    assert "Traceback" in capsys.readouterr().err


def test_success_and_help_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(application(lambda: typer.echo("done")), "tool", []) == 0
    assert capsys.readouterr().out == "done\n"
    for option in ("-h", "--help"):
        assert exit_status(application(lambda: None), "tool", [option]) == 0
        assert "--debug" in capsys.readouterr().out


def test_help_shows_long_names_whole_on_a_narrow_terminal() -> None:
    code = (
        "import typer\n"
        "from typing import Annotated\n"
        "from inferencex.cli.console import run_app\n"
        "app = typer.Typer(add_completion=False)\n"
        "@app.command()\n"
        "def command(\n"
        "    name_that_fills_more_than_half_a_line: Annotated[str, typer.Option(help='Word. ' * 20)] = '',\n"
        ") -> None:\n"
        "    pass\n"
        "run_app(app, 'tool', ['--help'])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"COLUMNS": "50"}
    )
    names = "".join(line[2:].split(" ")[0] for line in process.stdout.splitlines())
    assert "--name-that-fills-more-than-half-a-line" in names, process.stdout


def test_threads_that_end_with_the_process_keep_it_from_nothing() -> None:
    """What is registered for the exit is run; memory is not freed object by object."""
    code = (
        "import atexit, threading, typer\n"
        "from inferencex.cli.console import run_app\n"
        "class Freed:\n"
        "    def __del__(self) -> None: print('freed', flush=True)\n"
        "kept = Freed()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "atexit.register(print, 'exit')\n"
        "run_app(typer.Typer(callback=None, add_completion=False), 'tool', ['--nope'])\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.stdout == "exit\n", process.stderr


@pytest.mark.parametrize(
    ("redirection", "status", "error"),
    [
        ("<&-", 0, ""),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        pytest.param(
            ">/dev/full",
            1,
            "error: the output: No space left on device\n",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full"),
        ),
    ],
)
def test_standard_streams_that_are_closed_or_full(redirection: str, status: int, error: str) -> None:
    code = (
        "import sys, typer\n"
        "from inferencex.cli.console import run_app\n"
        "app = typer.Typer(add_completion=False)\n"
        "@app.command()\n"
        "def command() -> None:\n"
        "    typer.echo(f'{sys.stdin.isatty()} {sys.stdin.read()}'); sys.stdout.write('x'); sys.stderr.flush()\n"
        "run_app(app, 'tool', [])\n"
    )
    shell = f'exec "$0" -c "$1" {redirection}'
    process = subprocess.run(
        ["sh", "-c", shell, sys.executable, code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stderr) == (status, error)


def test_files_that_cannot_be_used_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(application(Path("/no/such/file").read_text), "tool", []) == 1
    assert capsys.readouterr().err == "error: /no/such/file: No such file or directory\n"


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys, typer\n"
        "from inferencex.cli.console import run_app\n"
        "app = typer.Typer(add_completion=False)\n"
        "@app.command()\n"
        "def command() -> None:\n"
        "    for number in range(100000): print(number)\n"
        "run_app(app, 'tool', [])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 1
