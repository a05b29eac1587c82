from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from inferencex.formats.bundle.staging import scratch_folder
from inferencex.formats.errors import BundleError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor
from tests.formats.bundle.small import CHANNELS, HIDDEN, fill, plain_weight, small_model, small_quantized
from tests.formats.test_packing import random_tensor

MakeBundle = Callable[..., Path]


def hidden_leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def gather_model(**shapes: tuple[ir.DataType, tuple[int, ...]]) -> ir.Model:
    """Return a model with one initializer for each tensor named, all of them outputs."""
    values = [ir.Value(name=name) for name in shapes]
    nodes = [ir.node("Identity", [value]) for value in values]
    outputs = []
    for index, (node, (dtype, shape)) in enumerate(zip(nodes, shapes.values(), strict=True)):
        node.outputs[0].name = f"y{index}"
        node.outputs[0].type = ir.TensorType(dtype)
        node.outputs[0].shape = ir.Shape(shape)
        outputs.append(node.outputs[0])
    graph = ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 23}, name="gather")
    return ir.Model(graph, ir_version=11)


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


def test_the_staged_bundle_opens_before_it_is_in_place(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer)
        staged = Bundle.open(writer.staged, verify=True)
        assert not (tmp_path / "b").exists()
        np.testing.assert_array_equal(staged.tensor("down"), plain_weight())
        writer.add_report({"seconds": 1.5}, "# Report\n")
        writer.commit()
    assert json.loads((tmp_path / "b" / "report.json").read_text()) == {"seconds": 1.5}
    assert Bundle.open(tmp_path / "b", verify=True).files == staged.files
    assert hidden_leftovers(tmp_path) == []


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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), BundleWriter(tmp_path / "b") as writer:
        fill(writer)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_leaves_the_old_bundle(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    with pytest.raises(RuntimeError), BundleWriter(path, overwrite=True) as writer:
        fill(writer)
        raise RuntimeError
    Bundle.open(path, verify=True)
    assert hidden_leftovers(tmp_path) == []


def test_overwriting_needs_to_be_asked_for(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    with pytest.raises(BundleError, match="pass --overwrite"):
        BundleWriter(path)
    bundle = None
    with BundleWriter(path, overwrite=True) as writer:
        writer.add_tensor("other", np.ones(2, np.float32), ir.DataType.FLOAT, (2,))
        writer.write_graph(gather_model(other=(ir.DataType.FLOAT, (2,))))
        writer.seal(Manifest())
        bundle = Bundle.open(writer.commit())
    assert list(bundle.stored) == ["other"]
    assert not (path / "config.json").exists()
    assert hidden_leftovers(tmp_path) == []


def test_places_that_are_not_written_over(make_bundle: MakeBundle, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match=r"not a bundle's: thesis\.tex"):
        BundleWriter(documents, overwrite=True)
    bundle = make_bundle()
    (bundle / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"not a bundle's: notes\.txt"):
        BundleWriter(bundle, overwrite=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BundleError, match="is not a folder"):
        BundleWriter(file, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(documents)
    with pytest.raises(BundleError, match="symbolic link"):
        BundleWriter(link, overwrite=True)
    for source in (bundle, bundle / "model.gguf"):
        with pytest.raises(BundleError, match="where the source's files are"):
            BundleWriter(bundle, overwrite=True, source=source)
    assert (documents / "thesis.tex").read_text() == "years of work"


def test_a_folder_with_very_much_in_it_is_refused_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in range(40):
        (tmp_path / "home" / f"{folder:02}").mkdir(parents=True)
        (tmp_path / "home" / f"{folder:02}" / "file").write_text("")
    looked_into: list[object] = []
    scandir = os.scandir

    def count(path: Any) -> Any:
        looked_into.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", count)
    with pytest.raises(BundleError, match=r"not a bundle's: 00/file, 01/file, .*, 04/file, \.\.\.; move"):
        BundleWriter(tmp_path / "home")
    assert len(looked_into) < 10


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b" / "closed").mkdir(parents=True)
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BundleError, match=r"b/closed: cannot be looked into \(Permission denied\)"):
        BundleWriter(tmp_path / "b", overwrite=True)


def test_files_that_appear_while_the_bundle_is_written_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with pytest.raises(BundleError, match=r"not a bundle's: thesis\.tex"), BundleWriter(path, overwrite=True) as writer:
        fill(writer)
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
        writer.commit()
    assert [file.name for file in tmp_path.rglob("*")] == ["b", "thesis.tex"]


def test_an_empty_folder_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer)
        writer.commit()
    Bundle.open(tmp_path / "b")


def test_a_full_disk_is_noticed_first(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"needs .* MiB and .* MiB free"):
        BundleWriter(tmp_path / "deep" / "b", expected_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_RESERVE + 100_000, hard))
    try:
        with (
            pytest.raises(BundleError, match="written: File too large"),
            BundleWriter(tmp_path / "b") as writer,
        ):
            writer.add_tensor("t", np.ones((1000, 1000), np.float32), ir.DataType.FLOAT, (1000, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot be written: File exists"), BundleWriter(tmp_path / "file" / "b"):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.formats.bundle.small import fill
from inferencex.formats.bundle import BundleWriter
with BundleWriter(Path(sys.argv[1]), overwrite=True) as writer:
    fill(writer)
    print("filled", flush=True)
    sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "filled\n"
    return process


def test_what_a_killed_run_leaves_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_writer(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not path.exists()
    assert len(hidden_leftovers(tmp_path)) == 1
    with BundleWriter(path) as writer:
        fill(writer)
        assert len(hidden_leftovers(tmp_path)) == 1
        writer.commit()
    assert hidden_leftovers(tmp_path) == []
    Bundle.open(path, verify=True)


def test_what_is_needed_only_meanwhile_goes_with_what_a_killed_run_leaves(tmp_path: Path) -> None:
    abandoned = tmp_path / ".b.partial-00000000"
    (abandoned / "activations").mkdir(parents=True)
    with scratch_folder(tmp_path / "b") as outer, scratch_folder(tmp_path / "b") as inner:
        (inner / "spilled").write_bytes(b"x")
        assert hidden_leftovers(tmp_path) == sorted([outer.name, inner.name])
    with pytest.raises(KeyboardInterrupt), scratch_folder(tmp_path / "b"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "b"
    process = start_writer(path)
    (theirs,) = hidden_leftovers(tmp_path)
    with BundleWriter(path) as writer:
        fill(writer)
        writer.commit()
    assert hidden_leftovers(tmp_path) == [theirs]
    process.kill()
    process.communicate()


def test_a_replacement_cut_in_half_is_undone(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    path.rename(tmp_path / ".bundle.replaced-00000000")
    with pytest.raises(RuntimeError), BundleWriter(path):
        raise RuntimeError
    Bundle.open(path, verify=True)
