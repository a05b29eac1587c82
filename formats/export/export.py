"""Writing a bundle in another tool's format: the formats by name, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError, OptionError
from inferencex.formats.export.destination import check_destination, staged_file, staged_folder


@dataclass(frozen=True)
class Format:
    """A format: the module whose `write(bundle, path)` writes it, and whether it is one file."""

    module: str
    is_file: bool = False


FORMATS: Mapping[str, Format] = {
    "awq": Format("awq"),
    "gptq": Format("gptq"),
    "compressed-tensors": Format("compressed_tensors"),
    "gguf": Format("gguf_file", is_file=True),
    "onnx": Format("onnx_folder"),
}


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    path:    the folder or file
    nbytes:  bytes of all its files
    notes:   what a user should know: what is larger than in the bundle, or not exactly equal
    """

    path: Path
    nbytes: int
    notes: tuple[str, ...]


def export_bundle(bundle: Path, format_name: str, output: Path, *, overwrite: bool = False) -> Exported:
    """Write the bundle in the folder `bundle` as `format_name` to `output`, or leave everything as it was.

    Raises OptionError for a format that is not in FORMATS, ExportError for a destination that may not be written and
    for what the format cannot say, BundleError for a bundle that is not whole.
    """
    chosen = FORMATS.get(format_name)
    if chosen is None:
        raise OptionError(f"--format {format_name!r} is not one of {', '.join(FORMATS)}")
    check_destination(output, bundle, overwrite=overwrite, is_file=chosen.is_file)
    opened = Bundle.open(bundle, verify=True)
    write = import_module(f"inferencex.formats.export.{chosen.module}").write
    try:
        if chosen.is_file:
            with staged_file(output) as path:
                notes = write(opened, path)
            return Exported(output, output.stat().st_size, tuple(notes))
        record = {
            "format": format_name,
            "source": dict(opened.manifest.source),
            "scheme": dict(opened.manifest.scheme),
            "tools": {"inferencex": version("inferencex")},
        }
        with staged_folder(output, record) as path:
            notes = write(opened, path)
    except OSError as error:
        where = error.filename or output
        raise ExportError(
            f"{where}: cannot be written: {error.strerror or error}; {output} is as it was before"
        ) from error
    return Exported(output, sum(file.stat().st_size for file in output.rglob("*") if file.is_file()), tuple(notes))
