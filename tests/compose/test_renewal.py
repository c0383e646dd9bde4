"""Front ends restarted, and everything replaced by a newer image, under load: docs/deployment.md, "Upgrade without downtime"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.compose.conftest import Under, flows
from tests.compose.engine import BACK_S, IMAGE, until
from tests.compose.stack import Stack, free_ports
from tests.fault.load import Answer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two_fronts(stack: Stack) -> Iterator[Stack]:
    """Two front ends, with ports for twice as many, and three nodes."""
    wide = replace(stack, ports=free_ports(4))
    try:
        wide.up(fronts=2)
        yield wide
    finally:
        wide.compose("stop", "--timeout", "20", "front")
        stack.up()


@pytest.fixture
def under(two_fronts: Stack, expected: list[Answer]) -> Under:
    return Under(two_fronts.targets, expected, patient=True)


def build(stack: Stack, folder: Path, instruction: str) -> str:
    """Another image under the name that Compose starts; its identity."""
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\n{instruction}\n")
    stack.engine.docker("build", "--tag", IMAGE, str(folder))
    return stack.engine.docker("image", "inspect", "--format", "{{.Id}}", IMAGE).strip()


def images(stack: Stack) -> list[str]:
    """What each of the containers was made of."""
    return [str(stack.inspect(container)["Image"]) for service in ("front", "node") for container in stack.containers(service)]


def test_front_ends_restarted_one_by_one_cost_no_call(two_fronts: Stack, under: Under) -> None:
    with under.load() as load:
        for front in two_fronts.containers("front"):
            two_fronts.engine.docker("restart", "--time", "60", front)
            until(lambda: two_fronts.serving() == 2, "both front ends serve", seconds=BACK_S)
            flows(load)


def test_upgrade_of_nodes_and_front_ends_costs_no_call(two_fronts: Stack, under: Under, tmp_path: Path) -> None:
    new = build(two_fronts, tmp_path, "LABEL release=next")
    assert new not in images(two_fronts)
    with under.load() as load:
        two_fronts.script("upgrade.sh", "node")
        two_fronts.wait_nodes(3)
        flows(load)
        two_fronts.script("upgrade.sh", "front")
    assert images(two_fronts) == [new] * 5


def test_upgrade_to_what_does_not_start_changes_nothing(two_fronts: Stack, under: Under, tmp_path: Path) -> None:
    before, image = images(two_fronts), two_fronts.engine.docker("image", "inspect", "--format", "{{.Id}}", IMAGE).strip()
    build(two_fronts, tmp_path, 'ENTRYPOINT ["false"]')
    try:
        with under.load(), pytest.raises(AssertionError, match="the old ones serve on"):
            two_fronts.script("upgrade.sh", "node", HEALTHY_S="10")
        assert images(two_fronts) == before
    finally:
        two_fronts.engine.docker("tag", image, IMAGE)
