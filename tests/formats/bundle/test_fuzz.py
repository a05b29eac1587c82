"""Whatever bytes a bundle holds, opening it works or raises BundleError."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencex.formats.bundle import Bundle, BundleWriter
from inferencex.formats.bundle.header import read_header
from inferencex.formats.bundle.layout import HEADER_RESERVE
from inferencex.formats.bundle.manifest import parse_manifest
from inferencex.formats.errors import BundleError
from tests.formats.bundle.small import fill
from tests.formats.bundle.test_reader import SHARD, replace_header, vouch_for

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "bundle"
    with BundleWriter(path) as writer:
        fill(writer)
        return writer.commit()


@pytest.fixture
def restored(pristine: Path) -> Iterator[Path]:
    """The bundle; its files are put back when the test is done."""
    contents = {file: file.read_bytes() for file in pristine.iterdir()}
    yield pristine
    for file, data in contents.items():
        file.write_bytes(data)


def opens_or_refuses(path: Path) -> None:
    try:
        bundle = Bundle.open(path)
        _ = bundle.model
        assert all(str(node) for node in bundle.graph)  # a node's text shows its attributes, and so reads them
        for value in bundle.graph.initializers.values():
            assert value.constant is None or value.numpy().shape == value.shape
        for name in bundle.stored:
            bundle.tensor(name)
    except BundleError as error:
        assert str(error)
        assert "\n" not in str(error)[:80]


def paths_into(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths_into(child, (*path, key))


def mutated(document: Any, data: st.DataObject) -> Any:
    """Return the document with one of its values, at any depth, replaced, removed or renamed."""
    document = json.loads(json.dumps(document))
    path = data.draw(st.sampled_from(sorted(paths_into(document), key=str)))
    if not path:
        return data.draw(JSON)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    action = data.draw(st.sampled_from(["replace", "remove", "rename"]))
    if action == "replace" or isinstance(parent, list):
        parent[path[-1]] = data.draw(JSON)
    else:
        value = parent.pop(path[-1])
        if action == "rename":
            parent[data.draw(st.text(max_size=12))] = value
    return document


fuzzing = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@fuzzing
@given(st.data())
def test_manifest_values(restored: Path, data: st.DataObject) -> None:
    file = restored / "bundle.json"
    original = file.read_bytes()
    file.write_text(json.dumps(mutated(json.loads(original), data)))
    opens_or_refuses(restored)
    file.write_bytes(original)


@fuzzing
@given(st.data())
def test_weight_header_values(restored: Path, data: st.DataObject) -> None:
    original = {name: (restored / name).read_bytes() for name in (SHARD, "bundle.json")}
    header = json.loads(original[SHARD][8:HEADER_RESERVE])
    replace_header(restored, json.dumps(mutated(header, data)).encode())
    opens_or_refuses(restored)
    for name, content in original.items():
        (restored / name).write_bytes(content)


@fuzzing
@given(name=st.sampled_from([SHARD, "model.onnx"]), data=st.data())
def test_flipped_bytes_and_truncations(restored: Path, name: str, data: st.DataObject) -> None:
    original = {file: (restored / file).read_bytes() for file in (name, "bundle.json")}
    content = np.frombuffer(original[name], dtype=np.uint8).copy()
    # Most of a weight file's header is padding; half of the changes go to what is not.
    interesting = min(len(content), 700)
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, interesting - 1) | st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    size = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    (restored / name).write_bytes(content[:size].tobytes())
    vouch_for(restored, name)
    opens_or_refuses(restored)
    for file, back in original.items():
        (restored / file).write_bytes(back)


def refuses(parse: Callable[[], object]) -> None:
    try:
        parse()
    except BundleError as error:
        assert str(error)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_manifest(data: bytes) -> None:
    refuses(lambda: parse_manifest(data))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_as_weights(tmp_path: Path, data: bytes, with_length: bool) -> None:
    file = tmp_path / "weights"
    file.write_bytes(len(data).to_bytes(8, "little") + data if with_length else data)
    refuses(lambda: read_header(file))
