"""Plans for machines of every shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine_c import KV_FORMATS, ModelInfo
from workers.plan import FrontLane, NodeWish, PlanError, TeamPlan, kv_block_bytes, plan_kv_blocks, plan_team
from workers.topology import Node, Topology

GIB = 1 << 30


def machine(*nodes: int, memory: int = 64 * GIB, quota: float | None = None, available: int = 32 * GIB) -> Topology:
    """Nodes with so many CPUs each."""
    made, first = [], 0
    for number, count in enumerate(nodes):
        made.append(Node(number, tuple(range(first, first + count)), memory))
        first += count
    return Topology(tuple(made), tuple(range(first)), memory * len(nodes), quota, available)


def cpus_of(plan: TeamPlan) -> list[int]:
    return [cpu for worker in plan.workers for cpu in worker.cpus]


def test_two_cpus_make_one_worker_with_one_lane_beside_the_front_end() -> None:
    plan = plan_team(machine(2))
    assert [worker.lanes for worker in plan.workers] == [(0,)]
    assert (plan.front_lane, plan.front_cpu, cpus_of(plan)) == (True, 0, [1])


def test_four_nodes_make_a_worker_each_and_the_front_end_takes_one_core() -> None:
    plan = plan_team(machine(4, 4, 4, 4))
    assert [len(worker.lanes) for worker in plan.workers] == [3, 4, 4, 4]
    assert [worker.memory_node for worker in plan.workers] == [0, 1, 2, 3]
    assert sorted([*cpus_of(plan), plan.front_cpu or 0]) == list(range(16))


def test_one_cpu_computes_in_the_front_end_alone() -> None:
    plan = plan_team(machine(1))
    assert plan.workers == ()
    assert plan.front_lane


def test_one_cpu_without_front_lane_has_a_worker() -> None:
    plan = plan_team(machine(1), front_lane="off")
    assert [worker.cpus for worker in plan.workers] == [(0,)]
    assert not plan.front_lane


def test_zero_workers_compute_in_the_calling_process() -> None:
    plan = plan_team(machine(4), default=NodeWish(0))
    assert plan.workers == ()
    assert plan.front_lane
    assert plan.front_cpu is None


def test_more_lanes_than_cpus_are_not_pinned() -> None:
    plan = plan_team(machine(2), default=NodeWish(2, 2))
    assert [worker.lanes for worker in plan.workers] == [(0, 1), (2, 3)]
    assert cpus_of(plan) == []
    assert plan.front_cpu is None


def test_workers_of_a_node_share_its_cores_evenly() -> None:
    plan = plan_team(machine(8), default=NodeWish(3))
    assert [len(worker.lanes) for worker in plan.workers] == [3, 2, 2]
    assert cpus_of(plan) == [1, 2, 3, 4, 5, 6, 7]


def test_a_quota_limits_the_lanes() -> None:
    assert plan_team(machine(16, quota=3.9)).lanes == 3
    assert plan_team(machine(8, 8, quota=4.0)).lanes == 4


def test_smt_siblings_get_no_lane_of_their_own() -> None:
    topology = Topology((Node(0, (0, 1, 2, 3), GIB),), (0, 1, 2, 3), GIB, cores=((0, 2), (1, 3)))
    plan = plan_team(topology)
    assert (plan.front_cpu, cpus_of(plan)) == (0, [1])


def test_nodes_without_cpus_get_no_worker_and_nodes_without_memory_use_the_nearest() -> None:
    nodes = (Node(0, (0, 1), GIB), Node(1, (2, 3), 0), Node(2, (), GIB))
    plan = plan_team(Topology(nodes, (0, 1, 2, 3), 2 * GIB))
    assert [(worker.node, worker.memory_node) for worker in plan.workers] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(("workers", "threads"), [(-1, None), (None, 0), (256, 1), (16, 16)])
def test_impossible_wishes_are_refused(workers: int | None, threads: int | None) -> None:
    with pytest.raises(PlanError):
        plan_team(machine(4), default=NodeWish(workers, threads))


def test_nothing_that_computes_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing would compute"):
        plan_team(machine(4), default=NodeWish(0), front_lane="off")


@given(
    nodes=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    workers=st.none() | st.integers(0, 4),
    threads=st.none() | st.integers(1, 5),
    front=st.sampled_from(["auto", "on", "off"]),
    quota=st.none() | st.floats(0.1, 64),
)
def test_every_plan_is_sound(nodes: list[int], workers: int | None, threads: int | None, front: FrontLane, quota: float | None) -> None:
    topology = machine(*nodes, quota=quota)
    if workers == 0 and front == "off":
        return
    plan = plan_team(topology, default=NodeWish(workers, threads), front_lane=front)
    lanes = [lane for worker in plan.workers for lane in worker.lanes]
    assert lanes == list(range(len(lanes)))
    assert len(lanes) <= plan.max_lanes <= 255
    assert [worker.index for worker in plan.workers] == list(range(len(plan.workers)))
    assert plan.lanes >= 1
    assert all(worker.lanes for worker in plan.workers)
    pinned = cpus_of(plan) + ([] if plan.front_cpu is None else [plan.front_cpu])
    assert len(pinned) == len(set(pinned))
    own = {node.id: node.cpus for node in topology.nodes}
    for worker in plan.workers:
        assert len(worker.cpus) in (0, len(worker.lanes))
        assert set(worker.cpus) <= set(own[worker.node])
    if workers is not None:
        assert len(plan.workers) == workers * sum(count > 0 for count in nodes)
    if workers is None and threads is None and quota is None:
        assert plan.lanes == sum(nodes)


# ---------------------------------------------------------------- KV memory


def info(max_context: int = 4096) -> ModelInfo:
    shape = dict.fromkeys(ModelInfo.__slots__, 1) | {"layers": 8, "kv_heads": 4, "head_dim": 64, "max_context": max_context}
    return ModelInfo(**shape)


def test_a_kv_block_is_sixteen_tokens_of_keys_and_values() -> None:
    assert kv_block_bytes(info(), KV_FORMATS["bf16"]) == 16 * 8 * 2 * 4 * 64 * 2
    assert kv_block_bytes(info(), KV_FORMATS["f32"]) == 2 * kv_block_bytes(info(), KV_FORMATS["bf16"])


def test_kv_is_what_was_asked_for() -> None:
    block = kv_block_bytes(info(), KV_FORMATS["bf16"])
    assert plan_kv_blocks(info(), kv_bytes=10 * block + 5, topology=machine(2)) == 10


def test_kv_by_default_serves_all_sequences_at_full_length() -> None:
    assert plan_kv_blocks(info(100), kv_bytes=None, topology=machine(2), max_seqs=3) == 3 * 7


def test_kv_by_default_leaves_most_of_free_memory_alone() -> None:
    blocks = plan_kv_blocks(info(1 << 20), kv_bytes=None, topology=machine(2, available=GIB), max_seqs=1000)
    assert blocks * kv_block_bytes(info(), KV_FORMATS["bf16"]) <= GIB / 4


@pytest.mark.parametrize("kv_bytes", [0, 1000, 33 * GIB])
def test_kv_too_small_or_too_large_is_refused(kv_bytes: int) -> None:
    with pytest.raises(PlanError, match="KV memory"):
        plan_kv_blocks(info(), kv_bytes=kv_bytes, topology=machine(2))


# ---------------------------------------------------------------- plans that follow others


def test_a_node_has_a_wish_of_its_own() -> None:
    plan = plan_team(machine(4, 4), default=NodeWish(1, 2), nodes={1: NodeWish(3, 1)})
    assert [(spec.node, len(spec.lanes)) for spec in plan.workers] == [(0, 2), (1, 1), (1, 1), (1, 1)]


def test_a_node_that_does_not_exist_is_named() -> None:
    with pytest.raises(PlanError, match="there is no NUMA node 7 with CPUs that may be used; there are 0, 1"):
        plan_team(machine(4, 4), nodes={7: NodeWish(1)})


def test_workers_that_need_not_change_stay_as_they_are() -> None:
    topology = machine(4, 4)
    one = plan_team(topology, default=NodeWish(1, 1))
    more = plan_team(topology, default=NodeWish(1, 1), nodes={0: NodeWish(3, 1)}, previous=one)
    assert set(one.workers) < set(more.workers)
    assert [(spec.index, spec.node) for spec in more.workers] == [(0, 0), (1, 1), (2, 0), (3, 0)]
    assert plan_team(topology, default=NodeWish(1, 1), previous=more).workers == one.workers
    assert more.max_lanes == one.max_lanes == 32


def test_newcomers_take_free_cores_and_are_not_pinned_when_there_are_too_few() -> None:
    topology = machine(4)
    one = plan_team(topology, default=NodeWish(1, 1))
    two = plan_team(topology, default=NodeWish(2, 1), previous=one)
    assert [spec.cpus for spec in two.workers] == [(1,), (2,)]
    five = plan_team(topology, default=NodeWish(5, 1), previous=two)
    assert [spec.cpus for spec in five.workers] == [(1,), (2,), (), (), ()]
    assert {spec.node_cpus for spec in five.workers} == {(0, 1, 2, 3)}


def test_newcomers_take_lanes_nobody_had_so_that_they_can_start_first() -> None:
    before = plan_team(machine(4), default=NodeWish(1, 3))
    after = plan_team(machine(4), default=NodeWish(3, 1), previous=before)
    assert not {lane for spec in after.workers for lane in spec.lanes} & set(before.workers[0].lanes)
    assert 0 not in {spec.index for spec in after.workers}


def test_drained_workers_keep_their_places() -> None:
    before = plan_team(machine(4, 4), default=NodeWish(2, 1))
    plan = plan_team(machine(4, 4), default=NodeWish(2, 1), drained={1, 2}, previous=before)
    assert [spec.index for spec in plan.workers] == [0, 3]
    assert plan.places == before.workers
    assert plan_team(machine(4, 4), default=NodeWish(2, 1), previous=plan).workers == before.workers


def test_draining_the_last_that_computes_is_refused() -> None:
    before = plan_team(machine(2), default=NodeWish(1, 1), front_lane="off")
    with pytest.raises(PlanError, match="nothing would compute"):
        plan_team(machine(2), default=NodeWish(1, 1), drained={0}, front_lane="off", previous=before)


def test_more_lanes_than_there_is_room_for_are_refused() -> None:
    before = plan_team(machine(2))
    with pytest.raises(PlanError, match=r"18 threads in all workers are asked for, there is room for 17, fixed at the start: ask"):
        plan_team(machine(2), default=NodeWish(before.max_lanes + 1, 1), previous=before)


def test_smt_siblings_get_lanes_only_when_asked_for() -> None:
    topology = Topology((Node(0, (0, 1, 2, 3), GIB),), (0, 1, 2, 3), GIB, cores=((0, 2), (1, 3)))
    plan = plan_team(topology, smt=True)
    assert (plan.front_cpu, cpus_of(plan)) == (0, [1, 2, 3])
    assert topology.has_siblings


@settings(deadline=None)
@given(
    nodes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    wishes=st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 4), st.none() | st.integers(1, 3)), max_size=8),
    drains=st.lists(st.sets(st.integers(0, 12)), min_size=8, max_size=8),
)
def test_any_row_of_changes_keeps_who_can_stay(
    nodes: list[int], wishes: list[tuple[int, int | None, int | None]], drains: list[set[int]]
) -> None:
    topology = machine(*nodes)
    plan = plan_team(topology)
    wanted: dict[int, NodeWish] = {}
    for (node, workers, threads), drained in zip(wishes, drains, strict=False):
        if node >= len(nodes):
            continue
        wanted[node] = NodeWish(workers, threads)
        after = plan_team(topology, nodes=wanted, drained=drained, previous=plan)
        lanes = [lane for spec in after.places for lane in spec.lanes]
        assert len(set(lanes)) == len(lanes)
        assert set(lanes) <= set(range(after.max_lanes))
        assert len({spec.index for spec in after.places}) == len(after.places)
        pinned = [cpu for spec in after.places for cpu in spec.cpus]
        assert len(set(pinned)) == len(pinned)
        others = {spec for spec in plan.places if spec.node != node}
        assert others <= set(after.places), "other nodes are left alone"
        assert {spec.index for spec in after.drained} == drained & {spec.index for spec in after.places}
        again = plan_team(topology, nodes=wanted, drained=drained, previous=after)
        assert again == after, "the same again changes nothing"
        plan = after
