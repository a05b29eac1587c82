"""Many users at once, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from typing import Protocol

import grpc

from tests.soak.exchange import Address
from tests.soak.http_users import Case, HttpUser, cases, solved
from tests.soak.other_users import GrpcUser, WebSocketUser
from tests.soak.swaps import Administrator
from tests.soak.tally import Outcome, ServerGone, Tally

PAUSE = 0.4  # seconds that a user takes to think, at most


class User(Protocol):
    """Somebody who wants one thing after another."""

    def next(self) -> tuple[str, Awaitable[Outcome]]:
        """Return the kind of the next request, and the request."""


class Load:
    """The users of one server.

    seed: makes the users' choices repeatable; when they act is not
    """

    def __init__(self, address: Address, num_clients: int, seed: int = 0) -> None:
        self._address = address
        self._num_clients = num_clients
        self._seeds = random.Random(seed)
        self._known: list[Case] = []

    async def prepare(self) -> None:
        """Ask for the answers that are expected later, one after another."""
        self._known = [await solved(self._address, case) for case in cases()]

    async def run(self, tally: Tally, stop: asyncio.Event, administrator: Administrator | None = None) -> None:
        """Have the users act until `stop` is set; returns when everything that was begun has ended."""
        async with (
            grpc.aio.insecure_channel(f"{self._address.host}:{self._address.grpc_port}") as channel,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self._num_clients):
                tasks.create_task(self._act(self._user(number, channel), tally, stop))
            if administrator is not None:
                tasks.create_task(administrator.work(stop))

    def _user(self, number: int, channel: grpc.aio.Channel) -> User:
        chance = random.Random(self._seeds.random())
        if number % 10 == 8:
            return WebSocketUser(self._address, self._known, chance)
        if number % 10 == 9:
            return GrpcUser(self._address, self._known, chance, channel)
        return HttpUser(self._address, self._known, chance)

    async def _act(self, user: User, tally: Tally, stop: asyncio.Event) -> None:
        while not stop.is_set():
            kind, request = user.next()
            try:
                await tally.account(kind, request)
            except ServerGone:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._seeds.random() * PAUSE)
