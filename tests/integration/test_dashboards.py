"""Dashboards, alerts and the autoscaler's rule read metrics that a server has."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml

from ops.bench.served import free_port
from service.client import generate_request
from tests.integration.serving import ROOT, serving, until
from tests.integration.test_node import node_of

DEPLOY = ROOT / "ops" / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "colibri.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
ADAPTER = DEPLOY / "k8s" / "prometheus-adapter.yaml"
_NAME = re.compile(r"\b(?:vllm:|colibri_)\w+")


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the samples of a node and of a server that has answered by it."""
    port = free_port()
    options = ("--share", "1/1", "--metrics-port", str(port))
    log = tmp_path_factory.mktemp("node") / "log"
    with node_of(tiny_model, *options, log=log) as node, serving(tiny_model, metrics_port=0, nodes=node.address) as running:
        running.client.complete(generate_request("hello", max_tokens=4, temperature=0, ignore_eos=True))
        address = f"http://127.0.0.1:{running.server.metrics.port}/metrics"
        pages = (
            until(lambda: _page(address, "colibri_expert_load_max_over_mean{"), "the experts' counters have been looked at"),
            _page(f"http://127.0.0.1:{port}/metrics", "colibri_node_share_bytes "),
        )
    return {name for page in pages for name in _names(page)}


def _names(page: str) -> set[str]:
    declared = {f"{name}_total" for name in re.findall(r"^# TYPE (\S+?)(?:_total)? counter$", page, re.MULTILINE)}
    return declared | set(re.findall(r"^(\S+?)(?:\{| )", page, re.MULTILINE))


def _page(address: str, looked_for: str) -> str:
    """What Prometheus gets, which prefers OpenMetrics; nothing if that is not in it."""
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    request = urllib.request.Request(address, headers={"Accept": accepted})
    with urllib.request.urlopen(request, timeout=10) as answer:
        page: str = answer.read().decode()
    return page if looked_for in page else ""


def expressions(path: Path) -> list[str]:
    """Every PromQL expression of a file."""
    if path.suffix == ".json":
        panels = json.loads(path.read_text())["panels"]
        return [target["expr"] for panel in panels for target in panel.get("targets", [])]
    content = yaml.safe_load(path.read_text())
    if path == ADAPTER:
        return [rule["seriesQuery"] for rule in content["rules"]["custom"]]
    return [rule["expr"] for group in content["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("path", [DASHBOARD, RULES, ADAPTER], ids=lambda path: path.name)
def test_metrics_that_are_asked_for_exist(path: Path, exported: set[str]) -> None:
    asked = {name for expression in expressions(path) for name in _NAME.findall(expression)}
    assert asked
    assert asked <= exported


def test_panels_lie_side_by_side() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_what_compose_mounts_is_there() -> None:
    override = yaml.safe_load((ROOT / "docker-compose.override.yml").read_text())["services"]
    mounts = [volume.split(":")[0] for service in override.values() for volume in service.get("volumes", [])]
    folders = [ROOT / mount for mount in mounts if mount.startswith("./")]
    assert len(folders) == 3
    assert all(folder.is_dir() for folder in folders)
