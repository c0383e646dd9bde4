"""The handlers of colibri.v1.Operator. What takes long runs in a thread, or as a task that outlives the call that asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from colibri.v1 import operator_pb2 as pb, operator_pb2_grpc
from service.damping import describe_damping
from service.faults import Fault, InvalidField, OperatorFault
from service.hosted import Hosted
from service.models import ModelHost
from service.operator_balance import rebalance
from service.operator_calls import Context, answer, change, refuse
from service.operator_fields import load_settings, unload_grace, watch_interval, watch_windows, within
from service.operator_messages import machine_message, model_message, placement_message, workers_of
from service.routing import policy_message, read_policy
from service.stats import Look, watched
from workers.topology import read_topology

log = logging.getLogger("colibri.service")
_Result = TypeVar("_Result")
_DRAIN_SECONDS = 60.0  # for workers to leave: the step that runs, then TERM, then KILL


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Changes the host and its teams; holds no state of its own."""

    def __init__(self, host: ModelHost, *, start_timeout: float) -> None:
        """`start_timeout`: seconds that workers which are asked for may take to join."""
        self._host = host
        self._start_timeout = start_timeout
        self._since = time.monotonic()
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends the watchers' streams, as at a regular end."""
        self._closing.set()

    # ------------------------------------------------------------ machine and workers

    async def Topology(self, request: pb.TopologyRequest, context: Context) -> pb.TopologyResponse:
        """The machine, and where weights lie."""

        async def work() -> pb.TopologyResponse:
            response = machine_message(await asyncio.to_thread(read_topology))
            response.placements.extend(await _of_each(self._meant(request.model), placement_message))
            for hosted in self._meant(request.model):
                if hosted.nodes is not None:
                    from service.nodes.messages import node_messages

                    response.remote_nodes.extend(node_messages(hosted.name, hosted.nodes))
            return response

        return await answer(context, work)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        """Workers of one model or of all."""

        async def work() -> pb.ListWorkersResponse:
            workers = await _of_each(self._meant(request.model), workers_of)
            return pb.ListWorkersResponse(workers=itertools.chain.from_iterable(workers))

        return await answer(context, work)

    async def ScaleWorkers(self, request: pb.ScaleWorkersRequest, context: Context) -> pb.ScaleWorkersResponse:
        """As many workers and threads as wished for, or all as before."""

        async def work() -> pb.ScaleWorkersResponse:
            workers = within(request, "workers", 0) if request.HasField("workers") else None
            threads = within(request, "threads", 1) if request.HasField("threads") else None
            if workers is None and threads is None:
                raise InvalidField("workers", "is missing, and threads too; say how many there are to be")
            node = request.node if request.HasField("node") else None
            hosted = self._changeable(request.model, node)
            timeout = self._start_timeout + _DRAIN_SECONDS
            await change(self._host, hosted, "workers", lambda team: team.scale(node, workers=workers, threads=threads, timeout=timeout))
            return pb.ScaleWorkersResponse(workers=await hosted.aside(workers_of))

        return await answer(context, work)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """A worker or a node's workers go, and none come in their place."""

        async def work() -> pb.DrainResponse:
            what = request.WhichOneof("what")
            if what is None:
                raise InvalidField("what", "is missing; set one of worker, node")

            hosted = self._changeable(request.model, request.node if what == "node" else None)
            if what == "node":
                await change(self._host, hosted, "node", lambda team: team.drain_node(request.node, timeout=_DRAIN_SECONDS))
            else:
                await change(self._host, hosted, "worker", lambda team: team.drain_worker(request.worker, timeout=_DRAIN_SECONDS))
            return pb.DrainResponse(workers=await hosted.aside(workers_of))

        return await answer(context, work)

    async def RestartWorker(self, request: pb.RestartWorkerRequest, context: Context) -> pb.RestartWorkerResponse:
        """One worker anew."""

        async def work() -> pb.RestartWorkerResponse:
            hosted, timeout = self._changeable(request.model), self._start_timeout + _DRAIN_SECONDS
            await change(self._host, hosted, "worker", lambda team: team.restart_worker(request.worker, timeout=timeout))
            workers = await hosted.aside(workers_of)
            return pb.RestartWorkerResponse(worker=next((worker for worker in workers if worker.index == request.worker), None))

        return await answer(context, work)

    # ------------------------------------------------------------ models

    async def ListLoadedModels(self, request: pb.ListLoadedModelsRequest, context: Context) -> pb.ListLoadedModelsResponse:
        """All models, those that are being loaded last."""

        async def work() -> pb.ListLoadedModelsResponse:
            models, coming = self._host.models, self._host.coming  # at one moment: none is in both or in neither
            response = pb.ListLoadedModelsResponse(models=await _of_each(models, model_message))
            response.models.extend(pb.LoadedModel(name=name, state=pb.MODEL_STATE_LOADING) for name in coming)
            return response

        return await answer(context, work)

    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        """A further model."""

        async def work() -> pb.LoadModelResponse:
            began = time.perf_counter()
            if not request.path:
                raise InvalidField("path", "is empty; name a .colibri file")
            hosted = await self._host.load(Path(request.path), name=request.name, settings=load_settings(request))
            message = await hosted.aside(model_message)
            return pb.LoadModelResponse(model=message, load_ms=1e3 * (time.perf_counter() - began))

        return await answer(context, work)

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        """One model less."""

        async def work() -> pb.UnloadModelResponse:
            if not request.name:
                raise InvalidField("name", "is empty; name the model to unload")
            return pb.UnloadModelResponse(broken_off=await self._host.unload(request.name, grace=unload_grace(request)))

        return await answer(context, work)

    async def SwapModel(self, request: pb.SwapModelRequest, context: Context) -> pb.SwapModelResponse:
        """Another default."""

        async def work() -> pb.SwapModelResponse:
            swapped = await self._host.swap(request.name)
            message = await swapped.model.aside(model_message)
            return pb.SwapModelResponse(model=message, previous=swapped.previous, swap_ms=1e3 * swapped.seconds)

        return await answer(context, work)

    # ------------------------------------------------------------ routing

    async def GetRoutingPolicy(self, request: pb.GetRoutingPolicyRequest, context: Context) -> pb.GetRoutingPolicyResponse:
        """A model's default."""

        async def work() -> pb.GetRoutingPolicyResponse:
            hosted = self._host.find(request.model)
            return pb.GetRoutingPolicyResponse(model=hosted.name, policy=policy_message(hosted.damping))

        return await answer(context, work)

    async def SetRoutingPolicy(self, request: pb.SetRoutingPolicyRequest, context: Context) -> pb.SetRoutingPolicyResponse:
        """Another default, for requests that come from now on."""

        async def work() -> pb.SetRoutingPolicyResponse:
            if not request.HasField("policy"):
                raise InvalidField("policy", "is missing; say how requests are to be routed")
            hosted = self._host.find(request.model)
            before = policy_message(hosted.damping)
            damping = read_policy(request.policy, field="policy", info=hosted.model.info)
            if damping is not None and hosted.nodes is not None and hosted.nodes.remote.whole_layers:
                sentence = "nodes run whole layers of this model, whose routers follow no policy; set OFF, or serve it without such nodes"
                raise OperatorFault("FAILED_PRECONDITION", "LAYERS_ELSEWHERE", sentence)
            hosted.damping = damping
            log.info("routing of %s by default: %s", hosted.name, describe_damping(hosted.damping))
            return pb.SetRoutingPolicyResponse(model=hosted.name, policy=policy_message(hosted.damping), previous=before)

        return await answer(context, work)

    # ------------------------------------------------------------ balance

    async def Rebalance(self, request: pb.RebalanceRequest, context: Context) -> pb.RebalanceResponse:
        """Experts to where they make the work even."""
        return await answer(context, lambda: rebalance(self._host, self._changeable(request.model), request))

    # ------------------------------------------------------------ statistics

    async def WatchStats(self, request: pb.WatchStatsRequest, context: Context) -> AsyncIterator[pb.WatchStatsResponse]:
        """A message each interval. The next is made once the last has gone out, so a slow watcher holds up itself alone."""
        try:
            interval, windows = watch_interval(request), watch_windows(request)
            self._meant(request.model)
        except Fault as fault:
            await refuse(context, fault)
        experts = request.experts if request.HasField("experts") else True
        before: dict[str, Look] = {}
        told = self._since
        due = time.monotonic()
        while not self._closing.is_set():
            now = time.monotonic()
            response = pb.WatchStatsResponse(uptime_seconds=now - self._since, interval_seconds=now - told)
            looks: dict[str, Look] = {}
            for hosted in self._watched(request.model):
                if hosted.closing:
                    continue
                last = _same(before.get(hosted.name), hosted)
                looks[hosted.name], stats = await hosted.aside(partial(watched, before=last, experts=experts, windows=windows))
                response.models.append(stats)
            before, told = looks, now
            yield response
            due = max(due + interval, time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), due - time.monotonic())

    # ------------------------------------------------------------ what they share

    def _meant(self, model: str) -> list[Hosted]:
        """The models a request is about: all if it names none."""
        return [self._host.find(model)] if model else list(self._host.models)

    def _watched(self, model: str) -> list[Hosted]:
        """As _meant, but a model that has gone meanwhile is no error."""
        return [hosted for hosted in self._host.models if model in ("", hosted.name)]

    def _changeable(self, model: str, node: int | None = None) -> Hosted:
        """The model whose workers are to be changed. Raises OperatorFault, also if it has no such node to compute on."""
        hosted = self._host.find(model)
        if not hosted.takes_requests:
            raise OperatorFault("FAILED_PRECONDITION", "MODEL_NOT_READY", f"model {hosted.name!r} is being unloaded", model=hosted.name)
        nodes = [known.id for known in hosted.team.topology.nodes if known.cpus]
        if node is not None and node not in nodes:
            sentence = f"there is no NUMA node {node} with CPUs that may be used; there is {', '.join(map(str, nodes))}"
            raise OperatorFault("NOT_FOUND", "UNKNOWN_NODE", sentence, node=str(node))
        return hosted


def _same(look: Look | None, hosted: Hosted) -> Look | None:
    """A look from before, unless another model had the name then."""
    return look if look is not None and look.at >= hosted.loaded_at else None


async def _of_each(models: Sequence[Hosted], work: Callable[[Hosted], _Result]) -> list[_Result]:
    """What is to be said of each model; one that is just being closed is passed over."""
    return [await hosted.aside(work) for hosted in models if not hosted.closing]
