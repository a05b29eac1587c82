"""`inferencex serve`: its options are the settings themselves, one flag for each."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import typer

from inferencex.cli.console import DebugOption
from inferencex.runtime.server.access.hashing import generate_key, hash_key
from inferencex.runtime.server.config.catalogue import Key, Kind, keys
from inferencex.runtime.server.config.load import load_settings
from inferencex.runtime.server.config.show import config_lines

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

_PANELS = {"model": "Model", "server": "Server", "engine": "Engine"}
_METAVARS = {Kind.SIZE: "SIZE", Kind.PATH: "PATH", Kind.TEXT: "TEXT", Kind.KEY: "KEY", Kind.NUMBER: "NUMBER"}


def serve(
    config: Path | None,
    print_config: bool,
    generate_a_key: bool,
    hash_a_key: bool,
    debug: bool,
    **flags: Any,
) -> None:
    """Serve bundles over HTTP (OpenAI's API), WebSocket and gRPC.

    Every option can also stand in a YAML file (--config), or in an environment variable: `--max-num-seqs 8` is
    `INFERENCEX_ENGINE__MAX_NUM_SEQS=8`, or `max_num_seqs: 8` in the section `engine`. Flags go before variables, and
    these before the file.
    """
    if generate_a_key:
        typer.echo(generate_key())
        return
    if hash_a_key:
        typer.echo(hash_key(_read_key()))
        return
    given = {key.path: flags[key.path.replace(".", "__")] for key in keys()}
    resolved = load_settings(given, os.environ, config)
    if print_config:
        for line in config_lines(resolved):
            typer.echo(line)
        return
    from inferencex.runtime.server.run import serve as run  # here, for help and wrong usage come at once

    run(resolved.settings)


def _read_key() -> str:
    """Ask for a key, which is not a flag because flags are seen by everyone on the machine."""
    if sys.stdin.isatty():
        return str(typer.prompt("Key", hide_input=True, err=True))
    return sys.stdin.readline().rstrip("\r\n")


def _parameter(key: Key) -> inspect.Parameter:
    """Return the flag of a setting. Values are texts here: settings check them, wherever they come from."""
    annotation: Any = bool if key.kind is Kind.SWITCH else list[str] if key.repeated else str
    shown = f"[default: {key.shown_default}]" if key.shown_default else ""
    option = typer.Option(
        f"{key.flag}/{key.off_flag}" if key.off_flag else key.flag,
        help=f"{key.help} {shown}".replace("[", r"\[").strip(),
        metavar=None if key.kind is Kind.SWITCH else "|".join(key.choices) or _METAVARS.get(key.kind, "N"),
        rich_help_panel=_PANELS[key.section],
        show_default=False,
    )
    return _keyword(key.path.replace(".", "__"), annotation | None, option, None)


def _keyword(name: str, annotation: Any, option: Any, default: Any) -> inspect.Parameter:
    from typing import Annotated

    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def _switch(name: str, flag: str, help: str) -> inspect.Parameter:
    return _keyword(name, bool, typer.Option(flag, help=help), False)


def _register() -> None:
    """Make the command: its own options, and one for each setting."""
    config = typer.Option("--config", metavar="FILE", help="YAML file with the sections model, server and engine.")
    parameters = [
        _keyword("config", Path | None, config, None),
        _switch("print_config", "--print-config", "Show all settings and where each comes from, and exit."),
        _switch("generate_a_key", "--generate-key", "Print a new API key, and exit."),
        _switch("hash_a_key", "--hash-key", "Read a key from standard input, print it hashed, and exit."),
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption),
        *(_parameter(key) for key in keys()),
    ]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command()(serve)


_register()
