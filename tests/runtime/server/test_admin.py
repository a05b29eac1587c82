"""Administration over HTTP: loading, replacing, splitting traffic, going back, unloading, and who may."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferencex.formats.errors import BundleError
from inferencex.runtime.server.service import InferenceService
from tests.runtime.server.models.hash_loader import HashLoader
from tests.runtime.server.operated import USER, operate


@pytest.fixture
def loader(hash_backend_class: Callable[[], Any]) -> HashLoader:
    return HashLoader(hash_backend_class)


@pytest.fixture
def root(text_bundle: Path, tmp_path: Path) -> Path:
    for name in ("a", "b"):
        shutil.copytree(text_bundle, tmp_path / "models" / name)
        (tmp_path / "models" / name / "bundle.json").write_text("{}")
    return tmp_path / "models"


async def load(client: httpx.AsyncClient, service: InferenceService, **body: Any) -> dict[str, Any]:
    """Load a bundle and wait for the end."""
    response = await client.post("/v1/models", json=body)
    assert response.status_code == 202, response.text
    name = response.json()["versions"][-1]["version"]
    await service.registry.get(body["uid"]).version(name).loaded()
    detail: dict[str, Any] = (await client.get(response.headers["Location"])).json()
    return detail


def test_a_model_from_load_to_unload(loader: HashLoader, root: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        loader.held = threading.Event()
        response = await client.post(
            "/v1/models", json={"uid": "team/m", "path": "a", "replicas": 2, "aliases": ["m"], "version": "v1"}
        )
        assert response.status_code == 202
        location = response.headers["Location"]
        assert location == "/v1/admin/models/team%2Fm"
        await asyncio.to_thread(loader.begun.wait, 30)
        while (detail := (await client.get(location)).json())["versions"][0]["state"] != "loading":
            await asyncio.sleep(0)
        assert not detail["ready"] and detail["versions"][0]["fraction"] == 0
        loader.held.set()
        await service.registry.get("m").version("v1").loaded()
        detail = (await client.get("/v1/admin/models/m")).json()
        assert detail["ready"] and detail["uid"] == "team/m" and detail["aliases"] == ["m"]
        (version,) = detail["versions"]
        assert (version["state"], version["share"], version["replicas"], version["leases"]) == ("ready", 1.0, 2, 0)
        assert version["path"] == str(root / "a") and version["error"] is None and version["loaded_at"] > 1_600_000_000
        listed = (await client.get("/v1/admin/models")).json()
        assert listed == {"object": "list", "data": [detail]}
        gone = service.registry.get("m").version("v1")
        response = await client.delete("/v1/models/team/m")
        assert response.status_code == 202 and response.json()["versions"][0]["state"] == "unloading"
        await gone.gone()
        assert (await client.get(location)).status_code == 404
        assert (await client.delete("/v1/models/team/m")).status_code == 404

    operate(scenario, loader, (root,))


def test_a_canary_is_weighed_promoted_and_rolled_back(loader: HashLoader, root: Path) -> None:
    def shares(detail: dict[str, Any]) -> dict[str, float]:
        return {version["version"]: version["share"] for version in detail["versions"]}

    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        await load(client, service, uid="m", path="a")
        detail = await load(client, service, uid="m", path="b", weight=0.1)
        assert shares(detail) == {"1": pytest.approx(0.9), "2": pytest.approx(0.1)} and detail["can_roll_back"]
        changed = await client.patch("/v1/models/m", json={"weights": {"1": 1, "2": 3}, "sticky": True})
        assert shares(changed.json()) == {"1": 0.25, "2": 0.75} and changed.json()["sticky"]
        back = await client.post("/v1/models/m/rollback")
        assert back.status_code == 200 and shares(back.json()) == {"1": pytest.approx(0.9), "2": pytest.approx(0.1)}
        detail = await load(client, service, uid="m", path="a", replace=True, keep_previous=True, version="next")
        assert shares(detail)["next"] == 1.0 and detail["can_roll_back"] is False  # version 2 was not kept
        two = await client.delete("/v1/models/m", params={"version": "1", "timeout": 0})
        assert two.status_code == 202
        refused = await client.post("/v1/models/m/rollback")
        assert refused.status_code == 409 and refused.json()["error"]["type"] == "conflict_error"

    operate(scenario, loader, (root,))


def test_only_administrators_are_let_in(loader: HashLoader, root: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        await load(client, service, uid="m", path="a")
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/v1/models", {"uid": "x", "path": "a"}),
            ("DELETE", "/v1/models/m", None),
            ("PATCH", "/v1/models/m", {"weights": {"1": 1}}),
            ("POST", "/v1/models/m/rollback", None),
            ("GET", "/v1/admin/models", None),
            ("GET", "/v1/admin/models/m", None),
            ("GET", "/v1/admin/bundles", None),
        ]
        for headers, status, kind in (
            (USER, 403, "permission_error"),
            ({"Authorization": "Bearer wrong"}, 401, "authentication_error"),
            ({"Authorization": ""}, 401, "authentication_error"),
        ):
            for method, path, body in calls:
                response = await client.request(method, path, json=body, headers=headers)
                assert response.status_code == status, (method, path, response.text)
                assert response.json()["error"]["type"] == kind
        assert [deployment.uid for deployment in service.registry.deployments] == ["m"]

    operate(scenario, loader, (root,))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"uid": "m", "path": "../secret"}, 403, None),
        ({"uid": "m", "path": "/etc"}, 403, None),
        ({"uid": "m", "path": "nothing"}, 400, "path"),
        ({"uid": "there", "path": "a"}, 409, "uid"),
        ({"uid": "there", "path": "a", "replace": True, "weight": 0.5}, 400, "weight"),
        ({"uid": "a@b", "path": "a"}, 400, "uid"),
        ({"uid": "m", "path": "a", "replicas": 0}, 400, "replicas"),
        ({"uid": "m", "path": "a", "weight": 2}, 400, "weight"),
        ({"uid": "m", "path": "a", "weights": 1}, 400, "weights"),
        ({"uid": "m", "path": "a", "options": {"max_num_seq": 4}}, 400, "options.max_num_seq"),
        ({"uid": "m", "path": "a", "options": {"kv_cache_memory": 1 << 20, "num_kv_blocks": 5}}, 400, "options"),
        ({"uid": "m"}, 400, "path"),
        ([], 400, None),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_openais_shape(
    loader: HashLoader, root: Path, body: Any, status: int, param: str | None
) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        await load(client, service, uid="there", path="a")
        response = await client.post("/v1/models", json=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
        assert [deployment.uid for deployment in service.registry.deployments] == ["there"]

    operate(scenario, loader, (root,))


def test_a_load_that_fails_says_why_and_can_be_tried_again(loader: HashLoader, root: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        loader.failure = BundleError("a/model.onnx: is damaged")
        response = await client.post("/v1/models", json={"uid": "m", "path": "a"})
        with pytest.raises(BundleError):
            await service.registry.get("m").version("1").loaded()
        (version,) = (await client.get(response.headers["Location"])).json()["versions"]
        assert (version["state"], version["error"]) == ("failed", "a/model.onnx: is damaged")
        loader.failure = None
        assert (await load(client, service, uid="m", path="a"))["ready"]

    operate(scenario, loader, (root,))


def test_bundles_that_can_be_loaded_are_listed(loader: HashLoader, root: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        bundles = (await client.get("/v1/admin/bundles")).json()["data"]
        assert [bundle["name"] for bundle in bundles] == ["a", "b"] and bundles[0]["size"] > 0

    operate(scenario, loader, (root,))


def test_options_fall_back_on_the_settings(loader: HashLoader, root: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        body = {"uid": "m", "path": "a", "options": {"num_kv_blocks": 7, "kv_cache_dtype": "float32", "threads": 1}}
        await load(client, service, **body)
        options = service.registry.get("m").version("1").request.options
        assert (options.num_kv_blocks, options.kv_cache_dtype, options.max_num_seqs) == (7, "float32", 64)

    operate(scenario, loader, (root,))
