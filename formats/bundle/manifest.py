"""`bundle.json`: what a bundle is, where it came from, and the size and hash of every file in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from inferencex.formats.bundle.layout import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    MAX_ELEMENTS,
    MAX_MANIFEST_SIZE,
    MAX_RANK,
    check_file_name,
)
from inferencex.formats.bundle.origins import WeightOrigin, parse_origins
from inferencex.formats.errors import BundleError
from inferencex.formats.packing import NUMBER_BITS, Number
from inferencex.formats.records import record

JsonObject = dict[str, Any]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_SIZE = 1 << 50
_QUANTIZATION_FIELDS = {"bits", "group_size", "symmetric", "shape", "scales", "zero_points", "method"}


@record(frozen=True)
class FileRecord:
    """Size in bytes and sha256 (hexadecimal) of one file."""

    size: int
    sha256: str


@record(frozen=True)
class TensorQuantization:
    """How one quantized tensor is stored, see `packing.QuantizedTensor`.

    `scales`, `zero_points` and `tensor_scale` name the tensors beside it.
    """

    bits: int
    group_size: int
    symmetric: bool
    shape: tuple[int, ...]
    scales: str
    zero_points: str | None
    method: str
    number: Number = "int"
    tensor_scale: str | None = None


@record(frozen=True)
class Manifest:
    """The contents of `bundle.json`.

    source:        where the weights came from (id, revision, file hashes), free-form JSON
    architecture:  facts a reader of the bundle wants without opening the graph, free-form JSON
    scheme:        the quantization asked for, free-form JSON
    quantization:  every quantized tensor, by name
    tools:         versions of the programs that made the bundle
    made_of:       every weight that comes from the checkpoint, by name: which parameters its rows are; empty in
                   bundles of versions that did not record it
    files:         every file of the bundle but `bundle.json` itself and the reports, which hold timings and are
                   therefore not part of what equal inputs make equal
    """

    source: JsonObject = field(default_factory=dict)
    architecture: JsonObject = field(default_factory=dict)
    scheme: JsonObject = field(default_factory=dict)
    quantization: Mapping[str, TensorQuantization] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    made_of: Mapping[str, WeightOrigin] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """Return the JSON text, UTF-8; equal manifests give equal bytes.

        Raises BundleError when a free-form part holds something JSON has no form for.
        """
        document = {
            "format_version": self.format_version,
            "source": self.source,
            "architecture": self.architecture,
            "scheme": self.scheme,
            "quantization": {name: asdict(entry) for name, entry in self.quantization.items()},
            "tools": dict(self.tools),
            "made_of": {name: origin.to_json() for name, origin in self.made_of.items()},
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        try:
            text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
            return (text + "\n").encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST_FILE}: cannot be written as JSON: {error}") from error


def parse_manifest(data: bytes) -> Manifest:
    """Read `bundle.json`; raises BundleError naming the entry that is wrong."""
    document = parse_json_object(data, MANIFEST_FILE, MAX_MANIFEST_SIZE)
    version = document.get("format_version")
    if not _is_int(version):
        raise BundleError(f"{MANIFEST_FILE}: format_version is {_shown(version)}, expected a whole number")
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{MANIFEST_FILE}: format version {version} cannot be read by this program, which reads version "
            f"{FORMAT_VERSION}; convert the model again, or use the release that wrote the bundle"
        )
    expected = {"format_version", "source", "architecture", "scheme", "quantization", "tools", "files"}
    document.setdefault("made_of", {})
    expected.add("made_of")
    if set(document) != expected:
        missing, unknown = sorted(expected - set(document)), sorted(set(document) - expected)
        raise BundleError(f"{MANIFEST_FILE}: entries missing: {missing}; entries not known: {_shown(unknown)}")
    tools = _object(document, "tools")
    for name, tool_version in tools.items():
        if not isinstance(tool_version, str):
            raise BundleError(f"{MANIFEST_FILE}: tools.{_shown(name)} is {_shown(tool_version)}, expected a text")
    return Manifest(
        source=_object(document, "source"),
        architecture=_architecture(_object(document, "architecture")),
        scheme=_object(document, "scheme"),
        quantization={name: _quantization(name, entry) for name, entry in _object(document, "quantization").items()},
        tools=tools,
        made_of=parse_origins(_object(document, "made_of")),
        files={name: _file_record(name, entry) for name, entry in _object(document, "files").items()},
    )


def parse_json_object(data: bytes, where: str, limit: int) -> JsonObject:
    """Read strict JSON: one object, UTF-8, no duplicate names, no NaN; raises BundleError naming `where`."""
    if len(data) > limit:
        raise BundleError(f"{where}: {len(data)} bytes of JSON, the limit is {limit}")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise BundleError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:
        raise BundleError(f"{where}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise BundleError(f"{where}: expected a JSON object, found {_shown(document)}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)[:80]!r} occurs twice")
    return document


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _quantization(name: str, entry: object) -> TensorQuantization:
    where = f"{MANIFEST_FILE}: quantization of {_shown(name)}"
    if not isinstance(entry, dict) or entry.keys() - {"number", "tensor_scale"} != _QUANTIZATION_FIELDS:
        raise BundleError(
            f"{where}: expected an object with {sorted(_QUANTIZATION_FIELDS)}, and perhaps number and tensor_scale, "
            f"found {_shown(entry)}"
        )
    number, tensor_scale = entry.get("number", "int"), entry.get("tensor_scale")
    if not isinstance(number, str) or number not in NUMBER_BITS:
        raise BundleError(f"{where}: number is {_shown(number)}, expected {', '.join(NUMBER_BITS)}")
    shape, symmetric, zero_points = entry["shape"], entry["symmetric"], entry["zero_points"]
    right_shape = isinstance(shape, list) and 2 <= len(shape) <= MAX_RANK
    if not right_shape or not all(_is_int(size) and 0 < size <= MAX_ELEMENTS for size in shape):
        raise BundleError(f"{where}: shape is {_shown(shape)}, expected two or more positive whole numbers")
    if not _is_int(entry["bits"]) or entry["bits"] not in NUMBER_BITS[number]:
        expected = " or ".join(map(str, NUMBER_BITS[number]))
        raise BundleError(f"{where}: bits is {_shown(entry['bits'])}, expected {expected} for number {number!r}")
    group_size = entry["group_size"]
    if not _is_int(group_size) or not (group_size == -1 or 1 <= group_size <= MAX_ELEMENTS):
        raise BundleError(f"{where}: group_size is {_shown(group_size)}, expected a positive number or -1")
    if not isinstance(symmetric, bool) or not isinstance(entry["method"], str):
        raise BundleError(f"{where}: symmetric must be true or false, and method a text")
    right_names = isinstance(entry["scales"], str) and (zero_points is None or isinstance(zero_points, str))
    if not right_names or symmetric != (zero_points is None):
        raise BundleError(
            f"{where}: scales and zero_points must name tensors, zero_points exactly when asymmetric; "
            f"found scales {_shown(entry['scales'])}, zero_points {_shown(zero_points)}, symmetric {symmetric}"
        )
    if not (tensor_scale is None or isinstance(tensor_scale, str)):
        raise BundleError(f"{where}: tensor_scale is {_shown(tensor_scale)}, expected the name of a tensor, or null")
    return TensorQuantization(
        entry["bits"],
        group_size,
        symmetric,
        tuple(shape),
        entry["scales"],
        zero_points,
        entry["method"],
        number,
        tensor_scale,
    )


def _architecture(entry: JsonObject) -> JsonObject:
    """Check the entries that programs count on; others may be anything."""
    where = f"{MANIFEST_FILE}: architecture"
    for name, least in (("max_model_len", 1), ("parameters", 0), ("length_independent_up_to", 0)):
        if name in entry and not (_is_int(entry[name]) and entry[name] >= least):
            raise BundleError(f"{where}.{name} is {_shown(entry[name])}, expected a whole number of at least {least}")
    counts = {"folded": entry.get("folded", {})}
    operators = entry.get("operators", {})
    if not isinstance(operators, dict):
        raise BundleError(f"{where}.operators is {_shown(operators)}, expected an object")
    counts |= {f"operators.{name}": value for name, value in operators.items()}
    for name, value in counts.items():
        if not isinstance(value, dict) or not all(_is_int(count) for count in value.values()):
            raise BundleError(f"{where}.{name} is {_shown(value)}, expected whole numbers by name")
    return entry


def _file_record(name: str, entry: object) -> FileRecord:
    check_file_name(name, f"{MANIFEST_FILE}: files")
    where = f"{MANIFEST_FILE}: files.{_shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"size", "sha256"}:
        raise BundleError(f"{where}: expected an object with size and sha256, found {_shown(entry)}")
    size, digest = entry["size"], entry["sha256"]
    if not _is_int(size) or not 0 <= size <= _MAX_FILE_SIZE:
        raise BundleError(f"{where}: size is {_shown(size)}, expected a number of bytes")
    if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
        raise BundleError(f"{where}: sha256 is {_shown(digest)}, expected 64 hexadecimal digits")
    return FileRecord(size, digest)


def _object(document: JsonObject, name: str) -> JsonObject:
    value = document[name]
    if not isinstance(value, dict):
        raise BundleError(f"{MANIFEST_FILE}: {name} is {_shown(value)}, expected an object")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Return `value` short enough for a message, whatever it is."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else text[:77] + "..."
