"""Messages between the first rank and another: a line of JSON and arrays, over a pair of sockets. Nothing is executed.

A message is the length of its header (4 bytes, little-endian), the header (JSON: its kind, fields, and the types and
shapes of its arrays), and the arrays' elements.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HEADER = 1 << 20
MAX_BYTES = 1 << 30
_DTYPES = {"int32": np.dtype("<i4")}


class ClosedError(Exception):
    """Raised where the other side is gone, or says something that is no message."""


class BusyError(ClosedError):
    """Raised where the other side takes nothing for as long as its socket waits, and maybe half of a message."""


@dataclass(frozen=True)
class Message:
    """Something said: its kind, what else JSON can say, and arrays of int32."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[NDArray[np.int32]] = ()


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. Raises ClosedError when nobody is there, BusyError when a socket with a timeout has waited."""
    arrays = [np.ascontiguousarray(array, dtype="<i4") for array in message.arrays]
    header = json.dumps(
        {"kind": message.kind, "fields": message.fields, "arrays": [["int32", array.shape] for array in arrays]}
    ).encode()
    try:
        connection.sendall(b"".join([struct.pack("<I", len(header)), header, *(array.tobytes() for array in arrays)]))
    except BlockingIOError as error:
        raise BusyError(str(error)) from error
    except OSError as error:
        raise ClosedError(str(error)) from error


def receive(connection: socket.socket) -> Message:
    """Wait for a message. Raises ClosedError when the other side is gone."""
    (length,) = struct.unpack("<I", _read(connection, 4))
    if length > MAX_HEADER:
        raise ClosedError(f"a header of {length} bytes")
    try:
        header = json.loads(_read(connection, length))
        kind, fields, described = header["kind"], header["fields"], header["arrays"]
        shapes = [(_DTYPES[dtype], tuple(int(size) for size in shape)) for dtype, shape in described]
    except (ValueError, KeyError, TypeError) as error:
        raise ClosedError(f"a header that is none: {error}") from error
    arrays = []
    for dtype, shape in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        if not 0 <= nbytes <= MAX_BYTES or min(shape, default=0) < 0:
            raise ClosedError(f"an array of shape {list(shape)}")
        arrays.append(np.frombuffer(_read(connection, nbytes), dtype=dtype).reshape(shape))
    return Message(str(kind), fields, arrays)


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        try:
            got = connection.recv_into(view[done:])
        except OSError as error:
            raise ClosedError(str(error)) from error
        if not got:
            raise ClosedError("the connection was closed")
        done += got
    return data
