"""The application for Ray Serve on a local Ray: OpenAI's API through its proxy, and more replicas under load."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.config.catalogue import by_path

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
SECONDS = 180.0  # a process with a model has to start for each replica


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text(encoding="utf-8"))
    return loaded


def test_arguments_are_settings(config: dict[str, Any]) -> None:
    [application] = config["applications"]
    args, [deployment] = application["args"], application["deployments"]
    assert args.keys() <= by_path().keys()
    assert args["engine.threads"] == deployment["ray_actor_options"]["num_cpus"]
    assert deployment["max_ongoing_requests"] == args["engine.max_num_seqs"] + args["server.max_queue"]
    assert config["http_options"]["request_timeout_s"] > by_path()["server.request_timeout"].default


@pytest.fixture(scope="module")
def serve_command() -> list[str]:
    """Ray Serve's command line; skip where it is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        pytest.skip("ray is not installed (pip install 'ray[serve]')")
    return [sys.executable, "-m", "ray.serve.scripts"]


def test_the_file_follows_rays_schema(serve_command: list[str], config: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    assert ServeDeploySchema(**config).applications[0].import_path == "app:application"


@pytest.fixture(scope="module")
def app(serve_command: list[str]) -> Iterator[ModuleType]:
    """The module that serve.yaml names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("app")
        del sys.modules["app"]


def test_what_a_replica_cannot_be_is_refused(app: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no setting 'model\.paht'; did you mean model\.path"):
        app.application({"model.paht": "bundle"})
    with pytest.raises(OptionError, match="nothing to serve"):
        app.replica_settings({})
    with pytest.raises(OptionError, match="would reach one replica of several"):
        app.replica_settings({"model.path": [str(tmp_path)], "server.admin_keys": ["a-key-of-admins"]})
    with pytest.raises(OptionError, match="a replica serves the bundles it is started with"):
        app.replica_settings({"model.root": [str(tmp_path)]})


def test_a_file_and_arguments_go_together(app: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: {tmp_path}}}\nengine: {{threads: 2, max_num_seqs: 8}}\n", encoding="utf-8")
    settings = app.replica_settings({"config": str(path), "engine.threads": 4})
    assert (settings.engine.threads, settings.engine.max_num_seqs) == (4, 8)


@pytest.fixture(scope="module")
def served(
    serve_command: list[str],
    config: dict[str, Any],
    shared_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The address of a local Ray Serve with a small model, which may grow to two replicas."""
    from tests.formats.export.models import bundle

    folder = tmp_path_factory.mktemp("ray")
    stories = bundle(shared_data / "stories260k", folder / "stories", "none")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config["proxy_location"] = "HeadOnly"
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    [application] = config["applications"]
    application["args"] |= {"model.path": str(stories), "engine.threads": 1}
    [deployment] = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 0.1}
    deployment["autoscaling_config"] |= {
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.2,
        "look_back_period_s": 2,
        "metrics_interval_s": 0.2,
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen([*serve_command, "run", str(path)], stdout=log, stderr=log, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _until(lambda: process.poll() is not None or _ready(url))
            assert process.poll() is None, log.seek(0) or log.read()
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS} s"
        time.sleep(0.5)  # there is nothing to wait on in another process's cluster


def _ready(url: str) -> bool:
    try:
        return json.loads(_get(f"{url}/ready"))["ready"] is True
    except (OSError, ValueError):
        return False


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        return bytes(response.read())


def _post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())


def _complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | fields
    answer: dict[str, Any] = json.loads(_post(f"{url}/v1/completions", body))
    return answer


def test_a_replica_answers_as_the_server_does(served: str) -> None:
    assert [model["id"] for model in json.loads(_get(f"{served}/v1/models"))["data"]] == ["default"]
    answer = _complete(served)
    assert answer["choices"][0]["text"].startswith(", there was") and answer["usage"]["completion_tokens"] == 8
    assert b"<!doctype html>" in _get(f"{served}/")
    with pytest.raises(urllib.error.HTTPError) as refused:
        _complete(served, model="other")
    assert refused.value.code == 404 and json.loads(refused.value.read())["error"]["code"] == "model_not_found"


def test_a_stream_comes_event_by_event(served: str) -> None:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{served}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    arrivals, text = [], ""
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response:
            if line.startswith(b"data: {"):
                arrivals.append(time.monotonic())
                text += json.loads(line[6:])["choices"][0]["text"]
    assert line == b"\n" and len(arrivals) > 20
    assert arrivals[-1] - arrivals[0] > 0.01, "in pieces, not all at the end"
    assert text == _complete(served, max_tokens=200)["choices"][0]["text"]


def test_load_brings_another_replica(served: str) -> None:
    def seen() -> set[str]:
        """Start times of the processes that answer, which tell replicas apart."""
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda i: _complete(served, max_tokens=400, ignore_eos=True, seed=i), range(24)))
            metrics = pool.map(lambda _: _get(f"{served}/metrics").decode(), range(24))
        return {line for page in metrics for line in page.splitlines() if line.startswith("process_start_time_seconds")}

    _until(lambda: len(seen()) == 2)  # there was one at the start
