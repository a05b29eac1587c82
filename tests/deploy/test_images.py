"""Images, compose, systemd and nginx: what they name exists."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferencex.runtime.server.config.catalogue import keys
from inferencex.runtime.server.config.load import load_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
OWN_FLAGS = {"--config", "--print-config", "--generate-key", "--hash-key", "--debug", "--help"}


def _instructions(dockerfile: str) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n?", "", dockerfile).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def _stages(dockerfile: str) -> dict[str, list[tuple[str, str]]]:
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for instruction, value in _instructions(dockerfile):
        if instruction == "FROM":
            current = stages.setdefault(value.split(" AS ")[1], [])
        current.append((instruction, value))
    return stages


@pytest.fixture(scope="module")
def stages() -> dict[str, list[tuple[str, str]]]:
    return _stages((DEPLOY / "Dockerfile").read_text(encoding="utf-8"))


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_every_target_runs_without_rights(stages: dict[str, list[tuple[str, str]]], target: str) -> None:
    stage = dict(stages[target])
    assert re.fullmatch(r"\d{4,}:\d{4,}", stage["USER"]), "a number: Kubernetes checks that it is not root's"
    assert json.loads(stage["ENTRYPOINT"]) == ["inferencex", "serve"]
    assert "/health" in stage["HEALTHCHECK"] and "PYTHONDONTWRITEBYTECODE=1" in stage["ENV"]
    assert "--no-index" in stage["RUN"] and "[serve]" in stage["RUN"], "wheels of the builder, and nothing else"
    assert stage["EXPOSE"] == str({key.path: key for key in keys()}["server.port"].default)


def test_targets_differ_in_nothing_but_their_base(stages: dict[str, list[tuple[str, str]]]) -> None:
    def comparable(target: str) -> list[tuple[str, str]]:
        return [(name, value.replace(" nvidia-ml-py", "")) for name, value in stages[target] if name != "FROM"]

    assert comparable("cpu") == comparable("cuda") == comparable("rocm")
    assert list(stages)[-1] == "cpu", "the last one is what is built when none is named"


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_images_for_gpus_can_compute_on_them(stages: dict[str, list[tuple[str, str]]], vendor: str) -> None:
    """The Triton backend needs torch; Triton needs a compiler, Python's headers, and a place to run programs from."""
    stage = dict(stages[f"{vendor}-system"])
    assert "'torch>=2.13'" in stage["RUN"] and {"gcc", "libc6-dev", "python3-dev"} <= set(stage["RUN"].split())
    assert ("--index-url" in stage["RUN"]) == (vendor == "rocm"), "PyPI has torch for CUDA alone"
    server = yaml.safe_load((DEPLOY / f"compose.{vendor}.yaml").read_text(encoding="utf-8"))["services"]["server"]
    assert any(mount.startswith(f"{server['environment']['TRITON_CACHE_DIR']}:exec") for mount in server["tmpfs"])


def test_the_builder_gets_what_the_wheel_is_made_of(stages: dict[str, list[tuple[str, str]]]) -> None:
    copied = {name for instruction, value in stages["builder"] if instruction == "COPY" for name in value.split()[:-1]}
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert packages | {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "constraints.txt"} == copied
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == copied


def test_images_are_pinned(stages: dict[str, list[tuple[str, str]]]) -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    named = re.findall(r"ARG \w+_BASE=(\S+)", text) + re.findall(r"^FROM ([^$\s]+:\S+)", text, re.M)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    named += [service["image"] for service in compose["services"].values() if "build" not in service]
    assert len(named) == 6
    assert all(re.search(r":v?\d", image) for image in named), named


def test_variables_and_flags_exist() -> None:
    variables = {key.variable for key in keys()} | {"INFERENCEX_CONFIG"}
    flags = {key.flag for key in keys()} | {key.off_flag for key in keys()} | OWN_FLAGS
    assert any("INFERENCEX_SERVER__HOST" in path.read_text(encoding="utf-8") for path in FILES)
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for variable in re.findall(r"\bINFERENCEX_[A-Z_]+\b", text):
            assert variable in variables, f"{path.name} sets {variable}"
        # What stands in a list of arguments, or behind the command.
        lines = re.findall(r"""(?:args|command): \[(.*)\]""", text) if "prometheus" not in path.name else []
        lines += re.findall(r"inferencex serve(.*)", text)
        for line in lines:
            for flag in re.findall(r"--[a-z][a-z-]+", line):
                assert flag in flags or flag.startswith(("--config.", "--storage")), f"{path.name} gives {flag}"


def test_the_configuration_can_be_loaded() -> None:
    settings = load_settings({}, {}, DEPLOY / "config.yaml").settings
    assert settings.server.drain_timeout < 90, "what compose and systemd give the server to stop"
    assert not settings.server.api_keys


def test_compose_mounts_files_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), f"{name} mounts {source}"
            assert source.startswith((".", "$")) or source in compose["volumes"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network unless somebody opens it"
        assert service["cap_drop"] == ["ALL"]
    server = compose["services"]["server"]
    settings = load_settings({}, {}, DEPLOY / "config.yaml").settings
    assert f"127.0.0.1:{settings.server.port}:{settings.server.port}" in server["ports"]
    assert server["read_only"] and server["tmpfs"] == ["/tmp"]
    seconds = int(server["stop_grace_period"].removesuffix("s"))
    assert seconds > settings.server.drain_timeout


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_compose_files_for_gpus_extend_the_server(vendor: str) -> None:
    extension: dict[str, Any] = yaml.safe_load((DEPLOY / f"compose.{vendor}.yaml").read_text(encoding="utf-8"))
    assert list(extension["services"]) == ["server"]


def test_the_unit_stops_the_server_gently() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "systemd" / "inferencex.service", encoding="utf-8")
    service = unit["Service"]
    settings = load_settings({}, {}, DEPLOY / "config.yaml").settings
    assert int(service["TimeoutStopSec"]) > settings.server.drain_timeout
    assert "inferencex serve --config" in service["ExecStart"] and service["DynamicUser"] == "yes"


def test_nginx_passes_streams_on() -> None:
    text = (DEPLOY / "nginx" / "inferencex.conf").read_text(encoding="utf-8")
    assert text.count("{") == text.count("}")
    settings = load_settings({}, {}, DEPLOY / "config.yaml").settings
    main = re.search(r"location / \{(.*?)\}", text, re.S)
    assert main and "proxy_buffering off" in main[1] and "gzip off" in main[1]
    timeout = re.search(r"proxy_read_timeout (\d+)s", text)
    assert timeout and int(timeout[1]) > settings.server.request_timeout
    size = re.search(r"client_max_body_size (\d+)m", text)
    assert size and int(size[1]) << 20 == settings.server.max_body_bytes
    assert f"127.0.0.1:{settings.server.port} " in text and f"127.0.0.1:{settings.server.grpc_port};" in text
    for line in re.sub(r"#.*", "", text).splitlines():
        assert not line.strip() or re.search(r"[;{}]\s*$", line), f"nginx.conf: {line}"
