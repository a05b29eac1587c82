"""`inferencex`: one command in front of the others. Each is imported only when it is called."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from inferencex.cli.console import FAILED, missing_package, print_error, run_app
from inferencex.formats.errors import InferenceXError

NAME = "inferencex"


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `app` it is, what it does, and the extra it needs."""

    module: str
    help: str
    extra: str | None = None


COMMANDS = {
    "convert": Command("inferencex.convert.cli", "Turn a Hugging Face checkpoint into a bundle.", extra="convert"),
    "run": Command("inferencex.runtime.cli", "Answer prompts, chat, or work through a file with a bundle."),
    "serve": Command(
        "inferencex.runtime.server.cli", "Serve bundles: OpenAI's HTTP API, WebSocket and gRPC.", extra="serve"
    ),
    "bench": Command("inferencex.runtime.load_test.cli", "Put load on a running server and measure it.", extra="serve"),
    "eval": Command("inferencex.recipes.evaluation.cli", "Check a bundle's accuracy by a recipe.", extra="eval"),
    "compare": Command("inferencex.recipes.compare", "Measure how far bundles are from a reference bundle."),
    "export": Command(
        "inferencex.cli.export", "Write a bundle for other tools: AWQ, GPTQ, GGUF, ONNX, ...", extra="convert"
    ),
    "pipeline": Command(
        "inferencex.recipes.pipeline.cli", "Convert, check, export and publish as a recipe says.", extra="pipeline"
    ),
    "verify": Command("inferencex.cli.verify", "Check a bundle's files against its hashes and its signature."),
    "sign": Command("inferencex.cli.sign", "Sign a bundle's checksums.", extra="sign"),
    "doctor": Command("inferencex.cli.doctor", "Show devices, drivers and versions, and what runs where."),
    "tune": Command("inferencex.cli.tune", "Measure launch options for a bundle on this GPU.", extra="cuda"),
    "inspect": Command("inferencex.cli.inspect", "Show what is in a bundle: graph, fusions, weights."),
}

app = typer.Typer(
    name=NAME,
    help="Turn a Hugging Face checkpoint into an optimized bundle, and run it.",
    epilog="Each command has its own --help.",
    add_completion=False,
    no_args_is_help=False,
)


def _print_version(value: bool) -> None:
    if value:
        try:
            found = version("inferencex")
        except PackageNotFoundError as error:
            raise InferenceXError("inferencex is not installed as a package; run: pip install -e .") from error
        typer.echo(f"inferencex {found}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _listed(name: str, command: Command) -> None:
    """Put a command into the help text; `main` runs it before this application is asked."""

    @app.command(name, help=command.help)
    def run() -> None:
        dispatch(name, [])


for _name, _command in COMMANDS.items():
    _listed(_name, _command)


def dispatch(name: str, arguments: list[str]) -> None:
    """Import a subcommand, run it with its arguments as they are, and exit."""
    command = COMMANDS[name]
    full_name = f"{NAME} {name}"
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as error:
        print_error(missing_package(full_name, error, command.extra))
        sys.exit(FAILED)
    run_app(module.app, full_name, arguments, command.extra)


def main() -> None:
    """Entry point."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        dispatch(arguments[0], arguments[1:])
    run_app(app, NAME, arguments)
