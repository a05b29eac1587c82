"""Whether the server says that it is alive, asked all the time by a process of its own, as an orchestrator would.

A process of its own, because the one that makes the load is too busy to measure anything. On a machine with other work,
everybody waits for a processor now and then; the kernel says for how long (/proc/PID/schedstat), and that is not the
server's fault. Where nothing else runs it is next to nothing.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

INTERVAL = 0.05  # seconds
TIMEOUT = 10.0  # seconds
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Health:
    """How the prober was answered; times in seconds.

    slowest_own: without the time in which the server's main thread, or the prober, waited for a processor
    """

    probes: int
    failures: int
    p99: float
    slowest: float
    slowest_own: float


class Prober:
    """Asks for the length of a block."""

    def __init__(self, host: str, port: int, pid: int) -> None:
        command = [sys.executable, "-m", "tests.soak.health", host, str(port), str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._health: Health | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told, _ = self._process.communicate("stop\n", timeout=TIMEOUT * 3)
        self._health = Health(**json.loads(told))

    @property
    def health(self) -> Health:
        """What was found, after the block."""
        assert self._health is not None
        return self._health


def probe(host: str, port: int) -> float | None:
    """Return the seconds until /health was answered on a new connection; None where it was not with 200."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
    except OSError:
        return None
    finally:
        connection.close()
    return time.perf_counter() - began if answer.status == 200 else None


def waited(pid: int) -> float:
    """Return the seconds that the main thread of a process, and this one, have waited for a processor so far."""
    schedules = (Path(f"/proc/{pid}/task/{pid}/schedstat"), Path("/proc/self/schedstat"))
    return sum(int(path.read_text(encoding="ascii").split()[1]) for path in schedules) / 1e9


def main(host: str, port: int, pid: int) -> None:
    """Probe until standard input has a line, and print what was found."""
    times: list[float] = []
    own: list[float] = []
    failures = 0
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        before = waited(pid)
        seconds = probe(host, port)
        if seconds is None:
            failures += 1
        else:
            times.append(seconds)
            own.append(seconds - (waited(pid) - before))
    times.sort()
    found = Health(
        probes=len(times) + failures,
        failures=failures,
        p99=times[int(len(times) * 0.99)],
        slowest=times[-1],
        slowest_own=max(own),
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
