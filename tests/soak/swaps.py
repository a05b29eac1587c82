"""An administrator who replaces the model under everybody's hands, again and again."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.soak.exchange import Address, Exchange, refusal
from tests.soak.tally import WrongAnswer

DETAILS = "/v1/admin/models"


class Administrator:
    """Loads new versions of one model. All versions are the same bundle, so that answers stay what they are.

    swaps: how many versions have taken over
    """

    def __init__(self, address: Address, uid: str, bundle: str, chance: random.Random) -> None:
        self._address = address
        self._uid = uid
        self._bundle = bundle
        self._chance = chance
        self.swaps = 0

    async def work(self, stop: asyncio.Event) -> None:
        """Change something until told to stop, and leave one version behind."""
        while not stop.is_set():
            await self._chance.choice([self.replace, self.replace, self.canary, self.roll_back])()
            await asyncio.sleep(0.5 + self._chance.random())
        await self.settle()

    async def replace(self) -> None:
        """Put a new version in the place of all others."""
        await self._load(replace=True, keep_previous=False)
        await self._until_loaded()

    async def canary(self) -> None:
        """Give a new version half of the traffic, then all of it."""
        await self._load(weight=0.5)
        details = await self._until_loaded()
        newest = details["versions"][-1]["version"]
        await asyncio.sleep(0.3)
        await self._call("PATCH", f"/v1/models/{self._uid}", {"weights": {newest: 1}})
        self.swaps += 1
        await self._remove_idle()

    async def roll_back(self) -> None:
        """Replace, and think better of it."""
        await self._load(replace=True, keep_previous=True)
        await self._until_loaded()
        await self._call("POST", f"/v1/models/{self._uid}/rollback", None)
        self.swaps += 1
        await self._remove_idle()

    async def settle(self) -> None:
        """Leave exactly one version loaded."""
        await self.replace()
        await self._remove_idle()
        while len((await self._details())["versions"]) > 1:
            await asyncio.sleep(0.1)

    async def _load(self, **how: Any) -> None:
        await self._call("POST", "/v1/models", {"uid": self._uid, "path": self._bundle, **how})
        self.swaps += 1

    async def _remove_idle(self) -> None:
        for version in (await self._details())["versions"]:
            if version["share"] == 0 and version["state"] == "ready":
                await self._call("DELETE", f"/v1/models/{self._uid}?version={version['version']}", None)

    async def _until_loaded(self) -> Any:
        while True:
            details = await self._details()
            states = [version["state"] for version in details["versions"]]
            if "failed" in states:
                raise WrongAnswer(f"a version could not be loaded: {details}")
            if "loading" not in states and "warming" not in states:
                return details
            await asyncio.sleep(0.05)

    async def _details(self) -> Any:
        return await self._call("GET", f"{DETAILS}/{self._uid}", None)

    async def _call(self, method: str, path: str, body: Any) -> Any:
        async with Exchange(self._address) as exchange:
            content = b"" if body is None else json.dumps(body).encode()
            exchange.send(path, content, key=self._address.admin_key, method=method)
            status = await exchange.begin()
            if status >= 300:
                raise WrongAnswer(f"{method} {path}: status {status}: {await refusal(exchange)}")
            return await exchange.json()
