"""Server-sent events cut out of bytes as they arrive, with as little work for each as possible."""

from __future__ import annotations


class EventSplitter:
    """Gives the data of every event that is complete.

    Follows the WHATWG specification of event streams in what concerns data: lines end with LF, CR LF or CR, the
    `data` lines of an event are joined by LF, comments and other fields are left out, and so is an event without data.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._lines: list[bytes] = []  # the data of the event that has not ended

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that end in `data`, which continues what was given before."""
        if self._rest:
            data = self._rest + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # perhaps half of a CR LF
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        self._rest = lines.pop() + held
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._lines.append(b"")
            elif not line and self._lines:
                events.append(self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines))
                self._lines.clear()
        return events
