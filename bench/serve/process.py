"""A server as a process of its own: started, waited for, and stopped with all that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.run import ROOT
from bench.serve.load import Load
from bench.serve.servers import Server
from inferencex.formats.errors import RequestError
from inferencex.runtime.load_test.api import ask
from inferencex.runtime.load_test.connection import HttpClient, Origin

_POLL = 0.25  # seconds between looks at whether it is ready
_STOP = 30.0  # seconds that it is given to end


class ServerError(Exception):
    """A server is not installed, or did not start; the message ends with the last line that it wrote."""


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def check_installed(server: Server, interpreter: str = sys.executable) -> None:
    """Import the server's module in its interpreter; ServerError when it cannot be."""
    done = subprocess.run(
        [interpreter, "-c", f"import {server.module}"], capture_output=True, text=True, env=_environment({}), cwd=ROOT
    )
    if done.returncode:
        raise ServerError((done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300])


@contextmanager
def running(
    server: Server, folder: Path, load: Load, log: Path, patience: float, interpreter: str = sys.executable
) -> Iterator[Origin]:
    """Give the address of a server that is ready, and stop it at the end; ServerError when it is not in time."""
    port = free_port()
    origin = Origin("127.0.0.1", port, "", False)
    command = [interpreter, *server.command(folder, port, load)]
    environment = _environment({"OMP_NUM_THREADS": str(load.threads), **server.environment(load)})
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=ROOT, start_new_session=True
        )
    try:
        _wait(process, origin, time.monotonic() + patience, log)
        yield origin
    finally:
        _stop(process)


def _environment(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}


def _wait(process: subprocess.Popen[bytes], origin: Origin, until: float, log: Path) -> None:
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerError(f"it ended with status {process.returncode}: {_last_line(log)}")
        if asyncio.run(_is_ready(origin)):
            return
        time.sleep(_POLL)
    raise ServerError(f"it was not ready in time: {_last_line(log)}")


async def _is_ready(origin: Origin) -> bool:
    """Whether it lists its model, which servers do once it is loaded, and is not still saying that it is not."""
    client = HttpClient(origin)
    try:
        listed, ready = await ask(client, "GET", "/v1/models"), await ask(client, "GET", "/ready")
    except RequestError:
        return False
    finally:
        client.close()
    return listed.status == 200 and ready.status != 503


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its session: whatever it left behind, and itself
    except ProcessLookupError:
        return
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'it printed nothing'} (all of it is in {log})"
