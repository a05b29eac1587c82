"""Calibration text in files on this machine: plain text, rows of JSON, Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferencex.convert.calibrate.documents import Document, Reading, document_of, sections
from inferencex.formats.errors import OptionError

TEXT_SUFFIXES = (".txt", ".utf8", ".raw", ".text", ".md")
ROW_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = (*TEXT_SUFFIXES, *ROW_SUFFIXES, *PARQUET_SUFFIXES)

_CHUNK = 1 << 20
_ROWS_AT_ONCE = 256


def is_local(name: str) -> bool:
    """Whether `name` is meant as files: it exists, or is written like them."""
    first = name.split(",")[0].strip()
    return any(_path(part).exists() for part in (name, first)) or first.endswith(SUFFIXES)


class LocalText:
    """Files of text; each document of a file in turn, file after file.

    A text file is cut into sections, each a document; a row of JSON or Parquet is one.
    """

    kind = "local"
    streamed = False

    def __init__(self, name: str, column: str | None = None) -> None:
        """Find the files that `name` means: a file, a folder, or several of them with commas between.

        Raises OptionError for what does not exist, holds no text, or needs a package that is not installed.
        """
        self.paths = _files(name)
        self.name = ",".join(path.name for path in self.paths)
        self._column = column
        texts = [path for path in self.paths if path.suffix in TEXT_SUFFIXES]
        if column is not None and texts:
            raise OptionError(f"--calibration {texts[0]}#{column}: a text file has no columns; leave #{column} out")
        if find_spec("pyarrow") is None:
            for path in self.paths:
                if path.suffix in PARQUET_SUFFIXES:
                    raise OptionError(
                        f"--calibration {path}: reading Parquet needs the package pyarrow; "
                        "install inferencex[datasets], or give the text as .txt or .jsonl"
                    )

    def facts(self) -> dict[str, Any]:
        """Return the files by name and size in bytes."""
        facts: dict[str, Any] = {"files": [{"name": p.name, "size": p.stat().st_size} for p in self.paths]}
        return facts if self._column is None else {**facts, "column": self._column}

    def documents(self, reading: Reading) -> Iterator[Document]:
        """Yield the documents in the order they are stored in."""
        for path in self.paths:
            try:
                yield from self._documents(path, reading)
            except UnicodeDecodeError as error:
                raise OptionError(
                    f"--calibration {path}: is not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x}); "
                    "convert it, for example with iconv"
                ) from error
            except OSError as error:
                raise OptionError(f"--calibration {path}: cannot be read: {error.strerror or error}") from error

    def _documents(self, path: Path, reading: Reading) -> Iterator[Document]:
        if path.suffix in TEXT_SUFFIXES:
            with path.open(encoding="utf-8-sig") as file:
                for section in sections(iter(lambda: file.read(_CHUNK), ""), reading.section):
                    if section.strip():
                        yield Document(section)
            return
        for where, row in _json_rows(path) if path.suffix in ROW_SUFFIXES else _parquet_rows(path):
            document = document_of(row, where, self._column, reading.render)
            if document is not None:
                yield document


def _path(name: str) -> Path:
    """Return the path that `name` means, `~` replaced. Raises OptionError for the home of nobody."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise OptionError(f"--calibration {name}: there is no such user's home folder; write the path out") from error


def _files(name: str) -> list[Path]:
    whole = _path(name)
    parts = [whole] if whole.exists() else [_path(part.strip()) for part in name.split(",")]
    files: list[Path] = []
    for part in parts:
        if part.is_dir():
            inside = sorted(path for path in part.rglob("*") if path.suffix in SUFFIXES and path.is_file())
            if not inside:
                raise OptionError(f"--calibration {part}: the folder holds no file that ends in {', '.join(SUFFIXES)}")
            files += inside
        elif not part.exists():
            raise OptionError(f"--calibration {part}: there is no such file")
        elif not part.is_file():
            # Pipes, sockets and devices: text is read more than once, and what never ends must not be waited for.
            raise OptionError(f"--calibration {part}: is not a regular file; write the text to one first")
        elif part.suffix not in SUFFIXES:
            raise OptionError(
                f"--calibration {part}: expected a file that ends in {', '.join(SUFFIXES)}; rename it if it is one"
            )
        else:
            files.append(part)
    return files


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file with one JSON object a line, each with where it is."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise OptionError(
                    f"--calibration {where}: is not JSON ({error}); expected one object a line"
                ) from error
            if not isinstance(row, dict):
                raise OptionError(f"--calibration {where}: holds a {type(row).__name__}, expected an object")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a Parquet file, a few hundred in memory at a time."""
    import pyarrow  # only where a Parquet file is read
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise OptionError(f"--calibration {path}: is not a Parquet file that can be read: {error}") from error
