"""What is written into a bundle, read back by it and by other programs, and uses of the writer that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors
import safetensors.numpy
from onnx.reference import ReferenceEvaluator

from inferencex.formats.bundle import Bundle, BundleWriter, Manifest
from inferencex.formats.bundle.layout import HEADER_RESERVE
from inferencex.formats.errors import BundleError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor
from tests.formats.bundle.small import CHANNELS, HIDDEN, fill, gather_model, plain_weight, small_model, small_quantized
from tests.formats.test_packing import random_tensor

MakeBundle = Callable[..., Path]


def write(path: Path, tensors: dict[str, np.ndarray], **options: int) -> Bundle:
    kinds = {
        name: (ir.DataType.from_numpy(array.dtype), tuple(int(size) for size in array.shape))
        for name, array in tensors.items()
    }
    with BundleWriter(path, **options) as writer:
        for name, array in tensors.items():
            writer.add_tensor(name, array, *kinds[name])
        writer.write_graph(gather_model(**kinds))
        writer.seal(Manifest())
        writer.commit()
    return Bundle.open(path, verify=True)


def test_other_programs_read_the_bundle(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    onnx.checker.check_model(str(path / "model.onnx"), full_check=True)
    model = onnx.load(str(path / "model.onnx"))
    x = np.random.default_rng(0).standard_normal((3, CHANNELS)).astype(np.float32)
    (y,) = ReferenceEvaluator(model).run(None, {"x": x})
    expected = x @ small_quantized().dequantize().T @ plain_weight().T + np.arange(33)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    tensors = safetensors.numpy.load_file(path / "weights-00001-of-00001.safetensors")
    np.testing.assert_array_equal(tensors["down"], plain_weight())
    np.testing.assert_array_equal(tensors["up"], small_quantized().values)


def test_what_is_written_is_read(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle(), verify=True)
    assert bundle.manifest.source == {"id": "small"}
    assert set(bundle.files) == {"model.onnx", "config.json", "weights-00001-of-00001.safetensors"}
    np.testing.assert_array_equal(bundle.quantized("up").dequantize(), small_quantized().dequantize())
    np.testing.assert_array_equal(bundle.tensor("down"), plain_weight())
    assert not bundle.tensor("down").flags.writeable
    value = bundle.model.graph.initializers["down"].const_value
    assert value is not None
    np.testing.assert_array_equal(value.numpy(), plain_weight())


def test_equal_inputs_give_equal_bytes(make_bundle: MakeBundle) -> None:
    first, second = make_bundle("a"), make_bundle("b")
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_tensors_start_at_cache_lines_where_their_sizes_allow(tmp_path: Path) -> None:
    tensors = {f"t{n}": np.arange(n, dtype=np.float16) for n in (32, 31, 64, 5, 16, 96, 24, 8)}
    bundle = write(tmp_path / "b", tensors)
    for name, stored in bundle.stored.items():
        size_alignment = stored.nbytes & -stored.nbytes
        assert stored.offset % min(64, size_alignment) == 0, name
        np.testing.assert_array_equal(bundle.tensor(name), tensors[name])


def test_every_type_survives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = [np.float32, np.float16, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_]
    kinds += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    tensors = {f"t{index}": rng.integers(0, 2, (3, 5)).astype(kind) for index, kind in enumerate(kinds)}
    tensors["scalar"] = np.array(2.5, dtype=np.float32)
    tensors["empty"] = np.empty((0, 4), dtype=np.float32)
    bundle = write(tmp_path / "b", tensors)
    for name, array in tensors.items():
        assert bundle.tensor(name).dtype == array.dtype
        np.testing.assert_array_equal(bundle.tensor(name), array)


def test_shards_are_numbered_and_limited(tmp_path: Path) -> None:
    tensors = {f"t{index}": np.full((256,), index, dtype=np.float32) for index in range(10)}
    tensors["odd"] = np.full((3,), 7, dtype=np.float32)
    limit = HEADER_RESERVE + 4 * 1024
    bundle = write(tmp_path / "b", tensors, max_shard_size=limit)
    shards = sorted(name for name in bundle.files if name.endswith(".safetensors"))
    assert shards == [f"weights-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    assert all(bundle.files[name].size <= limit for name in shards)
    for name, array in tensors.items():
        np.testing.assert_array_equal(bundle.tensor(name), array)


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    tensors = {"a": np.ones(16, np.float32), "large": np.ones(4096, np.float32), "b": np.ones(16, np.float32)}
    bundle = write(tmp_path / "b", tensors, max_shard_size=HEADER_RESERVE + 1024)
    assert len({stored.location for stored in bundle.stored.values()}) == 3


def test_a_full_header_starts_another_shard(tmp_path: Path) -> None:
    count = HEADER_RESERVE * 3 // 2 // 1000  # entries of about a thousand bytes
    tensors = {f"{'n' * 900}{index}": np.ones(16, np.float32) for index in range(count)}
    bundle = write(tmp_path / "b", tensors)
    assert len({stored.location for stored in bundle.stored.values()}) == 2
    for name in bundle.files:
        if name.endswith(".safetensors"):
            with safetensors.safe_open(tmp_path / "b" / name, "numpy") as file:
                assert file.keys()


def test_chunks_are_one_tensor(tmp_path: Path) -> None:
    array = np.arange(96, dtype=np.float32).reshape(12, 8)
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_tensor("t", (array[start : start + 5] for start in range(0, 12, 5)), ir.DataType.FLOAT, (12, 8))
        writer.add_tensor("columns", array.T, ir.DataType.FLOAT, (8, 12))
        shapes = {"t": (ir.DataType.FLOAT, (12, 8)), "columns": (ir.DataType.FLOAT, (8, 12))}
        writer.write_graph(gather_model(**shapes))
        writer.seal(Manifest())
        bundle = Bundle.open(writer.commit())
    np.testing.assert_array_equal(bundle.tensor("t"), array)
    np.testing.assert_array_equal(bundle.tensor("columns"), array.T)


def test_large_constants_leave_the_graph(tmp_path: Path) -> None:
    table = np.arange(1000, dtype=np.float32)
    small = np.arange(4, dtype=np.float32)
    model = gather_model(table=(ir.DataType.FLOAT, (1000,)), small=(ir.DataType.FLOAT, (4,)))
    model.graph.initializers["table"].const_value = ir.tensor(table)
    model.graph.initializers["small"].const_value = ir.tensor(small)
    with BundleWriter(tmp_path / "b") as writer:
        writer.write_graph(model)
        writer.seal(Manifest())
        bundle = Bundle.open(writer.commit())
    assert list(bundle.stored) == ["table"]
    np.testing.assert_array_equal(bundle.tensor("table"), table)
    value = bundle.model.graph.initializers["small"].const_value
    assert value is not None
    np.testing.assert_array_equal(value.numpy(), small)


def test_the_model_in_memory_reads_from_where_the_bundle_went(tmp_path: Path) -> None:
    model = small_model()
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_quantized("up", small_quantized(), method="rtn")
        writer.add_tensor("down", plain_weight(), ir.DataType.FLOAT, (33, HIDDEN))
        writer.write_graph(model)
        writer.seal(Manifest())
        writer.commit()
    value = model.graph.initializers["down"].const_value
    assert value is not None
    np.testing.assert_array_equal(value.numpy(), plain_weight())


def embedding_model(tensor: QuantizedTensor, *, gather_first: bool) -> ir.Model:
    """Return token_ids[T] -> y[T, K], with DequantizeLinear behind or in front of the Gather of rows."""
    ids = ir.Value(name="token_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))
    names = ["table", "table.scales", *([] if tensor.zero_points is None else ["table.zero_points"])]
    parts = [ir.Value(name=name) for name in names]
    attributes = {**tensor.attributes, "output_dtype": 1}
    if gather_first:
        nodes = [ir.node("Gather", [part, ids]) for part in parts]
        nodes.append(ir.node("DequantizeLinear", [node.outputs[0] for node in nodes], attributes=attributes))
    else:
        nodes = [ir.node("DequantizeLinear", parts, attributes=attributes)]
        nodes.append(ir.node("Gather", [nodes[0].outputs[0], ids]))
    output = nodes[-1].outputs[0]
    output.name, output.type = "y", ir.TensorType(ir.DataType.FLOAT)
    output.shape = ir.Shape(["T", tensor.shape[1]])
    graph = ir.Graph([ids], [output], nodes=nodes, initializers=parts, opset_imports={"": 23}, name="embedding")
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize("group_size", [PER_CHANNEL, 4])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantized_embeddings_are_gathered_row_by_row(
    tmp_path: Path, group_size: int, bits: int, symmetric: bool
) -> None:
    tensor = random_tensor((9, 10), bits, group_size, symmetric, seed=0)
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_quantized("table", tensor, method="rtn")
        # ONNX's Gather takes no 4-bit elements, so such a table is dequantized first and a backend fuses the two.
        writer.write_graph(embedding_model(tensor, gather_first=bits == 8))
        writer.seal(Manifest())
        path = writer.commit()
    onnx.checker.check_model(str(path / "model.onnx"), full_check=True)
    ids = np.array([8, 0, 3, 3], dtype=np.int64)
    (rows,) = ReferenceEvaluator(onnx.load(str(path / "model.onnx"))).run(None, {"token_ids": ids})
    bundle = Bundle.open(path)
    np.testing.assert_allclose(rows, bundle.quantized("table").dequantize()[ids], rtol=1e-6)
    stored = bundle.stored["table.scales"]
    with (path / stored.location).open("r+b") as file:
        file.seek(stored.offset)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(BundleError, match=r"'table\.scales' are not all finite"):
        Bundle.open(path)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_tensor("a", np.ones(3, np.float32), ir.DataType.FLOAT, (4,)), "'a': 12 bytes were given"),
        (lambda w: w.add_tensor("a", np.ones(5, np.float32), ir.DataType.FLOAT, (4,)), "'a': 20 bytes were given"),
        (lambda w: w.add_tensor("a", np.ones(4), ir.DataType.FLOAT, (4,)), "'a': a chunk is float64"),
        (lambda w: w.add_tensor("", np.ones(4, np.float32), ir.DataType.FLOAT, (4,)), "cannot name a tensor"),
        (lambda w: w.add_tensor("__metadata__", np.ones(1, np.int8), ir.DataType.INT8, (1,)), "cannot name"),
        (lambda w: [w.add_tensor("a", np.ones(1, np.int8), ir.DataType.INT8, (1,)) for _ in "12"], "stored twice"),
        (lambda w: w.write_graph(small_model()), "4 initializers were never stored: 'up'"),
        (lambda w: w.seal(Manifest()), "sealed once, after its graph"),
        (lambda w: w.commit(), "after it is sealed"),
        (lambda w: w.add_side_file("../x", b""), "not the name of a file inside"),
        (lambda w: w.add_side_file("/etc/x", b""), "not the name of a file inside"),
        (lambda w: w.add_side_file("bundle.json", b""), "is taken"),
        (lambda w: w.add_side_file("weights-00001-of-00001.safetensors", b""), "is taken"),
        (lambda w: [w.add_side_file("x", b""), w.add_side_file("x", b"")], "is taken"),
        (lambda w: [fill(w), w.add_side_file("x", b"")], "comes too late"),
        (lambda w: [fill(w), w.add_tensor("z", np.ones(1, np.int8), ir.DataType.INT8, (1,))], "no tensor can be added"),
        (lambda w: None, "left without being committed"),
    ],
)
def test_misuse_is_named_and_leaves_nothing(
    tmp_path: Path, add: Callable[[BundleWriter], object], message: str
) -> None:
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        add(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_stored_tensor_nobody_uses(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="1 stored tensors are not initializers of the graph: 'stray'"):  # noqa: SIM117
        with BundleWriter(tmp_path / "b") as writer:
            writer.add_tensor("stray", np.ones(2, np.float32), ir.DataType.FLOAT, (2,))
            fill(writer)
