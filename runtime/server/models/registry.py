"""All models that are served: found by name, loaded beside what runs, replaced, and unloaded without loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from inferencex.formats.errors import BackendError, InferenceXError
from inferencex.runtime.server.allocator import give_memory_back
from inferencex.runtime.server.calls import ANONYMOUS, Caller
from inferencex.runtime.server.errors import Conflict, InvalidRequest, ModelNotFound, Unavailable
from inferencex.runtime.server.models.background import in_background
from inferencex.runtime.server.models.deployment import Deployment
from inferencex.runtime.server.models.loading import LoadedReplicas, Loader, Phase, load_replicas
from inferencex.runtime.server.models.paths import BundlePaths
from inferencex.runtime.server.models.served import Lease as Lease
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.models.version import LoadRequest, Version

_LOG = logging.getLogger(__name__)

DRAIN_TIMEOUT = 300.0  # seconds


class ModelObserver(Protocol):
    """Hears of models that come and go, on the event loop; must be quick and must not raise."""

    def model_loaded(self, model: ServedModel, seconds: float) -> None:
        """A version is ready after so many seconds."""

    def model_failed(self, uid: str, error: InferenceXError) -> None:
        """A version could not be loaded."""

    def model_unloaded(self, model: ServedModel) -> None:
        """A version has ended its last request."""


class ModelRegistry:
    """The models by uid. Everything is called on one event loop; what takes long runs on other threads.

    A model has versions, of which each is a bundle that is loaded once or several times (`ServedModel`). Requests go
    to versions by weight. Loads happen one after the other, so that each finds the memory that the one before left.

    paths:         where bundles may be loaded from by those who are not the operator
    keep_previous: whether what is replaced stays loaded, for `rollback`, where a request does not say
    drain_timeout: seconds that requests of a version which is unloaded may still take, before they are aborted
    """

    def __init__(
        self,
        *,
        roots: Sequence[Path] = (),
        keep_previous: bool = False,
        drain_timeout: float = DRAIN_TIMEOUT,
        loader: Loader = load_replicas,
        observers: Sequence[ModelObserver] = (),
    ) -> None:
        self.paths = BundlePaths(roots)
        self.keep_previous = keep_previous
        self.drain_timeout = drain_timeout
        self._loader = loader
        self._observers = tuple(observers)
        self._deployments: dict[str, Deployment] = {}
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def resolve(self, name: str | None, caller: Caller | None = None) -> Lease:
        """Return a hold on the version that serves the next request for the model `name`.

        A name is a uid, an alias, or `uid@version` for one version, whatever its weight. None or "" means the first
        model. Raises ModelNotFound, or Unavailable while the model is being loaded or unloaded.
        """
        if not name:
            return self._default().choose(_key(caller)).lease()
        deployment = self._find(name)
        if deployment is not None:
            return deployment.choose(_key(caller)).lease()
        uid, at, version_name = name.rpartition("@")
        deployment = self._find(uid) if at else None
        if deployment is None:
            raise self._not_found(name)
        version = deployment.version(version_name)
        if version.state != "ready" or version.model is None:
            raise Unavailable(f"{uid}@{version_name} is {version.state}", code="not_ready")
        return version.model.lease()

    def get(self, name: str) -> Deployment:
        """Return the versions of a model by its uid or an alias; ModelNotFound when there is none."""
        deployment = self._find(name)
        if deployment is None:
            raise self._not_found(name)
        return deployment

    def list(self) -> tuple[ServedModel, ...]:
        """Return each model that can be asked, in the order they were added: the version with most traffic."""
        mains = [deployment.main for deployment in self._deployments.values()]
        return tuple(version.model for version in mains if version is not None and version.model is not None)

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """All models, those included that are still loading or could not be loaded."""
        return tuple(self._deployments.values())

    def loaded(self) -> Iterator[ServedModel]:
        """Yield every version that holds memory, those without traffic included."""
        for deployment in self._deployments.values():
            for version in deployment.versions.values():
                if version.model is not None:
                    yield version.model

    @property
    def missing(self) -> dict[str, str]:
        """Required models that cannot be asked, each with the reason."""
        return {
            deployment.uid: _why_not(deployment)
            for deployment in self._deployments.values()
            if deployment.required and deployment.main is None
        }

    @property
    def lost(self) -> dict[str, str]:
        """Versions that get traffic and can answer none of it any more, by name and version, each with the reason."""
        return {
            f"{model.name}@{model.version}": model.failure
            for deployment in self._deployments.values()
            for model in (version.model for version in deployment.serving)
            if model is not None and model.failure is not None
        }

    def load(self, request: LoadRequest) -> Version:
        """Begin to load a bundle; `await version.loaded()` for the end.

        What is wrong with the request is raised at once: InvalidRequest, or Conflict with what is served. What fails
        later leaves everything that serves untouched.
        """
        self._check(request)
        deployment = self._deployments.get(request.uid)
        if deployment is None:
            deployment = Deployment(request.uid, required=request.required)
            self._deployments[request.uid] = deployment
        version = Version(request, request.version or deployment.next_name())
        deployment.versions = {
            name: other for name, other in deployment.versions.items() if other.state != "failed"
        } | {version.name: version}
        if not deployment.serving and request.aliases is not None:
            deployment.aliases = request.aliases
        self._begin(self._load(deployment, version))
        return version

    def unload(self, name: str, version: str | None = None, timeout: float | None = None) -> Sequence[Version]:
        """Begin to unload a model, or one version of it; `await version.gone()` for the end.

        New requests are refused, or go to the other versions. Those under way go on for at most `timeout` seconds
        (None: `drain_timeout`), and are then aborted; asked again, the shorter time counts.

        Raises ModelNotFound, and Conflict for the only version that gets traffic while others are loaded.
        """
        deployment = self.get(name)
        chosen = list(deployment.versions.values()) if version is None else [deployment.version(version)]
        others = [other for other in deployment.versions.values() if other.state == "ready" and other not in chosen]
        if version is not None and chosen == deployment.serving and others:
            raise Conflict(
                f"{deployment.uid}@{version} gets all the traffic of {deployment.uid!r}; give another version weight "
                "first, or delete the whole model"
            )
        self._retire(deployment, chosen, self.drain_timeout if timeout is None else timeout)
        return chosen

    def set_weights(self, name: str, weights: Mapping[str, float], sticky: bool | None = None) -> Deployment:
        """Split a model's traffic between its versions by these weights; those that are not named get none."""
        deployment = self.get(name)
        deployment.set_weights(weights)
        if sticky is not None:
            deployment.sticky = sticky
        return deployment

    def rollback(self, name: str) -> Deployment:
        """Split a model's traffic as before the last change, at once; Conflict when what served then is not loaded."""
        deployment = self.get(name)
        deployment.roll_back()
        return deployment

    async def close(self, timeout: float = 0.0) -> None:
        """Unload everything; requests under way get `timeout` seconds. Loads under way are not waited for."""
        for deployment in self.deployments:
            self._retire(deployment, list(deployment.versions.values()), timeout)
        waiting = [
            version.gone()
            for deployment in self.deployments
            for version in deployment.versions.values()
            if version.model is not None
        ]
        await asyncio.gather(*waiting)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _find(self, name: str) -> Deployment | None:
        deployment = self._deployments.get(name)
        if deployment is not None:
            return deployment
        return next((other for other in self._deployments.values() if name in other.aliases), None)

    def _claimed(self, name: str) -> Deployment | None:
        """Return the model that will have a name once one of its versions is loaded."""
        for deployment in self._deployments.values():
            for version in deployment.versions.values():
                if version.state in ("queued", "loading", "warming") and name in (version.request.aliases or ()):
                    return deployment
        return None

    def _default(self) -> Deployment:
        if not self._deployments:
            raise ModelNotFound("no model is served", param="model")
        return next(iter(self._deployments.values()))

    def _not_found(self, name: str) -> ModelNotFound:
        there = ", ".join(self._deployments) or "none"
        return ModelNotFound(f"the model {name[:200]!r} is not served; served are: {there}", param="model")

    def _check(self, request: LoadRequest) -> None:
        """Raise when a request cannot be, given what is there."""
        uid, deployment = request.uid, self._deployments.get(request.uid)
        for name in (uid, *(request.aliases or ())):
            if not name or "@" in name or len(name) > 200 or not name.isprintable():
                raise InvalidRequest(
                    f"{name[:80]!r} is no name for a model; expected printable characters without '@'", param="uid"
                )
            other = self._find(name) or self._claimed(name)
            if other is not None and other is not deployment:
                raise Conflict(f"the name {name!r} belongs to the model {other.uid!r}; choose another", param="uid")
        if request.replace and request.weight is not None:
            raise InvalidRequest(
                "replace gives the new version all traffic, and weight a part of it; give one of them", param="weight"
            )
        if request.weight is not None and not 0.0 <= request.weight <= 1.0:
            raise InvalidRequest(f"weight is {request.weight}; expected a share from 0 to 1", param="weight")
        if request.version is not None and (not request.version.isprintable() or not 0 < len(request.version) <= 80):
            raise InvalidRequest(f"version is {request.version[:80]!r}; expected a short name", param="version")
        if deployment is None:
            return
        existing = deployment.versions.get(request.version or "")
        if existing is not None and existing.state != "failed":
            raise Conflict(
                f"{uid}@{request.version} is there already ({existing.state}); choose another version", param="version"
            )
        there = [version for version in deployment.versions.values() if version.state not in ("failed", "unloading")]
        if there and not request.replace and request.weight is None:
            raise Conflict(
                f"the model {uid!r} is there already; give replace: true to put this bundle in its place, or a weight "
                "to serve it beside what is there",
                param="uid",
            )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, deployment: Deployment, version: Version) -> None:
        async with self._turn:
            if version.state != "queued":  # unloaded before it was its turn
                self._forget(deployment, version)
                return
            started = time.monotonic()
            try:
                model = await self._loaded(version)
            except InferenceXError as error:
                _LOG.error("%s@%s: could not be loaded: %s", version.uid, version.name, error)
                self._failed(deployment, version, error)
                return
            except Exception as error:  # of any kind: whoever asked for the load is told of it
                _LOG.exception("%s@%s: could not be loaded", version.uid, version.name)
                told = BackendError(f"{version.request.path}: {type(error).__name__}: {error}")
                self._failed(deployment, version, told)
                return
            seconds = time.monotonic() - started
        if version.is_unloading:  # meanwhile, nobody wants it any more
            self._forget(deployment, version)
            return
        model.start()
        version.is_ready(model, seconds)
        self._tell(lambda observer: observer.model_loaded(model, seconds))
        _LOG.info(
            "%s@%s: ready after %.1f s; %s",
            version.uid,
            version.name,
            seconds,
            _describe(version),
        )
        self._switch(deployment, version)

    async def _loaded(self, version: Version) -> ServedModel:
        request, loop = version.request, asyncio.get_running_loop()

        def set_progress(phase: Phase, fraction: float) -> None:
            if version.state != "unloading":
                version.state, version.fraction = phase, fraction

        def report(phase: Phase, fraction: float) -> None:
            loop.call_soon_threadsafe(set_progress, phase, fraction)

        def work() -> LoadedReplicas:
            return self._loader(request.path, request.options, report)

        version.state = "loading"
        _LOG.info("%s@%s: loading %s", version.uid, version.name, request.path)
        loaded = await in_background(f"load-{version.uid}", work)
        version.memory = loaded.memory
        return ServedModel(version.uid, version.name, request.path, loaded.llms, loaded.options)

    def _failed(self, deployment: Deployment, version: Version, error: InferenceXError) -> None:
        if version.is_unloading:
            self._forget(deployment, version)
            return
        version.has_failed(error)
        self._tell(lambda observer: observer.model_failed(version.uid, error))

    def _switch(self, deployment: Deployment, version: Version) -> None:
        """Give a version that is ready its traffic. Nothing waits in here, so no request sees half of it."""
        request = version.request
        if request.aliases is not None:
            deployment.aliases = request.aliases
        for other in deployment.versions.values():
            if other.model is not None:
                other.model.aliases = deployment.aliases
        if request.sticky is not None:
            deployment.sticky = request.sticky
        if request.weight is not None and deployment.serving:
            deployment.add_beside(version, request.weight)
            return
        replaced = deployment.replace_all(version)
        keep = self.keep_previous if request.keep_previous is None else request.keep_previous
        kept = replaced[:1] if keep else []
        others = [other for other in deployment.versions.values() if other.state == "ready" and other is not version]
        if request.replace:
            self._retire(deployment, [other for other in others if other not in kept], self.drain_timeout)

    def _retire(self, deployment: Deployment, versions: Sequence[Version], timeout: float) -> None:
        """Take versions out of service, and unload each once its last request has ended, or after `timeout` seconds."""
        for version in versions:
            if version.model is not None:
                version.hurry_after(timeout)
            if version.state == "unloading":
                continue
            is_loading = version.state in ("queued", "loading", "warming")
            version.state, version.weight = "unloading", 0.0
            if version.model is not None:
                self._begin(self._drain(deployment, version, version.model))
            elif not is_loading:  # a load that is under way ends by itself, and finds that nobody wants it
                self._forget(deployment, version)

    async def _drain(self, deployment: Deployment, version: Version, model: ServedModel) -> None:
        if not await version.unused(model):
            _LOG.warning(
                "%s@%s: %d requests are under way and have no time left: they are aborted",
                version.uid,
                version.name,
                model.num_leases,
            )
        told = Unavailable(f"the model {version.uid!r} was unloaded before it was done", code="model_unloading")
        await in_background(f"unload-{version.uid}", partial(model.stop, told))
        self._tell(partial(_unloaded, model))
        self._forget(deployment, version)
        del model
        give_memory_back()  # what loading made refers to itself in places
        _LOG.info("%s@%s: unloaded", version.uid, version.name)

    def _tell(self, what: Callable[[ModelObserver], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:  # of any kind: what fails is a measurement, and the model is sound
                _LOG.exception("%s failed to note what became of a model", type(observer).__name__)

    def _forget(self, deployment: Deployment, version: Version) -> None:
        version.is_gone()
        deployment.forget(version)
        if not deployment.versions and self._deployments.get(deployment.uid) is deployment:
            del self._deployments[deployment.uid]


def _unloaded(model: ServedModel, observer: ModelObserver) -> None:
    observer.model_unloaded(model)


def _key(caller: Caller | None) -> str | None:
    """Return what a caller is told apart by; None for those who gave no key, who may be anybody."""
    return None if caller is None or caller.name == ANONYMOUS.name else caller.name


def _describe(version: Version) -> str:
    return "memory not estimated" if version.memory is None else f"planned memory {version.memory.describe()}"


def _why_not(deployment: Deployment) -> str:
    """Return why nothing serves a model."""
    reasons = [
        f"version {version.name} is {version.state}" + ("" if version.error is None else f": {version.error}")
        for version in deployment.versions.values()
    ]
    return "; ".join(reasons) or "it has no version"
