"""`inferencex sign`: a checksum file for a bundle, with a signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferencex.cli.console import DebugOption, stderr_console

app = typer.Typer(add_completion=False)


@app.command()
def sign(
    bundle: Annotated[Path | None, typer.Argument(help="A bundle, or another folder of files.")] = None,
    key: Annotated[Path | None, typer.Option(help="File of the secret key; its password is asked for.")] = None,
    new_key: Annotated[
        Path | None, typer.Option(help="Write a new secret key to this file, and the public one beside it as FILE.pub.")
    ] = None,
    password: Annotated[
        bool, typer.Option("--password/--no-password", help="Whether a new key gets a password; CI needs one without.")
    ] = True,
    debug: DebugOption = False,
) -> None:
    """Write SHA256SUMS with the hashes of all files of a folder, and sign it in the form of minisign."""
    from inferencex.formats.errors import BundleError, OptionError
    from inferencex.recipes.provenance.checksums import SIGNATURE_FILE, write_checksums
    from inferencex.recipes.provenance.signing import new_key as make_key
    from inferencex.recipes.provenance.signing import sign_file

    if (key is None) == (new_key is None) or (bundle is None) != (key is None):
        raise OptionError("give a folder and --key to sign it, or --new-key alone to make a key")
    console = stderr_console()
    if new_key is not None:
        chosen = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True) if password else ""
        public = make_key(new_key, chosen)
        console.print(f"{new_key}: keep it to yourself; the public key is in {new_key}.pub", markup=False)
        typer.echo(public)
        return
    assert bundle is not None and key is not None
    if not bundle.is_dir():
        raise BundleError(f"{bundle}: is not a folder")
    sums = write_checksums(bundle)
    sign_file(sums, key, bundle / SIGNATURE_FILE, lambda: str(typer.prompt("Password", hide_input=True, err=True)))
    console.print(f"{bundle / SIGNATURE_FILE}: signed {sums.name}", markup=False)
