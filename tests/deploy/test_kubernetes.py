"""The manifests: valid by Kubernetes' own schemas, consistent with each other and with the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from inferencex.runtime.server.config.load import load_settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
CUSTOM = {"Kustomization", "HTTPRoute", "PodMonitor"}  # not in Kubernetes' own schemas
MANIFESTS = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "prometheus-adapter.yaml")


def _load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def _settings(tmp_path: Path) -> Any:
    path = tmp_path / "config.yaml"
    path.write_text(_load("base/configmap.yaml")["data"]["config.yaml"], encoding="utf-8")
    return load_settings({}, {}, path).settings


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_manifests_follow_the_schema(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    if manifest["kind"] not in CUSTOM:
        validate(manifest, "1.31", strict=True)


def test_kustomizations_name_files_that_exist() -> None:
    for path in FOLDER.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text(encoding="utf-8"))
        for resource in kustomization["resources"]:
            assert (path.parent / resource).exists(), f"{path} names {resource}"
        listed = {*kustomization["resources"], "kustomization.yaml", "secret.example.yaml"}
        assert {other.name for other in path.parent.iterdir()} <= listed, f"{path.parent.name} has a file it leaves out"


@pytest.mark.parametrize("name", ["base", "canary"])
def test_a_pod_is_asked_and_stopped_as_the_server_is_set(name: str, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    spec = _load(f"{name}/deployment.yaml")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.server.port, "grpc": settings.server.grpc_port}
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > sleep + settings.server.drain_timeout
    assert int(container["resources"]["limits"]["cpu"]) == settings.engine.threads
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and context["capabilities"]["drop"] == ["ALL"]
    assert spec["securityContext"]["runAsNonRoot"] and not context["allowPrivilegeEscalation"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}
    secrets = {entry["valueFrom"]["secretKeyRef"]["key"] for entry in container["env"]}
    assert secrets == set(_load("base/secret.example.yaml")["stringData"])


@pytest.mark.parametrize("name", ["base", "canary"])
def test_selectors_find_their_pods(name: str) -> None:
    deployment, service = _load(f"{name}/deployment.yaml"), _load(f"{name}/service.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"].items() <= labels.items()
    other = _load(f"{'canary' if name == 'base' else 'base'}/service.yaml")["spec"]["selector"]
    assert not other.items() <= labels.items(), "requests for one track do not go to the other"
    assert _load("base/disruption.yaml")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports


def test_the_canary_is_the_stable_deployment_but_for_what_is_tried() -> None:
    stable, canary = _load("base/deployment.yaml"), _load("canary/deployment.yaml")
    for deployment in (stable, canary):
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        del container["image"], container["args"], deployment["metadata"], deployment["spec"]["replicas"]
    text = yaml.safe_dump(canary).replace("inferencex/track: canary", "inferencex/track: stable")
    assert yaml.safe_load(text) == stable
    names = {backend["name"] for backend in _load("canary/httproute.yaml")["spec"]["rules"][0]["backendRefs"]}
    assert names == {_load(f"{name}/service.yaml")["metadata"]["name"] for name in ("base", "canary")}


def test_the_autoscaler_reads_a_metric_that_the_adapter_offers() -> None:
    autoscaler = _load("base/autoscaler.yaml")["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == _load("base/deployment.yaml")["metadata"]["name"]
    [metric] = autoscaler["metrics"]
    [rule] = _load("monitoring/prometheus-adapter.yaml")["rules"]["custom"]
    name = metric["pods"]["metric"]["name"]
    assert name == rule["name"]["as"] == "inferencex_pending_requests"
    assert rule["seriesQuery"].startswith(f"{name}{{") and "<<.LabelMatchers>>" in rule["metricsQuery"]
    from inferencex.runtime.server.telemetry.metrics import Metrics

    assert f"# TYPE {name} gauge" in Metrics().render().decode()


def test_gpu_pods_are_patches_of_the_same_deployment() -> None:
    kustomization = _load("cuda/kustomization.yaml")
    [patch] = kustomization["patches"]
    assert patch["target"]["name"] == _load("base/deployment.yaml")["metadata"]["name"]
    deployment = _load("base/deployment.yaml")
    for operation in yaml.safe_load(patch["patch"]):
        assert operation["path"].startswith("/spec/template/spec/")
        *parents, last = operation["path"].replace("~1", "|").strip("/").split("/")
        holder: Any = deployment
        for part in parents:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        assert (last.replace("|", "/") in holder) == (operation["op"] == "replace"), operation["path"]
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    replaced = [operation["path"] for operation in yaml.safe_load(patch["patch"]) if operation["op"] == "replace"]
    place = next(place for place, volume in enumerate(volumes) if volume["name"] == "tmp")
    assert replaced == [f"/spec/template/spec/volumes/{place}/emptyDir/sizeLimit"]
    [image] = kustomization["images"]
    base = _load("base/deployment.yaml")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image["name"] == base.split(":")[0]
