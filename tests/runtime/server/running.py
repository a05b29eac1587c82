"""A server as its users start it: the command in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

COMMAND = (
    "import sys\nfrom inferencex.cli.main import main\nsys.argv = ['inferencex', 'serve', *sys.argv[1:]]\nmain()\n"
)
PATIENCE = 60.0  # seconds, for a machine that is busy


class RunningServer:
    """Starts the command, reads what it logs, and ends it with the block.

    prelude: statements that run in the process before the command does
    lines:   what has been logged so far
    """

    def __init__(self, *flags: str | Path, prelude: str = "", env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{prelude}\n{COMMAND}", *map(str, flags)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(env),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def log(self) -> str:
        """All that has been logged so far."""
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.wait_for(r"listening on (https?://\S+);")[1]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `url`."""
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    def wait_until_ready(self) -> str:
        """Wait for the models, and return the address."""
        self.wait_for(r"ready after [\d.]+ s on")
        return self.url

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a line in which the pattern is found."""
        expression = re.compile(pattern)
        found: re.Match[str] | None = None

        def arrived() -> bool:
            nonlocal found
            found = next((match for line in self.lines if (match := expression.search(line))), None)
            return found is not None or not self._reader.is_alive()

        with self._arrived:
            self._arrived.wait_for(arrived, PATIENCE)
        assert found is not None, f"no line with {pattern!r} in:\n{self.log}"
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        status = self._process.wait(PATIENCE)
        self._reader.join()
        return status

    def stop(self) -> int:
        """Tell it to stop, and return the exit status."""
        self.send(signal.SIGTERM)
        return self.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._arrived:
                self.lines.append(line.rstrip("\n"))
                self._arrived.notify_all()
        with self._arrived:
            self._arrived.notify_all()


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return this process' environment without settings of a server, and with everything importable that is here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCEX_")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(more or {})}
