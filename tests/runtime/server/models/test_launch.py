"""A server inside a Python program: started, used from both sides, and closed without a trace."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from inferencex.formats.errors import BundleError, InferenceXError, OptionError
from inferencex.runtime import SamplingParams, launch_model
from inferencex.runtime.server.config.settings import Settings
from inferencex.runtime.server.launch import ServerHandle
from inferencex.runtime.server.run import Running

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def server_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("inferencex")]


def test_a_model_is_served_and_used_from_the_same_process(tiny_bundle: Path) -> None:
    with launch_model(tiny_bundle, "tiny", threads=1, max_num_seqs=4, page=False) as server:
        assert server.model == "tiny" and server.url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{server.url}/ready").json()["ready"]
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        (direct,) = server.llm.generate([[5, 6, 7]], GREEDY)
        assert len(direct.outputs[0].token_ids) == 8
        (model,) = httpx.get(f"{server.url}/v1/status").json()["models"]
        assert (model["name"], model["generated_tokens"]) == ("tiny", 16)
        url = server.url
    assert server_threads() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    server.close()
    with pytest.raises(InferenceXError, match="not running"):
        server.llm  # noqa: B018


def test_no_client_notices_that_its_model_is_replaced(tiny_bundle: Path) -> None:
    admin = {"Authorization": "Bearer the-admin-key"}
    options = {"threads": 1, "max_num_seqs": 4, "page": False}

    async def swap(client: httpx.AsyncClient, version: str) -> None:
        body = {"uid": "m", "path": tiny_bundle.name, "version": version, "replace": True, "options": {"threads": 1}}
        response = await client.post("/v1/models", json=body, headers=admin)
        assert response.status_code == 202, response.text
        while True:  # every look is a request, so that nothing spins
            detail = (await client.get(response.headers["Location"], headers=admin)).json()
            if [each["version"] for each in detail["versions"]] == [version]:
                return
            assert not any(each["error"] for each in detail["versions"])

    async def scenario(url: str) -> tuple[list[int], set[str]]:
        statuses: list[int] = []
        texts: set[str] = set()
        swapping = True

        async def ask(client: httpx.AsyncClient) -> None:
            body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "return_token_ids": True}
            while swapping:
                answer = await client.post("/v1/completions", json=body)
                statuses.append(answer.status_code)
                assert answer.status_code == 200, answer.text
                texts.add(str(answer.json()["choices"][0]["token_ids"]))

        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            clients = [asyncio.create_task(ask(client)) for _ in range(4)]
            for version in ("a", "b"):
                await swap(client, version)
            swapping = False
            await asyncio.gather(*clients)
        return statuses, texts

    with launch_model(tiny_bundle, "m", root=tiny_bundle.parent, admin_keys=["the-admin-key"], **options) as server:
        statuses, texts = asyncio.run(scenario(server.url))
        assert set(statuses) == {200} and len(texts) == 1
        metrics = httpx.get(f"{server.url}/metrics").text
        done = 'inferencex_requests_processed_total{kind="completions",model="m",status="ok"}'
        (line,) = [line for line in metrics.splitlines() if line.startswith(done)]
        assert float(line.split()[-1]) == len(statuses)


def test_two_servers_run_side_by_side(tiny_bundle: Path) -> None:
    with launch_model(tiny_bundle, threads=1, page=False) as one, launch_model(tiny_bundle, threads=1) as other:
        assert one.url != other.url and one.model == other.model == tiny_bundle.name
        assert httpx.get(f"{one.url}/health").status_code == httpx.get(f"{other.url}/health").status_code == 200


def test_what_cannot_be_served_is_raised_here(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a folder"):
        launch_model(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError):
        launch_model(tmp_path / "empty")
    with pytest.raises(OptionError, match="no option 'max_seqs'"):
        launch_model(tiny_bundle, max_seqs=4)
    with pytest.raises(OptionError, match="max-num-seqs"):
        launch_model(tiny_bundle, max_num_seqs=0)
    assert server_threads() == []


def test_importing_the_runtime_does_not_import_the_server() -> None:
    script = (
        "import sys; import inferencex.runtime; from inferencex.runtime import launch_model; "
        "heavy = ('fastapi', 'uvicorn', 'prometheus_client', 'grpc', 'pydantic'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_server_that_is_closed_before_it_listens_stops_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, stopped = ServerHandle(Settings()), threading.Event()
    running = Running("", cast(Any, None), cast(Any, None), stopped.set)

    class Starting:
        """A thread on which the server begins to listen while somebody waits for its end."""

        def is_alive(self) -> bool:
            return True

        def join(self) -> None:
            handle.listening(running)
            assert stopped.is_set()

    monkeypatch.setattr(handle, "_thread", Starting())
    handle.close()
    assert stopped.is_set()
