"""Calibration text from a dataset on the Hugging Face hub, streamed: only the rows that are used are fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

from inferencex.convert.calibrate.documents import Document, Reading, document_of
from inferencex.formats.errors import OptionError

_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?::[\w.+-]*){0,2}")
_SHUFFLED_AHEAD = 10_000  # rows; so many are read before the first is used
_MOST_EMPTY = 100_000


class HubDataset:
    """`NAME[:CONFIG][:SPLIT]`, by default the split `train` of the configuration that the dataset declares.

    One part alone is a configuration if there is one of that name, else a split.
    """

    kind = "hub"
    streamed = True

    def __init__(self, name: str, column: str | None = None) -> None:
        """Take the name apart. Raises OptionError when it cannot be a dataset's, or `datasets` is not installed."""
        if _NAME.fullmatch(name) is None:
            raise OptionError(
                f"--calibration {name!r}: is neither a file nor a dataset; expected builtin, self, a path, or "
                "NAME[:CONFIG][:SPLIT] of a dataset on the hub"
            )
        if find_spec("datasets") is None:
            raise OptionError(
                f"--calibration {name}: there is no such file, and reading it from the hub needs the package datasets; "
                "install inferencex[datasets], or give a path, or builtin (which works offline)"
            )
        self.name = name
        self._identity, *parts = name.split(":")
        self._parts = [part or None for part in parts]
        self._column = column

    def facts(self) -> dict[str, Any]:
        """Return the column, where one was asked for."""
        return {} if self._column is None else {"column": self._column}

    def documents(self, reading: Reading) -> Iterator[Document]:
        """Yield documents in an order that depends on the seed, from all over the dataset's files."""
        failures = _failures()
        empty = 0
        try:
            rows = self._open().shuffle(seed=reading.seed, buffer_size=_SHUFFLED_AHEAD)
            for number, row in enumerate(rows, 1):
                document = document_of(row, f"{self.name}, row {number} of the stream", self._column, reading.render)
                if document is not None:
                    yield document
                    continue
                empty += 1
                if empty == number == _MOST_EMPTY:
                    raise OptionError(f"--calibration {self.name}: its first {empty:,} rows hold no text")
        except failures as error:
            raise OptionError(
                f"--calibration {self.name}: the dataset cannot be read ({_first_line(error)}); check its name, "
                "configuration and split and the connection, set HF_TOKEN if it is private or gated, or give a local "
                "file, or builtin (which works offline)"
            ) from error

    def _open(self) -> Any:
        """Open the stream; one part that is no configuration is tried as a split."""
        if len(self._parts) != 1:
            config, split = self._parts or (None, None)
            return _load(self._identity, config, split or "train")
        (part,) = self._parts
        try:
            return _load(self._identity, part, "train")
        except ValueError as error:
            try:
                return _load(self._identity, None, part or "train")
            except ValueError as second:
                raise ValueError(f"{_first_line(error)}; {_first_line(second)}") from error


def _load(name: str, config: str | None, split: str) -> Any:
    import datasets  # only where a dataset is read: it imports pandas

    return datasets.load_dataset(name, name=config, split=split, streaming=True)


def _failures() -> tuple[type[Exception], ...]:
    """What `datasets` raises for names it does not find, servers it does not reach and files it cannot read."""
    from datasets.exceptions import DatasetsError

    from inferencex.convert.source.hub import TransportError

    return (OSError, ValueError, DatasetsError, TransportError)


def _first_line(error: Exception) -> str:
    return next(islice((line.strip() for line in str(error).splitlines() if line.strip()), 1), type(error).__name__)
