"""`inferencex verify`: whether a bundle is what was made and published, and who signed it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferencex.cli.console import DebugOption

app = typer.Typer(add_completion=False)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle, or a folder that inferencex pipeline published.")],
    public_key: Annotated[
        str | None, typer.Option(help="The signer's public key of minisign, or its file: the signature must be of it.")
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(help="The signature. Default: SHA256SUMS.minisig in the folder.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Check every file against the hashes in bundle.json and SHA256SUMS, and the signature against a public key."""
    from inferencex.formats.errors import OptionError
    from inferencex.recipes.provenance.verify import verify as check

    if signature is not None and public_key is None:
        raise OptionError(f"--signature {signature}: says something only beside the signer's --public-key")
    found = check(bundle, signature=signature, public_key=public_key)
    for line in found.checks:
        typer.echo(f"ok: {line}")
    for line in found.doubts:
        typer.echo(f"note: {line}")
