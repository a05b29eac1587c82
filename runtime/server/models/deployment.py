"""The versions of one model: which there are, how traffic is split between them, and how to go back."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping

from inferencex.runtime.server.errors import Conflict, InvalidRequest, ModelNotFound, Unavailable
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.models.version import Version

_LOADING_RETRY_AFTER = 5.0  # seconds


class Deployment:
    """All versions of a model by their names.

    uid:      the model's name
    aliases:  further names of it
    sticky:   each caller always gets the same version, until weights change
    required: the server is not ready without it
    """

    def __init__(self, uid: str, *, required: bool = False) -> None:
        self.uid = uid
        self.aliases: tuple[str, ...] = ()
        self.sticky = False
        self.required = required
        self.versions: dict[str, Version] = {}
        self._before: dict[str, float] | None = None  # weights before the last change
        self._num_versions = 0

    @property
    def serving(self) -> list[Version]:
        """Versions that get traffic."""
        return [version for version in self.versions.values() if version.is_serving]

    @property
    def main(self) -> Version | None:
        """The version that gets most of the traffic; None when nothing serves."""
        return max(self.serving, key=lambda version: version.weight, default=None)

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a state to go back to, with all its versions loaded."""
        return self._before is not None and all(self._is_ready(name) for name in self._before)

    def share(self, name: str) -> float:
        """Return the part of the traffic that a version gets, 0 to 1."""
        total = sum(version.weight for version in self.serving)
        version = self.versions.get(name)
        return version.weight / total if version is not None and version.is_serving else 0.0

    def next_name(self) -> str:
        """Return the number of the next version."""
        while True:
            self._num_versions += 1
            if str(self._num_versions) not in self.versions:
                return str(self._num_versions)

    def choose(self, caller: str | None) -> ServedModel:
        """Return the version that serves the next request: by weight, or by caller where that is wanted.

        Raises Unavailable while none is ready, and ModelNotFound when none will be.
        """
        serving = self.serving
        if not serving:
            raise self._nothing_serves()
        if len(serving) == 1:
            chosen = serving[0]
        else:
            total = sum(version.weight for version in serving)
            point = (_point(self.uid, caller) if self.sticky and caller is not None else random.random()) * total
            chosen = serving[-1]
            for version in serving:
                point -= version.weight
                if point < 0:
                    chosen = version
                    break
        if chosen.model is None:
            raise RuntimeError(f"{self.uid}@{chosen.name} is ready without a model")
        return chosen.model

    def version(self, name: str) -> Version:
        """Return the version called `name`; ModelNotFound when there is none."""
        version = self.versions.get(name)
        if version is None:
            there = ", ".join(self.versions) or "none"
            raise ModelNotFound(f"the model {self.uid!r} has no version {name!r}; it has: {there}", param="version")
        return version

    def replace_all(self, version: Version) -> list[Version]:
        """Give all traffic to a version, and return those that had it until now, the main one first."""
        before = sorted(self.serving, key=lambda other: -other.weight)
        self._remember()
        for other in before:
            other.weight = 0.0
        version.weight = 1.0
        return before

    def add_beside(self, version: Version, share: float) -> None:
        """Give a version this share of the traffic, 0 to 1; the others keep their proportions of the rest."""
        self._remember()
        serving = self.serving
        total = sum(other.weight for other in serving)
        for other in serving:
            other.weight = other.weight / total * (1.0 - share)
        version.weight = share if serving else 1.0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Split the traffic by these weights; versions that are not named get none.

        Raises InvalidRequest for weights that are no split, ModelNotFound for an unknown version, Conflict for one
        that is not ready.
        """
        for name, weight in weights.items():
            version = self.version(name)
            if not math.isfinite(weight) or weight < 0:
                raise InvalidRequest(
                    f"the weight of {self.uid}@{name} is {weight}; expected a number from 0", param=f"weights.{name}"
                )
            if weight > 0 and version.state != "ready":
                raise Conflict(
                    f"{self.uid}@{name} is {version.state}, and can get traffic once it is ready",
                    param=f"weights.{name}",
                )
        total = sum(weights.values())
        if not math.isfinite(total):
            raise InvalidRequest(f"the weights of {self.uid!r} add up to more than a number holds", param="weights")
        if not total > 0:
            raise InvalidRequest(
                f"all weights of {self.uid!r} are 0; give at least one version traffic, or delete the model",
                param="weights",
            )
        self._remember()
        for version in self.versions.values():
            version.weight = weights.get(version.name, 0.0)

    def roll_back(self) -> None:
        """Split the traffic as it was before the last change. A second time, it undoes that.

        Raises Conflict when nothing was changed, or when a version that served then is no longer loaded.
        """
        before = self._before
        if before is None:
            raise Conflict(f"the model {self.uid!r} has served with these weights from the start: no way back")
        missing = [name for name in before if not self._is_ready(name)]
        if missing:
            raise Conflict(
                f"the model {self.uid!r} cannot go back to version {', '.join(missing)}, which is not loaded any more; "
                "replace versions with keep_previous to keep that way open"
            )
        self._remember()
        for version in self.versions.values():
            version.weight = before.get(version.name, 0.0)

    def forget(self, version: Version) -> None:
        """Drop a version that is gone."""
        if self.versions.get(version.name) is version:
            del self.versions[version.name]

    def _remember(self) -> None:
        now = {version.name: version.weight for version in self.serving}
        self._before = now or None

    def _is_ready(self, name: str) -> bool:
        version = self.versions.get(name)
        return version is not None and version.state == "ready"

    def _nothing_serves(self) -> Unavailable | ModelNotFound:
        states = {version.state for version in self.versions.values()}
        if states & {"queued", "loading", "warming"}:
            return Unavailable(
                f"the model {self.uid!r} is being loaded; try again later", retry_after=_LOADING_RETRY_AFTER
            )
        if "unloading" in states:
            return Unavailable(f"the model {self.uid!r} is being unloaded", code="model_unloading")
        return ModelNotFound(f"the model {self.uid!r} is not served: it could not be loaded", param="model")


def _point(uid: str, caller: str) -> float:
    """Return where in [0, 1) a caller stands, the same in every process."""
    digest = hashlib.blake2b(f"{uid}\0{caller}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
