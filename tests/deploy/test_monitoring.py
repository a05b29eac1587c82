"""Dashboards, alerts and the autoscaler ask for metrics that the server has, by labels that these have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from inferencex.runtime.server.telemetry.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "inferencex.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
FROM_PROMETHEUS = {"job", "instance", "le", "namespace", "pod"}


@pytest.fixture(scope="module")
def series() -> set[str]:
    """The names of all series that the server can have, whether they have samples yet or not."""
    names: set[str] = set()
    for line in Metrics().render().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def _expressions() -> list[tuple[str, str]]:
    panels = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    alerts = [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]
    return panels + alerts


def _metrics(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:inferencex|process)_\w+", re.sub(r'"[^"]*"', "", expression)))


@pytest.mark.parametrize(("title", "expression"), _expressions())
def test_metrics_exist(series: set[str], title: str, expression: str) -> None:
    found = _metrics(expression)
    assert found or expression.startswith("up{"), expression
    assert found <= series, f"{title} asks for {sorted(found - series)}"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_labels_exist() -> None:
    known = {"model", "kind", "status", "reason", "version", "gpu"} | FROM_PROMETHEUS
    for title, expression in _expressions():
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in labels.split(",")} <= known, title
        assert set(re.findall(r"(\w+)\s*=~?\s*\"", expression)) <= known, title


def test_names_that_users_were_promised(series: set[str]) -> None:
    assert {
        "inferencex_requests_processed_total",
        "inferencex_request_duration_seconds_bucket",
        "inferencex_pending_requests",
        "inferencex_gpu_memory_used_bytes",
        "inferencex_gpu_utilization",
    } <= series & set().union(*(_metrics(expression) for _, expression in _expressions()))


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used <= variables
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, f"{panel['title']} covers another panel"
        taken |= cells


def test_what_is_provisioned_fits_together() -> None:
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8"))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    [datasource] = source["datasources"]
    chosen = next(v for v in DASHBOARD["templating"]["list"] if v["name"] == "datasource")
    assert datasource["uid"] == chosen["current"]["value"]
    assert datasource["url"].split("/")[2].split(":")[0] in compose["services"]
    for job in scraped["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            assert target.split(":")[0] in compose["services"]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in scraped["rule_files"])
