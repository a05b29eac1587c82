"""Damaged and hostile bundles: each is refused, with the name of what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.layout import HEADER_RESERVE
from inferencex.formats.errors import BundleError

SHARD = "weights-00001-of-00001.safetensors"
MakeBundle = Callable[..., Path]


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / "bundle.json").read_text())
    edit(document)
    (path / "bundle.json").write_text(json.dumps(document))


def vouch_for(path: Path, name: str) -> None:
    """Make the manifest agree with a file that was tampered with."""
    data = (path / name).read_bytes()
    record = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(path, lambda document: document["files"].update({name: record}))


def edit_graph(path: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    model = onnx.load(str(path / "model.onnx"), load_external_data=False)
    edit(model)
    (path / "model.onnx").write_bytes(model.SerializeToString())
    vouch_for(path, "model.onnx")


def edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = path / SHARD
    data = file.read_bytes()
    header = json.loads(data[8:HEADER_RESERVE])
    edit(header)
    replace_header(path, json.dumps(header).encode())


def replace_header(path: Path, text: bytes) -> None:
    file = path / SHARD
    data = file.read_bytes()
    length = HEADER_RESERVE - 8
    file.write_bytes(length.to_bytes(8, "little") + text.ljust(length) + data[HEADER_RESERVE:])
    vouch_for(path, SHARD)


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def set_external(model: onnx.ModelProto, name: str, key: str, value: str) -> None:
    entry = next(item for item in initializer(model, name).external_data if item.key == key)
    entry.value = value


MANIFEST_EDITS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(format_version=2), "format version 2 cannot be read .* convert the model again"),
    (lambda d: d.update(format_version="1"), "format_version is"),
    (lambda d: d.update(format_version=True), "format_version is"),
    (lambda d: d.pop("format_version"), "format_version is null"),
    (lambda d: d.pop("tools"), r"entries missing: \['tools'\]"),
    (lambda d: d.update(extra=1), "not known"),
    (lambda d: d.update(source=[]), "source is"),
    (lambda d: d.update(tools={"a": 1}), "tools"),
    (lambda d: d["architecture"].update(max_model_len=0), r"architecture\.max_model_len is 0"),
    (lambda d: d["architecture"].update(max_model_len="9"), r"architecture\.max_model_len is .9."),
    (lambda d: d["architecture"].update(parameters=None), r"architecture\.parameters is null"),
    (lambda d: d["architecture"].update(length_independent_up_to=1.5), r"length_independent_up_to is 1\.5"),
    (lambda d: d["architecture"].update(folded=[]), r"architecture\.folded is \[\]"),
    (lambda d: d["architecture"].update(operators=3), r"architecture\.operators is 3"),
    (lambda d: d["architecture"].update(operators={"after": {"Gemm": "1"}}), r"operators\.after is"),
    (lambda d: d["files"].pop("model.onnx"), "lists no model.onnx"),
    (lambda d: d["files"].pop(SHARD), f"'{SHARD}', which is not a weight file of this bundle"),
    (lambda d: d["files"].update({"../../etc/passwd": d["files"]["config.json"]}), "not the name of a file inside"),
    (lambda d: d["files"].update({"/etc/passwd": d["files"]["config.json"]}), "not the name of a file inside"),
    (lambda d: d["files"].update({"a/../b": d["files"]["config.json"]}), "not the name of a file inside"),
    (lambda d: d["files"].update({"c:\\x": d["files"]["config.json"]}), "not the name of a file inside"),
    (lambda d: d["files"].update({"a\x00b": d["files"]["config.json"]}), "not the name of a file inside"),
    (lambda d: d["files"].update({"absent.txt": d["files"]["config.json"]}), "absent.txt: is missing"),
    (lambda d: d["files"]["config.json"].update(size=-1), "size is -1"),
    (lambda d: d["files"]["config.json"].update(size=10**30), "size is"),
    (lambda d: d["files"]["config.json"].update(size=1.5), "size is 1.5"),
    (lambda d: d["files"]["config.json"].update(sha256="xyz"), "sha256 is"),
    (lambda d: d["files"].update({"config.json": None}), "expected an object with size and sha256"),
    (lambda d: d["quantization"].update(up=3), "quantization of .up.: expected an object"),
    (lambda d: d["quantization"]["up"].update(bits=7), "bits is 7"),
    (lambda d: d["quantization"]["up"].update(bits=8), "quantization of 'up'"),
    (lambda d: d["quantization"]["up"].update(group_size=0), "group_size is 0"),
    (lambda d: d["quantization"]["up"].update(group_size=5), "block size 4, bundle.json says 'up' has groups of 5"),
    (lambda d: d["quantization"]["up"].update(shape=[7]), "shape is"),
    (lambda d: d["quantization"]["up"].update(shape=[7, 11]), "quantization of 'up'"),
    (lambda d: d["quantization"]["up"].update(shape=[2**40, 2**40]), "quantization of 'up'"),
    (lambda d: d["quantization"]["up"].update(scales="gone"), "no tensor is named 'gone'"),
    (lambda d: d["quantization"]["up"].update(scales="down"), "scales are float32"),
    (lambda d: d["quantization"]["up"].update(zero_points=None), "exactly when asymmetric"),
    (lambda d: d["quantization"]["up"].update(symmetric=True, zero_points=None), "says INT4, model.onnx says UINT4"),
    (lambda d: d["quantization"].update(gone=d["quantization"]["up"]), "no tensor is named 'gone'"),
]


@pytest.mark.parametrize(("edit", "message"), MANIFEST_EDITS)
def test_manifests(make_bundle: MakeBundle, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    path = make_bundle()
    edit_manifest(path, edit)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.open(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"format_version": ' + b"1" * 10_000 + b"}", "not valid JSON"),
        (b'{"format_version": 1', "not valid JSON"),
    ],
)
def test_manifests_that_are_not_json(make_bundle: MakeBundle, data: bytes, message: str) -> None:
    path = make_bundle()
    (path / "bundle.json").write_bytes(data)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path)


HEADER_EDITS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda h: h["up"].update(data_offsets=[0, 35]), r"tensor '(up|down)'.* overlaps|overlaps"),
    (lambda h: h["up"].update(data_offsets=[5, 4]), "tensor 'up': U8 .* needs 35 bytes, its data_offsets span -1"),
    (lambda h: h["up"].update(data_offsets=[-4, 31]), "not two positions"),
    (lambda h: h["up"].update(data_offsets=[10**18, 10**18 + 35]), "not two positions"),
    (lambda h: h["up"].update(data_offsets=[10**14, 10**14 + 35]), "a gap of"),
    (lambda h: h["up"].update(data_offsets="ab"), "not two positions"),
    (lambda h: h["up"].update(data_offsets=[0]), "not two positions"),
    (lambda h: h["up"].update(data_offsets=[0.0, 35.0]), "not two positions"),
    (lambda h: h["up"].update(dtype="F4"), "'F4' is not one of"),
    (lambda h: h["up"].update(dtype=None), "is not one of"),
    (lambda h: h["up"].update(dtype="F16"), "needs 70 bytes"),
    (lambda h: h["up"].update(dtype="I8"), "is stored as U8"),
    (lambda h: h["up"].update(shape=[5, 7]), r"'up'.* is stored as U8 \[35\], .* holds U8 \[5, 7\]"),
    (lambda h: h["up"].update(shape=[-35]), "not a list of up to"),
    (lambda h: h["up"].update(shape=[True, 35]), "not a list of up to"),
    (lambda h: h["up"].update(shape=[1] * 30 + [35]), "not a list of up to"),
    (lambda h: h["up"].update(shape=[2**47, 2**47, 2**47]), "needs"),
    (lambda h: h["up"].update(shape=35), "not a list of up to"),
    (lambda h: h["up"].update(more=1), "exactly dtype, shape and data_offsets"),
    (lambda h: h.update(up=[]), "exactly dtype, shape and data_offsets"),
    (lambda h: h.pop("up"), "gap|end at byte"),
    (lambda h: h.update(other=h.pop("up")), "initializer 'up': .* holds no tensor of this name"),
    (lambda h: h.update({"x" * 2000: h.pop("up")}), "names have 1 to"),
    (
        lambda h: h.update({"up.scales": h["up.zero_points"], "up.zero_points": h["up.scales"]}),
        "initializer 'up.(scales|zero_points)': points to",
    ),
]


@pytest.mark.parametrize(("edit", "message"), HEADER_EDITS)
def test_weight_headers(make_bundle: MakeBundle, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    path = make_bundle()
    edit_header(path, edit)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ((1 << 63).to_bytes(8, "little"), "the limit is 100000000"),
        ((99_999_999).to_bytes(8, "little"), "it is truncated"),
        ((0).to_bytes(8, "little"), "does not start with"),
        (b"PK\x03\x04" + bytes(4), "header"),
    ],
)
def test_header_lengths(make_bundle: MakeBundle, prefix: bytes, message: str) -> None:
    path = make_bundle()
    data = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(prefix + data[8:])
    vouch_for(path, SHARD)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path)


@pytest.mark.parametrize("size", [0, 7, 8, 1000, HEADER_RESERVE, HEADER_RESERVE + 100])
def test_truncated_weights(make_bundle: MakeBundle, size: int) -> None:
    path = make_bundle()
    os.truncate(path / SHARD, size)
    with pytest.raises(BundleError, match=rf"{SHARD}: has {size} bytes, bundle\.json says"):
        Bundle.open(path)
    vouch_for(path, SHARD)
    with pytest.raises(BundleError, match="truncated"):
        Bundle.open(path)


def test_trailing_bytes(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    with (path / SHARD).open("ab") as file:
        file.write(b"payload")
    vouch_for(path, SHARD)
    with pytest.raises(BundleError, match="followed by bytes that belong to nothing"):
        Bundle.open(path)


GRAPH_EDITS: list[tuple[Callable[[onnx.ModelProto], object], str]] = [
    (lambda m: set_external(m, "up", "location", "../other.bin"), "not the name of a file inside"),
    (lambda m: set_external(m, "up", "location", "/etc/passwd"), "not the name of a file inside"),
    (lambda m: set_external(m, "up", "location", "config.json"), "which is not a weight file"),
    (lambda m: set_external(m, "up", "offset", "-1"), "its offset is '-1'"),
    (lambda m: set_external(m, "up", "offset", "9" * 30), "its offset is"),
    (lambda m: set_external(m, "up", "offset", "٣"), "its offset is"),
    (lambda m: set_external(m, "up", "length", "36"), "points to 36 bytes"),
    (lambda m: set_external(m, "up", "offset", str(HEADER_RESERVE)), "points to 35 bytes at"),
    (lambda m: initializer(m, "up").external_data.add(key="offset", value="0"), "given twice"),
    (lambda m: initializer(m, "up").ClearField("external_data"), "not the name of a file inside"),
    (lambda m: initializer(m, "up").dims.__setitem__(0, 8), r"UINT4 \[8, 10\] is stored as U8 \[40\]"),
    (lambda m: initializer(m, "up").dims.__setitem__(0, -7), "not one a tensor can have"),
    (lambda m: initializer(m, "down").dims.extend([2**31, 2**31, 2**31]), "elements, the limit is"),
    (lambda m: setattr(initializer(m, "up"), "data_type", onnx.TensorProto.UINT8), "'up'.* is stored as U8"),
    (lambda m: setattr(initializer(m, "up"), "data_type", onnx.TensorProto.INT4), "model.onnx says INT4|expected INT4"),
    (lambda m: setattr(initializer(m, "up"), "data_type", 99), "element type 99"),
    (lambda m: setattr(initializer(m, "up"), "data_type", onnx.TensorProto.STRING), "element type 8"),
    (lambda m: setattr(initializer(m, "up"), "name", "down"), "two initializers are named 'down'|holds no|points to"),
    (lambda m: m.graph.initializer.append(initializer(m, "up")), "two initializers are named 'up'"),
    (lambda m: m.graph.initializer.remove(initializer(m, "down")), "uses 'down', which is neither an input"),
    (lambda m: forget(m, "down"), r"used by nothing in model.onnx: 'down'"),
    (lambda m: initializer(m, "bias").ClearField("raw_data"), "'bias': is not filled: 0 values held, 33 expected"),
    (lambda m: setattr(initializer(m, "bias"), "raw_data", b"1234"), "132 bytes expected"),
    (lambda m: m.ClearField("graph"), "holds no graph"),
    (lambda m: m.graph.node[0].attribute.remove(attribute(m, "block_size")), r"up_dequantized': .* expected \[10\]"),
    (lambda m: m.graph.node[1].input.__setitem__(0, "nobody"), "uses 'nobody', which is neither an input"),
    (lambda m: m.graph.node.remove(m.graph.node[0]), "which is neither an input, nor an initializer"),
    (lambda m: m.graph.node.insert(0, m.graph.node[2]), "nor made by an earlier node"),
    (lambda m: setattr(m.graph.output[0], "name", "z"), "the graph's output 'z' is made by no node"),
    (lambda m: setattr(attribute(m, "axis"), "i", 7), "axis 7 and block size 4 do not fit rank 2"),
    (lambda m: setattr(attribute(m, "block_size"), "i", 3), r"'up.scales' are \[7, 3\], expected \[7, 4\]"),
    (lambda m: setattr(attribute(m, "block_size"), "i", -3), "block size -3"),
    (lambda m: m.graph.node[0].input.__setitem__(2, "down"), "zero points 'down' are FLOAT"),
]


def forget(model: onnx.ModelProto, name: str) -> None:
    """Remove an initializer, and have nodes read the graph's input instead."""
    model.graph.initializer.remove(initializer(model, name))
    for node in model.graph.node:
        for place, used in enumerate(node.input):
            node.input[place] = model.graph.input[0].name if used == name else used


def attribute(model: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    return next(item for item in model.graph.node[0].attribute if item.name == name)


@pytest.mark.parametrize(("edit", "message"), GRAPH_EDITS)
def test_graphs(make_bundle: MakeBundle, edit: Callable[[onnx.ModelProto], object], message: str) -> None:
    path = make_bundle()
    edit_graph(path, edit)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"not a model", b"\x08\x0b"])
def test_graphs_that_are_not_onnx(make_bundle: MakeBundle, data: bytes) -> None:
    path = make_bundle()
    (path / "model.onnx").write_bytes(data)
    vouch_for(path, "model.onnx")
    with pytest.raises(BundleError, match="not an ONNX model"):
        Bundle.open(path)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_scales_that_are_not_finite(make_bundle: MakeBundle, value: float) -> None:
    path = make_bundle()
    offset = Bundle.open(path).stored["up.scales"].offset
    with (path / SHARD).open("r+b") as file:
        file.seek(offset + 4)
        file.write(np.float16(value).tobytes())
    with pytest.raises(BundleError, match=r"'up\.scales' are not all finite"):
        Bundle.open(path)


def test_a_changed_byte_is_found_by_its_hash_only(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    with (path / SHARD).open("r+b") as file:
        file.seek(HEADER_RESERVE + 3)
        file.write(b"\x01")
    Bundle.open(path)
    with pytest.raises(BundleError, match=rf"{SHARD}: its sha256 is"):
        Bundle.open(path, verify=True)


@pytest.mark.parametrize("name", ["config.json", "model.onnx", SHARD, "bundle.json"])
def test_missing_files(make_bundle: MakeBundle, name: str) -> None:
    path = make_bundle()
    (path / name).unlink()
    with pytest.raises(BundleError, match=name):
        Bundle.open(path)


def test_links_that_lead_out(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    outside = tmp_path / "outside"
    (path / "config.json").rename(outside)
    (path / "config.json").symlink_to(outside)
    with pytest.raises(BundleError, match=r"config\.json: is a link that leads out of the bundle"):
        Bundle.open(path)


def test_a_link_in_a_circle(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")
    with pytest.raises(BundleError, match=r"config\.json"):
        Bundle.open(path)


def test_a_file_that_cannot_be_read(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    name = "/".join(["x" * 250] * 4)
    edit_manifest(path, lambda document: document["files"].update({name: document["files"]["config.json"]}))
    (path / ("x" * 250)).write_bytes(b"")
    with pytest.raises(BundleError, match=r"x: (is missing|cannot be read)"):
        Bundle.open(path)


def test_a_folder_in_place_of_a_file(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    with pytest.raises(BundleError, match=r"config\.json: is missing"):
        Bundle.open(path)


def test_places_that_are_not_bundles(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a folder"):
        Bundle.open(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"holds no bundle\.json"):
        Bundle.open(tmp_path)


def test_swapped_shards(make_bundle: MakeBundle) -> None:
    first, second = make_bundle("first"), make_bundle("second")
    edit_header(second, lambda header: header.update(renamed=header.pop("down")))
    (first / SHARD).write_bytes((second / SHARD).read_bytes())
    with pytest.raises(BundleError, match="holds no tensor of this name"):
        Bundle.open(first)


def test_asking_for_what_is_not_there(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle())
    with pytest.raises(BundleError, match="no tensor is named 'x'"):
        bundle.tensor("x")
    with pytest.raises(BundleError, match="'down' is not a quantized tensor"):
        bundle.quantized("down")
