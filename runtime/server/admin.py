"""Routes to load, replace and unload models, and to split traffic between their versions. They take an admin's key."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.calls import Caller
from inferencex.runtime.server.errors import Forbidden, InvalidRequest
from inferencex.runtime.server.models.deployment import Deployment
from inferencex.runtime.server.models.options import MAX_REPLICAS, ModelOptions
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.version import LoadRequest, State, Version

Count = Annotated[int, Field(ge=1, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=200)]

DETAILS = "/v1/admin/models"


class LoadOptions(BaseModel):
    """How to load a bundle; what is left out is as the server's settings say."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    backend: str | None = None
    device: str | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    kv_cache_memory: Count | None = None
    num_kv_blocks: Count | None = None
    block_size: Count | None = None
    enable_prefix_caching: bool | None = None
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    threads: Count | None = None
    pin: bool | None = None
    activation_dtype: Literal["auto", "int8", "float32", "bfloat16", "float16"] | None = None
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    tensor_parallel_size: Count | None = None
    warm_up: bool | None = None


class LoadModel(BaseModel):
    """A bundle to load.

    A model that is not there yet gets all its traffic. Where there is one of this uid already, either `replace` puts
    the bundle in its place once it is warm, or `weight` gives it a part of the traffic beside what is there.
    """

    model_config = ConfigDict(extra="forbid")

    uid: Name = Field(description="Name of the model, as requests give it.")
    path: str = Field(min_length=1, max_length=4096, description="Name of a bundle below the model root, or its path.")
    version: Annotated[str, Field(min_length=1, max_length=80)] | None = Field(
        default=None, description="Name of this version; by default the next number."
    )
    aliases: Annotated[list[Name], Field(max_length=32)] | None = Field(
        default=None, description="Further names of the model; by default those it has."
    )
    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS, strict=True, description="Engines, each with its memory.")
    options: LoadOptions = Field(default_factory=LoadOptions)
    replace: bool = Field(default=False, description="Take over all traffic; what served until then is unloaded.")
    keep_previous: bool | None = Field(
        default=None, description="Keep what is replaced loaded, so that a rollback is instant."
    )
    weight: float | None = Field(default=None, ge=0, le=1, description="Share of the traffic, beside other versions.")
    sticky: bool | None = Field(default=None, description="Send each caller to the same version while weights stay.")


class ChangeWeights(BaseModel):
    """A new split of a model's traffic. Weights are relative to each other; versions that are not named get none."""

    model_config = ConfigDict(extra="forbid")

    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(min_length=1)
    sticky: bool | None = None


class MemoryDetail(BaseModel):
    """Bytes that a version was expected to take, all replicas together, when it was loaded."""

    weights: int
    kv_cache: int
    step: int
    total: int


class VersionDetail(BaseModel):
    """A version of a model.

    `fraction` is the part of its replicas that are loaded and warm, `share` the part of the traffic it gets, and
    `leases` the number of requests that use it now.
    """

    version: str
    state: State
    fraction: float
    error: str | None
    path: str
    share: float
    leases: int
    replicas: int
    loaded_at: int | None
    load_seconds: float | None
    memory: MemoryDetail | None


class ModelDetail(BaseModel):
    """A model with all its versions, those included that are being loaded or could not be."""

    object: Literal["admin.model"] = "admin.model"
    uid: str
    aliases: list[str]
    ready: bool
    sticky: bool
    can_roll_back: bool
    versions: list[VersionDetail]


class ModelDetails(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelDetail]


class BundleDetail(BaseModel):
    """A bundle that can be loaded by this name; its size in bytes."""

    name: str
    path: str
    size: int


class BundleDetails(BaseModel):
    """All bundles below the model roots."""

    object: Literal["list"] = "list"
    data: list[BundleDetail]


def require_admin(request: Request) -> Caller:
    """Return who asks; Forbidden unless the key is an administrator's."""
    caller: Caller = request.state.caller
    if not caller.is_admin:
        raise Forbidden(f"{caller.name} may not administer models; send a key of server.admin_keys")
    return caller


def registry_of(request: Request) -> ModelRegistry:
    """Return the models of the application that a request came to."""
    registry: ModelRegistry = request.app.state.service.registry
    return registry


Registry = Annotated[ModelRegistry, Depends(registry_of)]


def router() -> APIRouter:
    """Return the routes below `/v1/models` that change something, and those of `/v1/admin` that tell details."""
    routes = APIRouter(tags=["administration"], dependencies=[Depends(require_admin)])

    @routes.post("/v1/models", status_code=202)
    async def load(body: LoadModel, request: Request, response: Response, registry: Registry) -> ModelDetail:
        """Begin to load a bundle. The answer's Location tells how far it is."""
        version = registry.load(
            LoadRequest(
                uid=body.uid,
                path=registry.paths.resolve(body.path),
                options=_options(body, ModelOptions.from_settings(request.app.state.settings)),
                version=body.version,
                aliases=None if body.aliases is None else tuple(body.aliases),
                replace=body.replace,
                keep_previous=body.keep_previous,
                weight=body.weight,
                sticky=body.sticky,
            )
        )
        response.headers["Location"] = f"{DETAILS}/{quote(version.uid, safe='')}"
        return _detail(registry.get(version.uid))

    @routes.get(DETAILS)
    async def details(registry: Registry) -> ModelDetails:
        """Return all models with their versions, and how far those are that are being loaded."""
        return ModelDetails(data=[_detail(deployment) for deployment in registry.deployments])

    @routes.get(f"{DETAILS}/{{uid:path}}")
    async def detail(uid: str, registry: Registry) -> ModelDetail:
        """Return one model with its versions."""
        return _detail(registry.get(uid))

    @routes.delete("/v1/models/{uid:path}", status_code=202)
    async def unload(
        uid: str,
        response: Response,
        registry: Registry,
        version: str | None = None,
        timeout: Annotated[float | None, Query(ge=0, le=86400, allow_inf_nan=False)] = None,
    ) -> ModelDetail:
        """Begin to unload a model, or one version of it; requests under way are given `timeout` seconds to end."""
        deployment = registry.get(uid)
        registry.unload(uid, version, timeout)
        response.headers["Location"] = f"{DETAILS}/{quote(deployment.uid, safe='')}"
        return _detail(deployment)

    @routes.post("/v1/models/{uid:path}/rollback")
    async def rollback(uid: str, registry: Registry) -> ModelDetail:
        """Split the traffic as before the last change, at once."""
        return _detail(registry.rollback(uid))

    @routes.patch("/v1/models/{uid:path}")
    async def change(uid: str, body: ChangeWeights, registry: Registry) -> ModelDetail:
        """Split the traffic between the versions of a model anew."""
        return _detail(registry.set_weights(uid, body.weights, body.sticky))

    @routes.get("/v1/admin/bundles")
    def bundles(registry: Registry) -> BundleDetails:
        """Return the bundles below the model roots."""
        found = registry.paths.available()
        return BundleDetails(data=[BundleDetail(name=b.name, path=str(b.path), size=b.size) for b in found])

    return routes


def _options(body: LoadModel, defaults: ModelOptions) -> ModelOptions:
    asked = {name: value for name, value in body.options.model_dump().items() if value is not None}
    # Either of the two sets the size of the KV cache; what is asked for replaces what the settings say.
    sizes = {"num_kv_blocks", "kv_cache_memory"}
    if sizes <= set(asked):
        raise InvalidRequest(
            "num_kv_blocks and kv_cache_memory both set the size of the KV cache; give one of them", param="options"
        )
    if sizes & set(asked):
        defaults = replace(defaults, num_kv_blocks=None, kv_cache_memory=None)
    try:
        return replace(defaults, replicas=body.replicas, **asked)
    except OptionError as error:
        raise InvalidRequest(str(error), param="options") from error


def _detail(deployment: Deployment) -> ModelDetail:
    return ModelDetail(
        uid=deployment.uid,
        aliases=list(deployment.aliases),
        ready=deployment.main is not None,
        sticky=deployment.sticky,
        can_roll_back=deployment.can_roll_back,
        versions=[_version(deployment, version) for version in deployment.versions.values()],
    )


def _version(deployment: Deployment, version: Version) -> VersionDetail:
    model, memory = version.model, version.memory
    return VersionDetail(
        version=version.name,
        state=version.state,
        fraction=version.fraction,
        error=None if version.error is None else str(version.error),
        path=str(version.request.path),
        share=deployment.share(version.name),
        leases=0 if model is None else model.num_leases,
        replicas=version.request.options.replicas,
        loaded_at=None if model is None else model.created,
        load_seconds=version.load_seconds,
        memory=None
        if memory is None
        else MemoryDetail(weights=memory.weights, kv_cache=memory.kv_cache, step=memory.step, total=memory.total),
    )
