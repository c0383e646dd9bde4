"""Planning where experts go ends with the model, and when time is up: of many experts on many nodes it takes seconds."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from workers import rebalancing
from workers.rebalancing import ExpertPlaces, Rebalancer

LAYERS, EXPERTS = 60, 64
PLACES = ExpertPlaces((0, 1, 2, 3), ((((0,),) * EXPERTS),) * LAYERS, ((1000,) * EXPERTS,) * LAYERS)
LOAD = [[1 + (7 * expert) % 50 for expert in range(EXPERTS)]] * LAYERS


@pytest.fixture
def rebalancer(monkeypatch: pytest.MonkeyPatch) -> Rebalancer:
    """One whose machine is made up: a dry run touches nothing of it."""
    nothing = cast(Any, None)
    made = Rebalancer(nothing, nothing, nothing, nothing, front_node=0, speeds=lambda: dict.fromkeys(PLACES.nodes, 1.0))
    monkeypatch.setattr(made, "places", lambda: PLACES)
    monkeypatch.setattr(rebalancing, "read_topology", lambda: SimpleNamespace(nodes=()))
    return made


def test_a_plan_is_made_if_there_is_time(rebalancer: Rebalancer) -> None:
    assert rebalancer.rebalance(LOAD, dry_run=True, replicas=0, timeout=60).plan.moves


def test_planning_ends_when_time_is_up(rebalancer: Rebalancer) -> None:
    report = rebalancer.rebalance(LOAD, dry_run=True, replicas=0, timeout=0.001)
    assert report.plan.reason.startswith("nothing was planned: time was up")
    assert report.plan.empty


def test_planning_ends_with_the_model(rebalancer: Rebalancer) -> None:
    reasons: list[str] = []

    def plan() -> None:
        while not reasons or not reasons[-1].startswith("nothing was planned"):
            reasons.append(rebalancer.rebalance(LOAD, dry_run=True, replicas=100, timeout=60).plan.reason)

    thread = threading.Thread(target=plan)
    thread.start()
    rebalancer.close()
    thread.join(30)
    assert not thread.is_alive()
    assert reasons[-1] == "nothing was planned: the model is being closed"
