"""A server under a load that nobody would wish for, and what has to be true of it afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.runtime.server.idle import check_idle
from tests.runtime.server.running import RunningServer
from tests.soak.exchange import Address
from tests.soak.health import Health, Prober
from tests.soak.http_users import COMPLETIONS, ask
from tests.soak.load import Load
from tests.soak.swaps import Administrator
from tests.soak.tally import Outcome, Tally

MODEL = "soaked"
KEY, ADMIN_KEY = "a-key-of-a-user", "a-key-of-an-admin"
MAX_RSS_GROWTH = 0.02
MAX_HEALTH_SECONDS = 1.0
WARM_UP = 30.0  # seconds, at most
MAX_WARM_UPS = 6
# So few blocks that sequences are preempted now and then.
MAX_NUM_SEQS, NUM_KV_BLOCKS, BLOCK_SIZE = 16, 256, 16
DRAIN_TIMEOUT = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Memory:
    """Resident set of the server in bytes: after a warm-up of the same load, and after the load."""

    warm: int
    after: int

    @property
    def growth(self) -> float:
        """Relative to the warm level."""
        return self.after / self.warm - 1


@dataclass(frozen=True)
class Soaked:
    """What came of a soak."""

    tally: Tally
    health: Health
    memory: Memory
    swaps: int

    def check(self) -> None:
        """Fail unless the server came through."""
        self.tally.check()
        assert self.health.failures == 0, f"{self.health.failures} of {self.health.probes} probes were not answered"
        assert self.health.slowest_own < MAX_HEALTH_SECONDS, f"/health took {self.health.slowest_own:.2f} s"
        assert self.memory.growth <= MAX_RSS_GROWTH, (
            f"memory grew by {self.memory.growth:.1%}: {self.memory.warm >> 10} KiB after the warm-up, "
            f"{self.memory.after >> 10} KiB after the load"
        )


def server(bundle: Path, folder: Path) -> RunningServer:
    """Start a server with a queue that the load fills, keys, gRPC and an administrator."""
    config = folder / "config.json"  # JSON is YAML
    settings = {
        "model": {"path": str(bundle), "served_model_name": [MODEL], "root": str(bundle.parent)},
        "server": {
            "port": 0,
            "grpc_port": 0,
            "api_keys": [KEY],
            "admin_keys": [ADMIN_KEY],
            "max_queue": 48,
            "drain_timeout": DRAIN_TIMEOUT,
            "access_log": False,
        },
        "engine": {
            "threads": 1,
            "max_num_seqs": MAX_NUM_SEQS,
            "num_kv_blocks": NUM_KV_BLOCKS,
            "block_size": BLOCK_SIZE,
        },
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    return RunningServer("--config", config)


def soak(bundle: Path, folder: Path, num_clients: int, seconds: float, say: Say = print) -> Soaked:
    """Load a server for a while, with models that are swapped meanwhile, and let it come to rest.

    Memory is the resident set of the process (VmRSS), taken whenever the server is idle again, one version of the model
    is left, and its whole KV cache has been written to. The level that counts is the one after warm-ups with the same
    load: they are repeated until one has added next to nothing, for by then all that is made on first use is there, and
    the allocator has the pages that the load takes at its peaks. What comes on top of that is lost.
    """
    with server(bundle, folder) as running:
        running.wait_until_ready()
        address = address_of(running)
        load = Load(address, num_clients)
        asyncio.run(load.prepare())

        def phase(length: float) -> tuple[Tally, int, int]:
            administrator = Administrator(address, MODEL, bundle.name, random.Random(0))
            tally = asyncio.run(_for(length, load, administrator))
            asyncio.run(_fill_cache(address))
            check_idle(running.url, KEY)
            rss = resident_bytes(running.pid)
            say(f"{sum(tally.sent.values())} requests in {length:.0f} s, {administrator.swaps} swaps; {rss >> 10} KiB")
            return tally, administrator.swaps, rss

        warm = before = 0
        for _ in range(MAX_WARM_UPS):
            before, (tally, _, warm) = warm, phase(min(seconds, WARM_UP))
            tally.check()
            if warm <= before * (1 + MAX_RSS_GROWTH / 4):
                break
        with Prober(address.host, address.port, running.pid) as prober:
            tally, swaps, after = phase(seconds)
        if after > warm * (1 + MAX_RSS_GROWTH):  # what is lost stays so, other than what the allocator is late with
            again, _, level = phase(min(seconds, WARM_UP))
            again.check()
            after = min(after, level)
        assert running.stop() == 0, running.log
    assert "Traceback" not in running.log, running.log
    return Soaked(tally, prober.health, Memory(warm, after), swaps)


async def _fill_cache(address: Address) -> None:
    """Write to every block, so that it does not matter which of them the system has given pages to."""
    prompts = [[number + 3] * BLOCK_SIZE for number in range(MAX_NUM_SEQS)]
    length = NUM_KV_BLOCKS * BLOCK_SIZE // MAX_NUM_SEQS - BLOCK_SIZE
    await ask(address, COMPLETIONS, {"prompt": prompts, "max_tokens": length, "ignore_eos": True})


async def _for(seconds: float, load: Load, administrator: Administrator | None) -> Tally:
    tally, stop = Tally(), asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await load.run(tally, stop, administrator)
    return tally


def terminate(bundle: Path, folder: Path, num_clients: int, seconds: float, say: Say = print) -> Tally:
    """Tell a server under load to stop: what it had accepted is answered, and it ends by itself with status 0."""
    with server(bundle, folder) as running:
        running.wait_until_ready()
        load = Load(address_of(running), num_clients)
        asyncio.run(load.prepare())

        async def act() -> Tally:
            tally = Tally()

            def stop() -> None:
                tally.stopped = True
                running.send(signal.SIGTERM)

            asyncio.get_running_loop().call_later(seconds, stop)
            await load.run(tally, asyncio.Event())  # the users go when they are told that the server does
            return tally

        tally = asyncio.run(act())
        began = time.monotonic()
        status = running.wait()
        say(
            f"ended with status {status} {time.monotonic() - began:.1f} s after its last client; "
            f"{tally.refused} were refused, {tally.unconnected} came too late"
        )
        assert status == 0, running.log
    assert "Traceback" not in running.log, running.log
    assert "did not finish within" not in running.log, running.log
    return tally


def address_of(running: RunningServer) -> Address:
    """Return where a server listens that `server` started."""
    host, port = running.address
    grpc_port = int(running.wait_for(r"gRPC listens on \S+:(\d+)")[1])
    return Address(host, port, grpc_port, KEY, ADMIN_KEY)


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def report(soaked: Soaked) -> list[str]:
    """Return what is worth reading of a soak."""
    totals = ", ".join(f"{soaked.tally.total(outcome)} {outcome}" for outcome in Outcome)
    health, memory = soaked.health, soaked.memory
    return [
        *soaked.tally.lines(),
        f"{sum(soaked.tally.sent.values())} sent: {totals}; {len(soaked.tally.wrong)} wrong; {soaked.swaps} swaps",
        f"/health: {health.probes} probes, p99 {health.p99 * 1e3:.0f} ms, slowest {health.slowest * 1e3:.0f} ms, "
        f"{health.slowest_own * 1e3:.0f} ms without waiting for a processor",
        f"memory: {memory.warm >> 10} KiB warm, {memory.after >> 10} KiB after: {memory.growth:+.1%}",
    ]
