"""docker-compose.yml as a Swarm stack of one host. Clients ask a front end's own address: Swarm's routing mesh needs IPVS, which not every
kernel has and which is not ours to test. This file comes last by its name: when an engine leaves a swarm, this host no longer reaches
the containers of a Compose project that was up meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compose.conftest import Under
from tests.compose.engine import run, until
from tests.compose.stack import Stack
from tests.fault.load import Answer, answers_to
from tests.multinode.watching import short_requests

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]
STACK = "colibriswarm"
GATEWAY = "docker_gwbridge"
PATIENCE = 150


class Swarm:
    """The services of a stack."""

    def __init__(self, built: Stack) -> None:
        self.built, self.engine = built, built.engine
        self.engine.docker("swarm", "init", "--advertise-addr", "127.0.0.1")
        command = ["docker", "stack", "deploy", "-c", "docker-compose.yml", STACK]
        run(command, environ=built.engine.environ | built.settings, seconds=60, folder=built.folder)

    def close(self) -> None:
        self.engine.docker("stack", "rm", STACK)
        until(lambda: not self.containers("front") + self.containers("node"), "all containers are gone", seconds=PATIENCE)
        self.engine.docker("swarm", "leave", "--force")

    def containers(self, service: str, *filters: str) -> list[str]:
        """Ids of those that run, such as health=healthy."""
        chosen = [part for each in (f"label=com.docker.swarm.service.name={STACK}_{service}", *filters) for part in ("--filter", each)]
        return self.engine.docker("ps", "-q", *chosen).split()

    def update(self, service: str) -> None:
        """Replaces every container by a new one."""
        fast = ("--update-delay", "3s", "--update-monitor", "5s")
        self.engine.docker("service", "update", "--force", "--quiet", *fast, f"{STACK}_{service}", seconds=300)

    def running(self, service: str) -> str:
        """For instance 3/3: tasks whose health checks pass, and wanted."""
        return self.engine.docker("service", "ls", "--filter", f"name={STACK}_{service}", "--format", "{{.Replicas}}").strip()

    def wait_healthy(self) -> None:
        """Until all tasks run and are healthy. AssertionError with what Swarm says of them."""
        try:
            until(lambda: (self.running("front"), self.running("node")) == ("1/1", "3/3"), "all tasks are healthy", seconds=PATIENCE)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.engine.docker('stack', 'ps', '--no-trunc', STACK)}") from late

    def target(self) -> str:
        """The front end's address in the network by which the host reaches tasks."""
        front = self.containers("front")[0]
        each = "{{range $id, $c := .Containers}}{{$id}} {{$c.IPv4Address}}\n{{end}}"
        listed = self.engine.docker("network", "inspect", GATEWAY, "--format", each)
        return next(f"{line.split()[1].partition('/')[0]}:50051" for line in listed.splitlines() if line.startswith(front))


@pytest.fixture(scope="module")
def swarm(built: Stack) -> Iterator[Swarm]:
    made = Swarm(built)
    try:
        made.wait_healthy()
        yield made
    finally:
        made.close()


def test_rolling_update_of_nodes_in_a_swarm_costs_no_call(swarm: Swarm, expected: list[Answer]) -> None:
    """Every node is replaced by a new one, one at a time."""
    before = set(swarm.containers("node"))
    assert answers_to(short_requests(), swarm.target(), timeout=60) == expected
    with Under(swarm.target(), expected).load():
        swarm.update("node")
        until(lambda: not before & set(swarm.containers("node")), "the last of the old ones has drained and left", seconds=PATIENCE)
    assert len(swarm.containers("node")) == 3


def test_a_front_end_in_a_swarm_leaves_when_the_new_one_is_ready(swarm: Swarm, expected: list[Answer]) -> None:
    """Whether clients notice depends on the mesh and on them; that there always is a front end, and that the old one drains, does not."""
    (old,) = swarm.containers("front")
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(swarm.update, "front")
        until(lambda: update.done() or not swarm.containers("front", "health=healthy"), "the update is done", seconds=2 * PATIENCE)
        assert update.done(), "no front end was healthy"
        update.result()
    assert old not in swarm.containers("front")
    assert swarm.built.inspect(old)["State"]["ExitCode"] == 0
    assert answers_to(short_requests(), swarm.target(), timeout=60) == expected
