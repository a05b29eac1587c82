"""Why a socket is closed by the server, as close codes say it."""

from __future__ import annotations

from enum import IntEnum


class CloseCode(IntEnum):
    """The codes of RFC 6455 that this server closes with; 1012 (restart) is the web server's own, at shutdown."""

    UNSUPPORTED = 1003  # a binary frame
    INVALID = 1007  # a frame that is not JSON
    POLICY = 1008  # no key in time, a wrong key, or a client that does not read what it asked for
    TOO_BIG = 1009  # a frame larger than a request may be
    INTERNAL = 1011  # a defect of the server


class Closing(Exception):
    """Ends a session, with the code and the reason that its client is told.

    flush: deliver what is queued first
    """

    def __init__(self, code: CloseCode, reason: str, *, flush: bool = True) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.flush = flush
