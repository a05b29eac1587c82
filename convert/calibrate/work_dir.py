"""The directory where finished blocks wait, so that an interrupted conversion continues where it was.

    work.json               what the conversion was asked to do, and of which model: its fingerprint
    block-00007.safetensors quantized and folded tensors of block 7, and its part of the report
    refined.safetensors     the same of all blocks, after refinement over the whole model

Every file appears whole or not at all. A directory that belongs to another conversion is refused, never emptied.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from inferencex.formats.errors import OptionError, QuantizationError
from inferencex.formats.packing import QuantizedTensor

_DESCRIPTION = "work.json"
_VERSION = 3
_PARTIAL = "work.partial"
_LOCK = ".lock"
_CONTENTS = "contents"
_ARRAYS = ("plain", "factors", "row_divisors", "kv_scales")


@dataclass
class FinishedBlock:
    """What calibration decided about one block.

    quantized:     packed weights by name, their columns multiplied by the factors of what they read
    plain:         float32 tensors that factors changed, by name: scales of norms, biases, weights that stay plain
    factors:       float32 `[K]` by the name of the input that is divided by them
    row_divisors:  float32 `[N]` by the name of a quantized weight whose rows have to be divided by them
    input_ranges:  largest absolute input by the name of a weight whose inputs have one scale
    kv_scales:     float32 `[2, G]`, of keys and of values, by the number of the layer of attention
    report:        what the report says of each layer, as JSON
    kv_report:     what it says of keys and values, as JSON
    """

    quantized: dict[str, QuantizedTensor] = field(default_factory=dict)
    plain: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    factors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    row_divisors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    input_ranges: dict[str, float] = field(default_factory=dict)
    kv_scales: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    report: list[dict[str, Any]] = field(default_factory=list)
    kv_report: list[dict[str, Any]] = field(default_factory=list)


class WorkDir:
    """Finished blocks of one conversion, in a directory.

    `fingerprint` says everything that the numbers depend on. Raises OptionError when the directory holds something
    else, QuantizationError when a file in it is damaged.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        wanted = {"version": _VERSION, **json.loads(json.dumps(fingerprint))}
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        description = path / _DESCRIPTION
        self._lock = _locked(path)
        try:
            if description.exists():
                _check_same(path, _read_json(description), wanted)
            else:
                _write_whole(description, json.dumps(wanted, indent=1, sort_keys=True).encode())
        except OptionError:
            self.close()
            raise

    def close(self) -> None:
        """Let others use the directory."""
        self._lock.close()

    def finished(self, index: int | str) -> bool:
        """Tell whether a block, or what else has such a name, is there."""
        return self._file(index).exists()

    def save(self, index: int | str, block: FinishedBlock) -> None:
        """Keep a block, or under a name what goes over all blocks.

        After this returns it survives a crash of the process, and of the machine. Raises QuantizationError where it
        cannot be written.
        """
        contents: dict[str, Any] = {
            "block": self._file(index).name,
            "report": block.report,
            "kv_report": block.kv_report,
            "input_ranges": block.input_ranges,
            "quantized": {},
        }
        tensors: dict[str, NDArray[np.uint8]] = {}
        for kind in _ARRAYS:
            arrays = getattr(block, kind)
            contents[kind] = {name: _put(tensors, f"{kind}:{name}", array) for name, array in arrays.items()}
        for name, tensor in block.quantized.items():
            entry = {}
            for part in dataclasses.fields(tensor):
                value = getattr(tensor, part.name)
                key = f"{part.name}:{name}"
                entry[part.name] = _put(tensors, key, value) if isinstance(value, np.ndarray) else {"value": value}
            contents["quantized"][name] = entry
        temporary = self._file(index).with_suffix(".partial")
        try:
            save_file(tensors, temporary, metadata={_CONTENTS: json.dumps(contents, sort_keys=True)})
        except (safetensors.SafetensorError, OSError) as error:
            temporary.unlink(missing_ok=True)
            raise QuantizationError(
                f"{self._file(index)}: cannot be written ({error}); once that is put right, the same command with "
                "--work-dir goes on from the blocks that are finished"
            ) from error
        _commit(temporary, self._file(index))

    def load(self, index: int | str) -> FinishedBlock:
        """Return a block that is there; its arrays are memory-mapped. Raises QuantizationError when it is damaged."""
        path = self._file(index)
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                contents = json.loads(file.metadata()[_CONTENTS])
                arrays = {
                    kind: {name: _take(file, f"{kind}:{name}", entry) for name, entry in contents[kind].items()}
                    for kind in _ARRAYS
                }
                quantized = {name: _tensor(file, name, parts) for name, parts in contents["quantized"].items()}
        except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise QuantizationError(
                f"{path}: a finished block that cannot be read ({error}); delete this file, and it is made again"
            ) from error
        if contents["block"] != path.name:
            raise QuantizationError(
                f"{path}: holds what was finished as {contents['block']}; delete this file, and it is made again"
            )
        return FinishedBlock(
            quantized,
            **arrays,
            input_ranges=contents["input_ranges"],
            report=contents["report"],
            kv_report=contents["kv_report"],
        )

    def _file(self, index: int | str) -> Path:
        name = index if isinstance(index, str) else f"block-{index:05d}"
        return self.path / f"{name}.safetensors"


def check_work_dir(path: Path, *, output: Path, source: Path | None) -> None:
    """Refuse, before any work, a directory that cannot be used; raises OptionError.

    output:  the bundle to be
    source:  the file or folder of the model, where it is on this machine
    """
    target, bundle = path.resolve(), output.resolve()
    if target.is_relative_to(bundle) or bundle.is_relative_to(target):
        raise OptionError(f"--work-dir {path} is --output, lies in it or holds it; give a directory of its own")
    if source is not None and source.is_dir() and target.is_relative_to(source.resolve()):
        raise OptionError(f"--work-dir {path} is or lies in the model's folder; give a directory outside of it")
    if path.is_symlink() and not path.exists():
        raise OptionError(f"--work-dir {path} is a symbolic link to nothing; give a directory")
    _refuse_foreign(path)
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir():
        raise OptionError(f"--work-dir {path}: {existing} is a file; give another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"--work-dir {path}: {existing} cannot be written to; give another directory")


def _refuse_foreign(path: Path) -> None:
    """Refuse what is no directory, or one with files but without a description of a conversion."""
    if not path.exists():
        return
    if not path.is_dir():
        raise OptionError(f"--work-dir {path} is a file; give a directory")
    others = sorted(file.name for file in path.iterdir() if file.name not in (_LOCK, _PARTIAL))
    if others and _DESCRIPTION not in others:
        raise OptionError(
            f"--work-dir {path} holds files that are not of a conversion ({others[0]}); "
            "give an empty or a new directory"
        )


def _locked(path: Path) -> IO[bytes]:
    """Hold a directory for this process, until the file that is returned is closed."""
    lock = open(path / _LOCK, "ab")  # noqa: SIM115 (held beyond this function)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise OptionError(
            f"--work-dir {path} is in use by another conversion; wait for it, or give another directory"
        ) from None
    return lock


def _put(tensors: dict[str, NDArray[np.uint8]], key: str, array: NDArray[Any]) -> dict[str, Any]:
    tensors[key] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"dtype": array.dtype.name, "shape": list(array.shape)}


def _take(file: Any, key: str, entry: Mapping[str, Any]) -> NDArray[Any]:
    name = entry["dtype"]
    dtype = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    array: NDArray[Any] = file.get_tensor(key).view(dtype).reshape(entry["shape"])
    return array


def _tensor(file: Any, name: str, parts: Mapping[str, Any]) -> QuantizedTensor:
    values: dict[str, Any] = {
        key: entry["value"] if "value" in entry else _take(file, f"{key}:{name}", entry) for key, entry in parts.items()
    }
    return QuantizedTensor(**{**values, "shape": tuple(values["shape"])})


def _check_same(path: Path, found: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(found, dict):
        raise OptionError(f"{path / _DESCRIPTION} is not the description of a conversion; give another --work-dir")
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differing:
        where, was, now = _first_difference(found, dict(wanted))
        raise OptionError(
            f"--work-dir {path} holds blocks of a different conversion: {', '.join(differing)} differ"
            f" ({where} was {_short(was)}, is {_short(now)}). Give another directory, or delete this one"
        )


def _first_difference(found: Any, wanted: Any, where: str = "") -> tuple[str, Any, Any]:
    """Return the place of the first, innermost difference of two JSON values, and both values there."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted}):
            if found.get(key) != wanted.get(key):
                return _first_difference(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for index, (was, now) in enumerate(zip(found, wanted, strict=True)):
            if was != now:
                named = was[0] if isinstance(was, list) and was and isinstance(was[0], str) else index
                return _first_difference(was, now, f"{where}[{named}]")
    return where, found, wanted


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read ({error}); give another --work-dir") from error


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(data)
    _commit(temporary, path)


def _commit(temporary: Path, path: Path) -> None:
    """Give a written file its name once its bytes are on the disk."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
