"""The generated modules are those that the interface generates, and the interface says what everything means."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from inferencex.runtime.server.grpc.generate import FOLDER, GENERATED, PROTO, generate
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb

_MADE_BY = re.compile(r"^(?:# Protobuf Python Version|GRPC_GENERATED_VERSION).*$", re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools (extra [dev])")
def test_the_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    generate(tmp_path)
    there = {name: (FOLDER / name).read_text() for name in GENERATED}
    made = {name: (tmp_path / name).read_text() for name in GENERATED}
    if {name: _MADE_BY.findall(text) for name, text in there.items()} == {
        name: _MADE_BY.findall(text) for name, text in made.items()
    }:
        assert made == there, "run `make proto`"
    else:  # other tools write other code around the same interface
        serialized = pb.DESCRIPTOR.serialized_pb
        assert _serialized(made["inference_pb2.py"]) == serialized, "run `make proto`"


def test_everything_is_documented() -> None:
    lines = [line.strip() for line in (FOLDER / PROTO).read_text().splitlines()]
    declared = re.compile(r"(?:message|enum|service|rpc) \w+|(?:optional |repeated )?[\w.<>, ]+ \w+ = \d+;")
    undocumented = [line for before, line in pairwise(lines) if declared.match(line) and not before.startswith("//")]
    assert undocumented == []


def test_numbers_of_fields_are_never_used_twice() -> None:
    proto = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(proto)
    assert len(proto.message_type) > 20
    for message in proto.message_type:
        numbers = [field.number for field in message.field]
        assert numbers == list(range(1, len(numbers) + 1)), message.name


def _serialized(module: str) -> bytes:
    found = re.search(r"AddSerializedFile\((b'.*')\)", module)
    assert found is not None
    return bytes(eval(found[1]))
