"""A rank other than the first, as a program: it loads its part of a bundle, and runs the steps that it is told to.

`python -m inferencex.runtime.parallel.worker FD`: the first rank's socket is file descriptor FD.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.backends.base import BackendOptions, Executable, HiddenStatesExecutable, StepBatch
from inferencex.runtime.parallel.wire import ClosedError, Message, receive, send


def main() -> None:
    """Serve the first rank until it closes the connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_watch, args=(connection,), name="watch", daemon=True).start()
    try:
        _serve(connection)
    except ClosedError:
        return
    except InferenceXError as error:
        _fail(connection, str(error))
    except MemoryError:
        _fail(connection, "there is not enough memory")
    except Exception as error:
        _fail(connection, f"{type(error).__name__}: {error}")
        raise


def _watch(connection: socket.socket) -> None:
    """End this process when the first rank is gone, whatever it is doing."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    while not any(event & ~select.POLLIN for _, event in poll.poll()):
        pass
    os._exit(1)


def _fail(connection: socket.socket, text: str) -> None:
    try:
        send(connection, Message("failed", {"error": text}))
    except ClosedError:
        return
    finally:
        sys.stdout.flush()
    os._exit(1)  # without waiting for threads that wait for other ranks


def _serve(connection: socket.socket) -> None:
    executable = _load(connection, receive(connection).fields)
    gc.collect()
    gc.freeze()
    send(connection, Message("ready"))
    while True:
        message = receive(connection)
        if message.kind == "close":
            return
        batch = StepBatch(*message.arrays)
        try:
            if message.kind == "hidden" and isinstance(executable, HiddenStatesExecutable):
                executable.hidden_states(batch)
            else:
                executable.step(batch)
        except InferenceXError as error:
            send(connection, Message("refused", {"error": str(error)}))


def _load(connection: socket.socket, settings: Mapping[str, Any]) -> Executable:
    """Load the rank's part, comparing with the first rank what it is and how much state there is room for."""
    import torch  # by which ranks exchange results, and which takes as long in the first one

    from inferencex.formats.bundle import Bundle
    from inferencex.runtime.backends import load_backend
    from inferencex.runtime.parallel.backend import ShardingBackend
    from inferencex.runtime.parallel.bundle_shard import BundleShard
    from inferencex.runtime.parallel.plan import plan_graph
    from inferencex.runtime.parallel.roles import PlanOptions
    from inferencex.runtime.parallel.shard import cut_graph

    torch.set_num_threads(1)
    rank, size = int(settings["rank"]), int(settings["size"])
    backend = load_backend(settings["backend"])
    assert isinstance(backend, ShardingBackend), "the first rank has looked"
    bundle = Bundle.open(Path(settings["bundle"]))
    plan = plan_graph(bundle.graph, size, PlanOptions(**settings["plan"]))
    shard = BundleShard(bundle, cut_graph(plan, rank))
    options = BackendOptions(**settings["options"])
    facts = backend.facts_of(shard, options)
    send(
        connection,
        Message(
            "loaded",
            {
                "plan": plan.digest(),
                "tensors": shard.digest(),
                "nbytes": shard.shard.nbytes,
                "bytes_per_token": facts.bytes_per_token,
                "num_blocks": backend.blocks_of(shard, options),
            },
        ),
    )
    agreed = BackendOptions(**{**settings["options"], "num_blocks": receive(connection).fields["num_blocks"]})
    communicator = backend.connect(agreed, settings["store"], rank, size)
    return backend.compile_shard(shard, agreed, communicator)


if __name__ == "__main__":
    main()
