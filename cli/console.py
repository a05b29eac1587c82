"""What every entry point does the same way: consoles, errors in one line, exit statuses.

Exit statuses: 0 done, 1 failed, 2 wrong use of the command, 130 interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from inferencex.formats.errors import InferenceXError

if TYPE_CHECKING:
    from rich.console import Console

FAILED, USAGE, INTERRUPTED = 1, 2, 130
DEBUG_VARIABLE = "INFERENCEX_DEBUG"

_debug = False


def _set_debug(value: bool) -> bool:
    global _debug
    _debug = value
    return value


DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help=f"Show tracebacks of errors (also: {DEBUG_VARIABLE}=1).",
        callback=_set_debug,
        is_eager=True,
    ),
]
"""The `--debug` flag; every command takes a parameter `debug: DebugOption = False`."""


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return _debug or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def stderr_console() -> Console:
    """Return a console for notes, progress and errors; standard output is for results alone."""
    from rich.console import Console  # here, for a first token does not wait for what only notes need

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print `error: message` on standard error, on one line even where a library's message has several."""
    from rich.text import Text

    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    stderr_console().print(Text.assemble(("error:", "bold red"), " ", line))


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None, extra: str | None = None) -> None:
    """Run a command line application and exit; this is all an entry point's `main` does.

    name:      how the command is called in its usage line
    arguments: those of the process by default
    extra:     the optional dependencies that the command needs; a missing package then names them
    """
    status = exit_status(app, name, sys.argv[1:] if arguments is None else arguments, extra)
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit with what must happen at exit, and without freeing memory object by object, which takes a second."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def exit_status(app: typer.Typer, name: str, arguments: Sequence[str], extra: str | None = None) -> int:
    """Run an application and return its exit status, having printed any error.

    A KeyboardInterrupt may carry a text, which is printed in the one line that reports it.
    """
    _set_debug(False)
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a narrow encoding must not end a run
    try:
        if "--help" in arguments or "-h" in arguments:
            _show_whole_names()
        command = typer.main.get_command(app)
        with command.make_context(name, list(arguments), help_option_names=["-h", "--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as stop:
        return stop.exit_code
    except InferenceXError as error:
        return _report(str(error))
    except typer.TyperException as error:
        message = error.format_message()
        return _report(f"{message.rstrip('.')} (see: {name} --help)", status=USAGE if error.exit_code == 2 else FAILED)
    except ModuleNotFoundError as error:
        return _report(missing_package(name, error, extra))
    except KeyboardInterrupt as interrupt:
        note = str(interrupt)
        stderr_console().print(f"interrupted: {note}" if note else "interrupted", markup=False)
        return INTERRUPTED
    except (typer.Abort, EOFError):
        return _report("the input ended before there was an answer")
    except BrokenPipeError:
        # The reader went away; without this the interpreter would complain once more while it exits.
        _discard_output()
        return FAILED
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_output()  # what standard output still holds would be tried again while exiting
        where = "the output" if error.filename is None else error.filename
        return _report(f"{where}: {error.strerror or error}")
    except Exception as error:  # the last resort of the process: whatever was not foreseen
        return _report(f"unexpected {type(error).__name__}: {error}", hint=True)


def _show_whole_names() -> None:
    """Let help continue a long option's name on the next line of a narrow terminal, where typer would cut it off."""
    from rich.text import Text
    from typer import rich_utils

    class Folding(rich_utils.OptionHighlighter):
        def __call__(self, text: str | Text) -> Text:
            highlighted = super().__call__(text)
            highlighted.overflow = "fold"
            return highlighted

    class FoldingNegative(rich_utils.NegativeOptionHighlighter):
        def __call__(self, text: str | Text) -> Text:
            highlighted = super().__call__(text)
            highlighted.overflow = "fold"
            return highlighted

    rich_utils.highlighter, rich_utils.negative_highlighter = Folding(), FoldingNegative()


def _open_standard_streams() -> None:
    """Give a process that was started without some of its standard streams empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def missing_package(name: str, error: ModuleNotFoundError, extra: str | None) -> str:
    """Say which package is missing, and what to install."""
    package = (error.name or "").partition(".")[0]
    if extra is None or package in ("", "inferencex"):
        return f"{error} (is the installation of inferencex complete?)"
    return f"{name} needs the package {package}, which is not installed; run: pip install 'inferencex[{extra}]'"


def _report(message: str, status: int = FAILED, hint: bool = False) -> int:
    if debugging():
        traceback.print_exc()
    elif hint:
        message += " (--debug shows where)"
    print_error(message)
    return status
