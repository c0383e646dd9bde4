"""The Kubernetes manifests: what the API server's schemas allow, and what fits together."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from ops.cli import make_app
from service.config import ServeConfig
from tests.unit.ops.kustomize import Manifest, build

K8S = Path(__file__).resolve().parents[3] / "ops" / "deploy" / "k8s"
BUILDS = ("base", "overlays/secure")
VERSIONS = ("1.29", "1.33", "1.37")  # gRPC probes are stable from 1.27 on


@pytest.fixture(params=BUILDS)
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(K8S / request.param)


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] == kind]


def workloads(objects: list[Manifest]) -> list[Manifest]:
    return of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet")


def pod(workload: Manifest) -> dict[str, Any]:
    found = workload["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def selected(objects: list[Manifest], labels: dict[str, str]) -> list[str]:
    """Names of the workloads whose pods carry these labels."""
    found = workloads(objects)
    return [one["metadata"]["name"] for one in found if labels.items() <= one["spec"]["template"]["metadata"]["labels"].items()]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_the_schemas_allow(objects: list[Manifest], version: str) -> None:
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("change", [{"replica": 3}, {"replicas": "three"}])
def test_the_schemas_refuse_what_is_misspelt(change: dict[str, object]) -> None:
    wrong = copy.deepcopy(of_kind(build(K8S / "base"), "StatefulSet")[0])
    wrong["spec"] |= change
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="NOT TESTED: the same from kustomize itself. There is no kubectl")
def test_kustomize_builds_the_same(name: str) -> None:
    made = subprocess.run(["kubectl", "kustomize", str(K8S / name)], capture_output=True, text=True, check=True).stdout

    def key(one: Manifest) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    assert sorted(yaml.safe_load_all(made), key=key) == sorted(build(K8S / name), key=key)


def test_selectors_select(objects: list[Manifest]) -> None:
    front, node = ["colibri"], ["colibri-node"]
    labels = {one["metadata"]["name"]: one["spec"]["selector"] for one in of_kind(objects, "Service")}
    assert {name: selected(objects, chosen) for name, chosen in labels.items()} == {"colibri": front, "colibri-nodes": node}
    for kind, where in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        found = {one["metadata"]["name"]: selected(objects, one["spec"][where]["matchLabels"]) for one in of_kind(objects, kind)}
        assert found == {"colibri": front, "colibri-node": node}
    for one in workloads(objects):
        assert selected(objects, one["spec"]["selector"]["matchLabels"]) == [one["metadata"]["name"]]


def test_only_front_ends_reach_nodes(objects: list[Manifest]) -> None:
    policy = next(one for one in of_kind(objects, "NetworkPolicy") if one["metadata"]["name"] == "colibri-node")
    callers = [rule["from"] for rule in policy["spec"]["ingress"] if {"protocol": "TCP", "port": "grpc"} in rule["ports"]]
    assert [selected(objects, peer["podSelector"]["matchLabels"]) for peers in callers for peer in peers] == [["colibri"]]
    assert policy["spec"]["egress"] == []


def test_nodes_are_found_where_front_ends_look(objects: list[Manifest]) -> None:
    nodes = of_kind(objects, "StatefulSet")[0]
    service = next(one for one in of_kind(objects, "Service") if one["metadata"]["name"] == nodes["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    port = service["spec"]["ports"][0]["port"]
    settings = {item["name"]: item["value"] for item in pod(of_kind(objects, "Deployment")[0])["containers"][0]["env"]}
    assert settings["COLIBRI_NODES"] == f"dns:///{service['metadata']['name']}:{port}"


def test_commands_and_settings_exist(objects: list[Manifest]) -> None:
    commands = get_command(make_app()).commands
    for one in workloads(objects):
        container = pod(one)["containers"][0]
        name, *arguments = container["args"]
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {part for part in arguments if part.startswith("--")} <= known
        settings = {item["name"].removeprefix("COLIBRI_").lower() for item in container.get("env", [])}
        options = {option.removeprefix("--").replace("-", "_") for option in known}
        assert settings <= (set(ServeConfig.__dataclass_fields__) if name == "serve" else options)


def test_drain_fits_into_the_grace(objects: list[Manifest]) -> None:
    for one in workloads(objects):
        before = pod(one)["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod(one)["terminationGracePeriodSeconds"] > float(before[1]) + ServeConfig().drain_grace


def test_pods_ask_for_no_privileges(objects: list[Manifest]) -> None:
    for one in workloads(objects):
        assert pod(one)["securityContext"]["runAsNonRoot"]
        assert not pod(one)["enableServiceLinks"]  # COLIBRI_PORT would be taken for a setting
        limits = pod(one)["containers"][0]["securityContext"]
        assert not limits["allowPrivilegeEscalation"]
        assert limits["readOnlyRootFilesystem"]
        assert limits["capabilities"]["drop"] == ["ALL"]
        assert limits["capabilities"].get("add", []) in ([], ["SYS_NICE"])


def test_probes_go_by_grpc_or_with_a_certificate(objects: list[Manifest]) -> None:
    for one in workloads(objects):
        container = pod(one)["containers"][0]
        for probe in (container["startupProbe"], container["livenessProbe"], container["readinessProbe"]):
            if "grpc" in probe:
                assert probe["grpc"]["port"] == container["ports"][0]["containerPort"]
            else:
                files = [part.partition("=")[2] for part in probe["exec"]["command"] if part.startswith("--tls")]
                assert sorted(files) == ["/run/colibri-tls/ca.crt", "/run/colibri-tls/tls.crt", "/run/colibri-tls/tls.key"]


def test_autoscaling_reads_a_metric_that_is_handed_on(objects: list[Manifest]) -> None:
    scaler = of_kind(objects, "HorizontalPodAutoscaler")[0]["spec"]
    assert selected(objects, {"app.kubernetes.io/component": "front"}) == [scaler["scaleTargetRef"]["name"]]
    rule = yaml.safe_load((K8S / "prometheus-adapter.yaml").read_text())["rules"]["custom"][0]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith("vllm:num_requests_waiting{")
