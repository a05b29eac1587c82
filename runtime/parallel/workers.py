"""The processes of the other ranks: started, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inferencex.formats.errors import BackendError
from inferencex.runtime.parallel.wire import BusyError, ClosedError, Message, receive, send

_LAST_LINES = 12
_GRACE = 2.0
"""Seconds that a process has to end once it was told to, and to say why it ended."""

_SENDING_PATIENCE = 60
"""Seconds in which a rank has to take what it is sent: those that run do so at once, those that were stopped never."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _left_to_the_first_rank() -> Iterator[None]:
    """Start processes meanwhile that never get the signals by which a terminal or a service manager ends all at once.

    The first rank decides then, and may have answers to complete; the others end when it does. A process inherits what
    its parent's thread blocks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """One process: `connection` is to it, `lines` are the last ones that it wrote to its standard error."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, theirs = socket.socketpair()
        with theirs, _left_to_the_first_rank():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inferencex.runtime.parallel.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SENDING_PATIENCE, 0))
        assert self.process.stderr is not None, "it is a pipe"
        self.errors = self.process.stderr
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._rest = b""

    def read_errors(self) -> bool:
        """Take what the process wrote to its standard error; False when it has closed it."""
        data = os.read(self.errors.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines.extend(line.decode("utf-8", "replace") for line in lines)
        return bool(data)

    def ending(self) -> str:
        """Return how the process ended, waiting a moment for that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        code = self.process.returncode
        if code is None:
            return "it closed its connection"
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit status {code}"
        if code == -signal.SIGKILL:
            how += ", as the system does where there is not enough memory"
        return how + (f"; its last words: {' | '.join(self.lines)}" if self.lines else "")


class Workers:
    """All of them. Once one has failed all are ended, and `failure` says which and why.

    After `watch` a thread listens to them, and the caller only sends.
    """

    def __init__(self, size: int) -> None:
        """Start the processes of ranks 1 to `size - 1`."""
        self.failure: str | None = None
        self._failed = threading.Event()
        self._refusals: deque[Message] = deque()
        self._changed = threading.Condition()
        self._num_ready = 0
        self._reactions: list[Callable[[], None]] = []
        self._is_closing = False
        self._workers: list[Worker] = []
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        try:
            for rank in range(1, size):
                self._workers.append(Worker(rank))
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> Sequence[int]:
        """The processes, in the order of their ranks."""
        return [worker.process.pid for worker in self._workers]

    def tell(self, messages: Mapping[int, Message] | Message) -> None:
        """Send each rank its message, or all of them the same. A rank that is gone is a failure, told elsewhere."""
        for worker in self._workers:
            try:
                send(worker.connection, messages if isinstance(messages, Message) else messages[worker.rank])
            except BusyError:
                self._end(
                    f"rank {worker.rank} (process {worker.process.pid}) has taken no message for {_SENDING_PATIENCE} "
                    "seconds: it was stopped, or hangs"
                )
            except ClosedError:
                continue

    def ask(self, kind: str) -> dict[int, Mapping[str, Any]]:
        """Wait for a message of this kind from every rank, and return what each says; before `watch`.

        Raises BackendError naming a rank that fails instead.
        """
        answers: dict[int, Mapping[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
                selector.register(worker.errors, selectors.EVENT_READ, worker)
            while len(answers) < len(self._workers):
                for key, _ in selector.select():
                    worker = key.data
                    if key.fileobj is worker.errors:
                        if not worker.read_errors():
                            selector.unregister(worker.errors)
                        continue
                    message = self._listen(worker)
                    if message is None or message.kind != kind:
                        self._fail(worker, message)
                        raise self.error()
                    answers[worker.rank] = message.fields
                    selector.unregister(worker.connection)
        return answers

    def watch(self) -> None:
        """Listen to all ranks from now on, on a thread."""
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def on_failure(self, react: Callable[[], None]) -> None:
        """Have something called, on any thread, once a rank has failed; at once if one has."""
        with self._lock:
            self._reactions.append(react)
            if self.failure is None:
                return
        react()

    def wait_until_ready(self) -> None:
        """Wait until every rank is ready for steps; while they are watched. Raises BackendError when one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready == len(self._workers) or self._failed.is_set())
        if self.failure is not None:
            raise self.error()

    def error(self) -> BackendError:
        """Return what to raise once a rank has failed."""
        return BackendError(self.failure or "the other ranks were ended")

    def wait_for_failure(self, seconds: float) -> bool:
        """Wait until it is known that a rank has failed; False if it is not by then."""
        return self._failed.wait(seconds)

    def wait_for_refusals(self, seconds: float) -> bool:
        """Wait until every rank has refused a step, and forget that; False if one has not by then."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._refusals) < len(self._workers) and not self._failed.is_set():
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            complete = len(self._refusals) == len(self._workers)
            self._refusals.clear()
        return complete

    def fail(self, text: str) -> None:
        """End all processes, for a reason of the caller's."""
        self._end(text)

    def close(self) -> None:
        """End all processes, if they have not ended."""
        self._is_closing = True
        self.tell(Message("close"))
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _GRACE
        for worker in self._workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for worker in self._workers:
            worker.connection.close()
            worker.errors.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
                selector.register(worker.errors, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    worker = key.data
                    if key.fileobj is worker.errors:
                        if not worker.read_errors():
                            selector.unregister(worker.errors)
                        continue
                    message = self._listen(worker)
                    if message is not None and message.kind == "ready":
                        with self._changed:
                            self._num_ready += 1
                            self._changed.notify_all()
                        continue
                    if message is not None and message.kind == "refused":
                        with self._changed:
                            self._refusals.append(message)
                            self._changed.notify_all()
                        alone = threading.Timer(_GRACE, self._end_if_alone, [worker, message])
                        alone.daemon = True
                        alone.start()
                        continue
                    selector.unregister(worker.connection)
                    if not self._is_closing:
                        self._fail(worker, message)

    def _end_if_alone(self, worker: Worker, refusal: Message) -> None:
        """End all when a rank refuses what the first one did not, which now waits for it."""
        with self._changed:
            is_open = any(refusal is other for other in self._refusals)
        if is_open:
            reason = refusal.fields.get("error")
            self._end(f"rank {worker.rank} has refused a step that the first rank runs: {reason}")

    @staticmethod
    def _listen(worker: Worker) -> Message | None:
        try:
            return receive(worker.connection)
        except ClosedError:
            return None

    def _fail(self, worker: Worker, message: Message | None) -> None:
        """Note that a rank has failed, with its own reason or what can be seen of it, and end the others."""
        if message is not None and message.kind == "failed":
            reason = str(message.fields.get("error"))
        else:
            reason = worker.ending()
            with contextlib.suppress(OSError, ValueError):
                os.set_blocking(worker.errors.fileno(), False)
                while worker.read_errors():
                    pass
                reason = worker.ending()
        self._end(f"rank {worker.rank} (process {worker.process.pid}) has failed: {reason}")

    def _end(self, text: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = text
            reactions = list(self._reactions)
        for worker in self._workers:
            worker.process.kill()
        self._failed.set()
        with self._changed:
            self._changed.notify_all()
        for react in reactions:
            react()
