"""The two files of batch mode: requests in, answers out, line by line.

The output has one record for each non-blank line of the input, in its order, so how far a run came is how many
records there are. Each names its input line by number and digest, and by two more digests the bundle and the
settings that it was answered with; a run that finds records of other lines, or answered otherwise, stops.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from inferencex.formats.errors import OptionError, RequestError


class Circumstances(TypedDict):
    """What all records of a run have in common: short digests of the bundle's manifest and of the settings."""

    bundle_sha256: str
    settings_sha256: str


def short_digest(data: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class InputLine:
    """A line of the input: its number from 1, the first 16 hexadecimal digits of its SHA-256, its object."""

    number: int
    digest: str
    record: Mapping[str, Any]


def read_input(path: Path) -> Iterator[InputLine]:
    """Yield the lines of `path` that are not blank.

    Raises OptionError when it cannot be opened, RequestError naming the line when one is no JSON object.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise OptionError(f"--input {path}: cannot be read ({error.strerror or error})") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
                raise RequestError(f"{path}, line {number}: is not JSON ({error})") from error
            if not isinstance(record, dict):
                raise RequestError(f"{path}, line {number}: is a JSON {type(record).__name__}, expected an object")
            yield InputLine(number, short_digest(line.strip()), record)


class OutputFile:
    """The output, open for appending and locked against a second run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise OptionError(f"--output {path}: cannot be written ({error.strerror or error})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise OptionError(f"--output {path}: another run is writing it; wait for it, or name another") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def resume(self, lines: Iterator[InputLine], circumstances: Circumstances) -> int:
        """Cut off a half-written record, take the lines that are done off `lines`, and return their number.

        Raises OptionError when the file is not the beginning of this input's output under these circumstances.
        """
        self._file.seek(0)
        done = whole = 0
        for row in self._file:
            if not row.endswith(b"\n"):
                break
            whole += len(row)
            self._check(row, done + 1, next(lines, None), circumstances)
            done += 1
        if whole != self._file.seek(0, os.SEEK_END):
            self._file.truncate(whole)
        return done

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; once this returns it outlives the process."""
        try:
            row = json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # an "id" with a lone surrogate, which JSON can only write as an escape
            row = json.dumps(record).encode()
        self._file.write(row + b"\n")
        self._file.flush()

    def _check(self, row: bytes, number: int, line: InputLine | None, circumstances: Circumstances) -> None:
        advice = "move it away to start afresh"
        try:
            record = json.loads(row)
            found = (record["line"], record["input_sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"--output {self.path}, line {number}: is no record of a batch run; {advice}") from error
        if line is None:
            raise OptionError(f"--output {self.path}: has more records than the input has lines; {advice}")
        if found != (line.number, line.digest):
            raise OptionError(
                f"--output {self.path}, line {number}: answers line {found[0]} of another input, "
                f"expected line {line.number} of this one; {advice}"
            )
        given_with = {
            "bundle_sha256": "another bundle",
            "settings_sha256": "other settings (sampling options, --system, --raw or --max-model-len)",
        }
        others = [what for key, what in given_with.items() if record.get(key) != circumstances[key]]  # type: ignore[literal-required]
        if others:
            raise OptionError(
                f"--output {self.path}, line {number}: was answered with {' and '.join(others)}; "
                "continue with those, or name another --output"
            )
