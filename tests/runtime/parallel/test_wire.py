"""Messages between ranks: what is sent arrives, and what is no message is refused."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from inferencex.runtime.parallel.wire import MAX_HEADER, ClosedError, Message, receive, send

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_a_message_arrives(pair: Pair) -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.int32), np.array([7], np.int32)]
    send(pair[0], Message("step", {"text": "ä", "number": 3}, arrays))
    send(pair[0], Message("close"))
    found = receive(pair[1])
    assert (found.kind, found.fields) == ("step", {"text": "ä", "number": 3})
    for one, other in zip(found.arrays, arrays, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.shape == other.shape
    assert receive(pair[1]) == Message("close", {}, [])


def _raw(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<I", MAX_HEADER + 1),
        _raw(b"\xff"),
        _raw(b"[]"),
        _raw({"kind": "step"}),
        _raw({"kind": "step", "fields": {}, "arrays": [["object", [1]]]}),
        _raw({"kind": "step", "fields": {}, "arrays": [["int32", [-1, -1]]]}),
        _raw({"kind": "step", "fields": {}, "arrays": [["int32", [1 << 40]]]}),
        _raw({"kind": "step", "fields": {}, "arrays": [["int32", ["x"]]]}),
        _raw({"kind": "step", "fields": {}, "arrays": [["int32", [4]]]}) + b"short",
    ],
)
def test_what_is_no_message_is_refused(pair: Pair, data: bytes) -> None:
    pair[0].sendall(data)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ClosedError):
        receive(pair[1])


def test_sending_to_nobody_is_an_error(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(ClosedError):
        send(pair[0], Message("step"))
