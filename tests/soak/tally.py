"""An account of everything that was sent: each request ends as exactly one thing, or the soak has failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What became of a request that went as it should."""

    OK = "ok"  # answered in full, and with the right text
    REJECTED = "rejected"  # refused with the error that was due
    ABORTED = "aborted"  # left by its client on purpose


class WrongAnswer(Exception):
    """An answer that should not have been."""


class ServerGone(Exception):
    """The server takes no more connections, or said that it shuts down; `answered` tells which."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


@dataclass
class Tally:
    """Counts by kind of request.

    wrong:       what should not have happened, as texts
    stopped:     whether the server was told to stop, so that it may refuse what comes
    refused:     requests that a server which shuts down refused with an answer that says so
    unconnected: requests that found nobody listening any more
    """

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    unconnected: int = 0
    stopped: bool = False

    async def account(self, kind: str, request: Awaitable[Outcome]) -> None:
        """Wait for one request to end, and count it. Raises ServerGone where the server was told to stop."""
        self.sent[kind] += 1
        try:
            async with asyncio.timeout(60):
                outcome = await request
        except ServerGone as gone:
            if not self.stopped:
                self.wrong.append(f"{kind}: {gone}")
                return
            if gone.answered:
                self.refused += 1
            else:
                self.unconnected += 1
            raise
        except Exception as error:  # of any kind: this is what the soak looks for
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        else:
            self.ended[kind, outcome] += 1

    def total(self, outcome: Outcome) -> int:
        """Requests of all kinds that ended so."""
        return sum(count for (_, each), count in self.ended.items() if each is outcome)

    def check(self) -> None:
        """Fail unless every request is accounted for."""
        assert not self.wrong, f"{len(self.wrong)} went wrong, among them:\n" + "\n".join(self.wrong[:10])
        accounted = sum(self.ended.values()) + self.refused + self.unconnected
        assert sum(self.sent.values()) == accounted, f"{sum(self.sent.values())} were sent, {accounted} ended"

    def lines(self) -> list[str]:
        """One line for each kind."""
        found = []
        for kind, sent in sorted(self.sent.items()):
            parts = [f"{self.ended[kind, outcome]} {outcome}" for outcome in Outcome if self.ended[kind, outcome]]
            found.append(f"{kind:<24} {sent:>7} sent: {', '.join(parts)}")
        return found
