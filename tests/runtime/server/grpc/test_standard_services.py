"""The standard services beside ours: health and reflection."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inferencex.runtime import LLM
from inferencex.runtime.server.config.keys_setting import ApiKey, key_store
from inferencex.runtime.server.grpc.server import SERVICE_NAME
from tests.runtime.server.grpc.calling import Scene, call, failure

KEY = ApiKey(key="a-user-key")  # type: ignore[arg-type]
KEYS = key_store((KEY,), ())
BEARER = (("authorization", "Bearer a-user-key"),)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def health(scene: Scene) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(scene.channel)


async def ask(scene: Scene, name: str = "") -> int:
    answer = await health(scene).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


async def reflect(scene: Scene, **fields: str) -> reflection_pb2.ServerReflectionResponse:
    stub = reflection_pb2_grpc.ServerReflectionStub(scene.channel)
    stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**fields)]))
    return await stream.read()


def test_health_follows_the_service(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        assert [await ask(scene), await ask(scene, SERVICE_NAME)] == [SERVING, SERVING]
        error = await failure(ask(scene, "absent"))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        scene.service.begin_drain()
        assert [await ask(scene), await ask(scene, SERVICE_NAME)] == [NOT_SERVING, NOT_SERVING]

    call(llm, scenario, KEYS)


def test_health_is_not_serving_before_a_model_is_loaded(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        [version] = scene.service.registry.unload("tiny")
        assert await ask(scene) == NOT_SERVING
        await version.gone()
        assert await ask(scene) == NOT_SERVING

    call(llm, scenario)


def test_who_watches_hears_of_the_drain_at_once(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        watching = health(scene).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        absent = health(scene).Watch(health_pb2.HealthCheckRequest(service="absent"))
        assert (await watching.read()).status == SERVING
        assert (await absent.read()).status == UNKNOWN
        scene.server.begin_drain()
        assert (await watching.read()).status == NOT_SERVING
        assert await watching.read() == grpc.aio.EOF == await absent.read()
        assert await ask(scene) == NOT_SERVING

    call(llm, scenario)


def test_reflection_describes_the_interface(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        answer = await reflect(scene, list_services="")
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
        answer = await reflect(scene, file_containing_symbol="inferencex.v1.GenerateRequest")
        assert b"GenerateStream" in answer.file_descriptor_response.file_descriptor_proto[0]

    call(llm, scenario)


def test_without_docs_there_is_no_reflection(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        error = await failure(reflect(scene, list_services=""))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED

    call(llm, scenario, docs=False)


@pytest.mark.parametrize("protect", [("health",), ("docs",)])
def test_what_is_protected_needs_a_key(llm: LLM, protect: tuple[str, ...]) -> None:
    async def scenario(scene: Scene) -> None:
        stub = health(scene)
        request = health_pb2.HealthCheckRequest()
        if "health" in protect:
            for refused in (stub.Check(request), stub.Watch(request).read()):
                assert (await failure(refused)).code() == grpc.StatusCode.UNAUTHENTICATED
            assert (await stub.Check(request, metadata=BEARER)).status == SERVING
            assert await reflect(scene, list_services="")
        else:
            assert (await failure(reflect(scene, list_services=""))).code() == grpc.StatusCode.UNAUTHENTICATED
            assert await ask(scene) == SERVING

    call(llm, scenario, KEYS, protect=protect, api_keys=(KEY,))
