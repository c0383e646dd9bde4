"""What docs/deployment.md promises of docker-compose.yml, on a real Docker engine. Every fault is under load: no call fails, no token
changes."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ops.certs import make_certificates
from service.config import ServeConfig
from tests.compose.conftest import Under, flows
from tests.compose.engine import BACK_S, BASE_IMAGE, IMAGE, until
from tests.compose.stack import NODES_NETWORK, Stack
from tests.fault.load import Answer, answers_to
from tests.multinode.watching import short_requests

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]
EXPERTS = 4 * 8  # layers x experts of the model `tiny`
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the system call's number


def healthy(stack: Stack, container: str) -> bool:
    return bool(stack.inspect(container)["State"].get("Health", {}).get("Status") == "healthy")


def test_image_is_small_and_has_no_build_tools(built: Stack) -> None:
    tools = "for tool in gcc cc c++ ld as make git pip; do command -v $tool; done; python3 -c 'import pip' 2>/dev/null && echo pip; true"
    assert built.engine.docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", tools) == ""
    size, base = (int(built.engine.docker("image", "inspect", "--format", "{{.Size}}", image)) for image in (IMAGE, BASE_IMAGE))
    assert size - base < 200e6


def test_front_end_serves_while_there_are_no_nodes(built: Stack, expected: list[Answer]) -> None:
    try:
        built.compose("up", "-d", "front")
        until(built.serving, "the front end serves", seconds=60)
        assert answers_to(short_requests(), built.target, timeout=60) == expected
        front = built.containers("front")[0]
        until(lambda: healthy(built, front), "its health check passes", seconds=30)
        built.engine.docker("stop", "--time", "60", front)
        assert built.inspect(front)["State"]["ExitCode"] == 0
    finally:
        built.compose("down", "--timeout", "20")


def test_up_from_a_clean_clone_serves_what_one_process_does(whole: Stack, expected: list[Answer]) -> None:
    assert sum(whole.wait_nodes(3)) >= EXPERTS
    assert answers_to(short_requests(), whole.target, timeout=60) == expected
    containers = [*whole.containers("node"), *whole.containers("front")]
    until(lambda: all(healthy(whole, container) for container in containers), "all health checks pass", seconds=30)


def test_shares_are_thirds(whole: Stack) -> None:
    assert max(whole.wait_nodes(3)) <= EXPERTS / 3 * (1 + ServeConfig().nodes_slack)


def test_containers_may_do_little(whole: Stack) -> None:
    for container in (*whole.containers("node"), *whole.containers("front")):
        found = whole.inspect(container)
        assert found["Config"]["User"] == "colibri"
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert found["HostConfig"]["CapAdd"] in (["SYS_NICE"], ["CAP_SYS_NICE"])
    assert [whole.inspect(node)["HostConfig"]["PortBindings"] for node in whole.containers("node")] == [{}] * 3


def test_killed_node_costs_no_call_and_comes_back(whole: Stack, under: Under) -> None:
    victim = whole.containers("node")[1]
    restarts = whole.inspect(victim)["RestartCount"]
    with under.load() as load:
        whole.kill_process(victim)
        flows(load)
        until(lambda: whole.inspect(victim)["RestartCount"] > restarts, "the container is restarted", seconds=BACK_S)
        whole.wait_nodes(3, seconds=BACK_S)


def test_paused_node_costs_no_call(whole: Stack, under: Under) -> None:
    victim = whole.containers("node")[0]
    with under.load() as load:
        whole.engine.docker("pause", victim)
        try:
            flows(load, tokens=1500)
        finally:
            whole.engine.docker("unpause", victim)
        whole.wait_nodes(3, seconds=BACK_S)


def test_node_cut_off_from_the_network_costs_no_call(whole: Stack, under: Under) -> None:
    victim = whole.containers("node")[2]
    with under.load() as load:
        whole.engine.docker("network", "disconnect", NODES_NETWORK, victim)
        try:
            flows(load, tokens=1500)
        finally:
            whole.engine.docker("network", "connect", "--alias", "node", NODES_NETWORK, victim)
        whole.wait_nodes(3, seconds=BACK_S)


def test_scaling_from_three_to_five_to_two(whole: Stack, under: Under) -> None:
    with under.load() as load:
        whole.compose("up", "-d", "--no-recreate", "--scale", "node=5")
        whole.wait_nodes(5, seconds=BACK_S)
        flows(load)
        whole.compose("up", "-d", "--no-recreate", "--scale", "node=2")
        whole.wait_nodes(2, seconds=BACK_S)
        flows(load)


def test_rolling_restart_of_nodes_costs_no_call(whole: Stack, under: Under) -> None:
    with under.load():
        for node in whole.containers("node"):
            whole.engine.docker("restart", "--time", "60", node)
            whole.wait_nodes(3, seconds=BACK_S)


def test_all_nodes_gone_and_back(whole: Stack, under: Under) -> None:
    with under.load() as load:
        whole.compose("stop", "--timeout", "60", "node")
        flows(load)
        whole.compose("start", "node")
        whole.wait_nodes(3, seconds=BACK_S)


def test_patient_clients_wait_while_the_only_front_end_restarts(whole: Stack, expected: list[Answer]) -> None:
    """One front end has the host's port for itself: calls are not lost, and take as long as its restart."""
    with Under(whole.target, expected, patient=True).load():
        whole.engine.docker("restart", "--time", "60", whole.containers("front")[0])
        until(whole.serving, "the front end serves", seconds=BACK_S)


def test_front_end_ends_what_is_under_way_when_it_is_stopped(whole: Stack, expected: list[Answer]) -> None:
    front = whole.containers("front")[0]
    whole.engine.docker("stop", "--time", "60", front)
    assert whole.inspect(front)["State"]["ExitCode"] == 0
    whole.up("--no-recreate")
    assert answers_to(short_requests(), whole.target, timeout=60) == expected


def sets_memory_policy(stack: Stack, container: str) -> bool:
    """Whether the container's system-call filter lets a process say where its memory is to lie."""
    call = f"import ctypes; print(ctypes.CDLL(None).syscall({SET_MEMPOLICY[platform.machine()]}, 0, None, 0))"
    return stack.engine.docker("exec", container, "python3", "-c", call).strip() == "0"


def test_without_sys_nice_all_runs_but_memory_policies(whole: Stack, expected: list[Answer]) -> None:
    assert all(sets_memory_policy(whole, container) for container in whole.containers("node"))
    text = (whole.folder / "docker-compose.yml").read_text()
    assert text.count("cap_add: [SYS_NICE]") == 1
    (whole.folder / "without.yml").write_text(text.replace("cap_add: [SYS_NICE]", ""))
    bare = replace(whole, files=("without.yml",))
    try:
        bare.up()
        containers = [*bare.containers("node"), *bare.containers("front")]
        assert not any(sets_memory_policy(bare, container) for container in containers)
        assert len(bare.remote_nodes()) == 3
        assert answers_to(short_requests(), bare.target, timeout=60) == expected
    finally:
        whole.up()


def test_mutual_tls_lets_in_only_its_own(stack: Stack, expected: list[Answer], certificates: Path) -> None:
    """With certificates all is as before; a front end with those of another authority gets nothing from the nodes, and says so."""
    make_certificates(stack.folder / "certs")
    secured = replace(stack, files=("docker-compose.yml", "docker-compose.override.yml", "ops/deploy/compose.tls.yml"))
    try:
        secured.compose("up", "-d", "--force-recreate", seconds=300)
        until(secured.serving, "the front end serves", seconds=60)
        containers = [*secured.containers("node"), *secured.containers("front")]
        until(lambda: all(healthy(secured, container) for container in containers), "all health checks pass", seconds=60)
        until(lambda: len(secured.remote_nodes()) == 3, "the front end knows three nodes", seconds=BACK_S)
        assert answers_to(short_requests(), secured.target, timeout=60) == expected
        for name in ("front.crt", "front.key"):
            shutil.copy(certificates / name, stack.folder / "certs" / name)
        secured.compose("up", "-d", "--force-recreate", "--no-deps", "front", seconds=120)
        until(secured.serving, "the front end serves", seconds=60)
        until(lambda: "certificate" in secured.compose("logs", "--no-color", "front").lower(), "the front end says why", seconds=BACK_S)
        assert answers_to(short_requests(), secured.target, timeout=60) == expected  # by itself, from the file
    finally:
        shutil.rmtree(stack.folder / "certs")
        stack.up()
