"""A backend that has several ranks run each bundle, with another backend in each of them."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.aside import Aside
from inferencex.runtime.backends.base import (
    Backend,
    BackendOptions,
    Executable,
    MemoryNeeds,
    ModelFacts,
)
from inferencex.runtime.parallel.bundle_shard import BundleShard
from inferencex.runtime.parallel.communicator import Communicator, LostRankError, Unconnected
from inferencex.runtime.parallel.executable import ParallelExecutable
from inferencex.runtime.parallel.plan import plan_graph
from inferencex.runtime.parallel.roles import PlanOptions
from inferencex.runtime.parallel.shard import cut_graph
from inferencex.runtime.parallel.wire import Message
from inferencex.runtime.parallel.workers import Workers

_LOG = logging.getLogger(__name__)

_LOOK = 0.25

_REASON_PATIENCE = 5.0
"""Seconds until it is known why a rank did not come to an exchange."""


@runtime_checkable
class ShardingBackend(Protocol):
    """A backend that can run one rank's part of a bundle."""

    name: str

    def rank_options(self, options: BackendOptions, rank: int, size: int) -> BackendOptions:
        """Return a rank's share of what the user asks for: threads, memory, a device of its own.

        Raises OptionError or BackendError where there is not enough for all ranks.
        """
        ...

    def facts_of(self, bundle: Bundle, options: BackendOptions) -> ModelFacts:
        """Return what can be known of a part before it is compiled."""
        ...

    def blocks_of(self, bundle: Bundle, options: BackendOptions) -> int | None:
        """Return how many blocks of state a part has room for; None where only compiling it shows that."""
        ...

    def connect(self, options: BackendOptions, store: str, rank: int, size: int) -> Communicator:
        """Join the other ranks, who call this at the same time; `store` is a path where no file is yet.

        Its folder stays until all have joined, or, where the communicator keeps it, until the ranks end. Raises
        BackendError when they cannot be found.
        """
        ...

    def compile_shard(self, bundle: Bundle, options: BackendOptions, communicator: Communicator) -> Executable:
        """Make a part ready to run. Raises what `compile` does.

        `options.num_blocks` is what all ranks have agreed on; None where one had to compile its part first: then they
        agree here, through the communicator. Operators of domain `inferencex.parallel` are calls of the communicator.
        """
        ...

    def memory_needs_of(self, bundle: Bundle, options: BackendOptions, communicator: Communicator) -> MemoryNeeds:
        """Return what compiling a part would take."""
        ...


class ParallelBackend:
    """Runs bundles on `size` ranks, of which this process is the first.

    inner:        the backend of every rank, which has to be a `ShardingBackend`
    plan_options: what is worth dividing

    Raises OptionError for a backend that cannot.
    """

    def __init__(self, inner: Backend, size: int, plan_options: PlanOptions | None = None) -> None:
        if not isinstance(inner, ShardingBackend):
            raise OptionError(
                f"tensor_parallel_size={size}: the backend {inner.name!r} does not divide models; use the backend cpu "
                "or triton, or leave tensor_parallel_size at 1"
            )
        self.name = inner.name
        self.size = size
        self._inner: Backend = inner
        self._sharding: ShardingBackend = inner
        self._plan_options = plan_options or PlanOptions()

    def supports(self, bundle: Path) -> Sequence[str]:
        """Return the reasons of the backend inside, and that torch is not installed if it is not."""
        missing = [] if importlib.util.find_spec("torch") else [_TORCH_IS_MISSING]
        return [*self._inner.supports(bundle), *missing]

    def compile(self, bundle: Path, options: BackendOptions) -> ParallelExecutable:
        """Have every rank load its part.

        Raises OptionError for sizes that the model does not divide into, BackendError naming a rank that fails or that
        holds something else than the plan says, and what compiling the first rank's part raises.
        """
        if importlib.util.find_spec("torch") is None:
            raise BackendError(_TORCH_IS_MISSING)
        of_ranks = [self._sharding.rank_options(options, rank, self.size) for rank in range(self.size)]
        shards = self._shards(bundle)
        folder = _new_folder()
        workers: Workers | None = None
        try:
            workers = Workers(self.size)
            return self._start(shards, of_ranks, workers, folder)
        except BaseException:
            if workers is not None:
                workers.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def memory_needs(self, bundle: Path, options: BackendOptions) -> MemoryNeeds:
        """Return what all ranks take together; on devices of their own, what the one that takes most does."""
        found = [
            self._sharding.memory_needs_of(
                shard, self._sharding.rank_options(options, rank, self.size), Unconnected(rank, self.size)
            )
            for rank, shard in enumerate(self._shards(bundle))
        ]
        combine = sum if found[0].device is None else max
        names = ("weights", "state", "step", "state_of_longest")
        numbers = {name: combine(getattr(needs, name) for needs in found) for name in names}
        return replace(found[0], **numbers)

    def _shards(self, bundle: Path) -> list[BundleShard]:
        opened = Bundle.open(bundle)
        plan = plan_graph(opened.graph, self.size, self._plan_options)
        for line in plan.lines():
            _LOG.info("%s: %s", bundle, line)
        return [BundleShard(opened, cut_graph(plan, rank)) for rank in range(self.size)]

    def _start(
        self, shards: Sequence[BundleShard], of_ranks: Sequence[BackendOptions], workers: Workers, folder: Path
    ) -> ParallelExecutable:
        sharding, size, store = self._sharding, self.size, str(folder / "store")
        workers.tell(
            {rank: Message("load", self._settings(shards, of_ranks[rank], rank, store)) for rank in range(1, size)}
        )
        try:
            importlib.import_module("torch")  # which takes a while, and the other ranks do as well
        except (ImportError, OSError) as error:
            raise BackendError(
                f"tensor_parallel_size={size} needs the package 'torch', which cannot be loaded: "
                f"{type(error).__name__}: {error}; install inferencex[parallel] anew"
            ) from error
        own = sharding.facts_of(shards[0], of_ranks[0])
        blocks, bytes_per_token = [sharding.blocks_of(shards[0], of_ranks[0])], own.bytes_per_token
        for rank, found in workers.ask("loaded").items():
            check_part(shards[rank], rank, found)
            blocks.append(found["num_blocks"])
            bytes_per_token += int(found["bytes_per_token"])
        known = [count for count in blocks if count is not None]
        num_blocks = min(known) if len(known) == size else None
        workers.tell(Message("compile", {"num_blocks": num_blocks}))
        workers.watch()
        agreed = replace(of_ranks[0], num_blocks=num_blocks)
        communicator = _unless_a_rank_fails(workers, lambda: sharding.connect(agreed, store, 0, size))
        workers.on_failure(communicator.abort)
        try:
            first = sharding.compile_shard(shards[0], agreed, communicator)
            workers.wait_until_ready()
        except LostRankError as error:
            workers.wait_for_failure(_REASON_PATIENCE)
            raise workers.error() from error
        except BaseException:  # the others are ended next: what is left of an exchange would wait for them
            communicator.abort()
            raise
        if not communicator.keeps_store:
            shutil.rmtree(folder, ignore_errors=True)  # now, for a process that is killed removes nothing
        return ParallelExecutable(first, workers, communicator, bytes_per_token, folder)

    def _settings(
        self, shards: Sequence[BundleShard], options: BackendOptions, rank: int, store: str
    ) -> dict[str, Any]:
        plain = {entry.name: getattr(options, entry.name) for entry in fields(options) if entry.name != "meanwhile"}
        return {
            "backend": self.name,
            "bundle": str(shards[rank].path.absolute()),
            "rank": rank,
            "size": self.size,
            "plan": asdict(self._plan_options),
            "options": plain,
            "store": store,
        }


def _new_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="inferencex-ranks-"))
    except OSError as error:
        raise BackendError(
            f"the ranks need a folder for a small file by which they find each other, and none can be made: {error}; "
            "set TMPDIR to a folder that can be written to"
        ) from error


def _unless_a_rank_fails(workers: Workers, connect: Callable[[], Communicator]) -> Communicator:
    """Return what `connect` does; raise BackendError as soon as a rank has failed, which it would wait for.

    It is left waiting then, on its own thread, until its patience ends. Interrupts are raised at once.
    """
    ended = threading.Event()

    def work() -> Communicator:
        try:
            return connect()
        finally:
            ended.set()

    connecting = Aside(work)
    workers.on_failure(ended.set)
    while not ended.wait(_LOOK):  # for interrupts as well
        pass
    if workers.failure is not None:
        raise workers.error()
    try:
        return connecting.result()
    except BackendError as error:
        if workers.wait_for_failure(_REASON_PATIENCE):
            raise workers.error() from error
        raise


_TORCH_IS_MISSING = (
    "tensor_parallel_size needs the package 'torch', by which ranks exchange results, and it is not installed; install "
    "inferencex[parallel], or leave tensor_parallel_size at 1"
)


def check_part(shard: BundleShard, rank: int, found: Mapping[str, Any]) -> None:
    """Compare what a rank says that it holds with what the plan says. Raises BackendError naming the rank."""
    expected = {"plan": shard.shard.plan_digest, "tensors": shard.digest(), "nbytes": shard.shard.nbytes}
    meanings = {
        "plan": "another plan of who computes what",
        "nbytes": "tensors of another size",
        "tensors": "other tensors, or the same ones of another bundle",
    }
    for name in ("plan", "nbytes", "tensors"):
        if found.get(name) != expected[name]:
            raise BackendError(
                f"{shard.path}: rank {rank} has {meanings[name]} ({found.get(name)}, expected {expected[name]}); every "
                "rank has to run the same version of this program on the same bundle"
            )
