"""Where a text's tokens go, computed in this process exactly as a server computes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from colibri.v1 import experts_pb2 as pb
from engine_c import GREEDY, KV_BLOCK, Model, Routes, SeqWork, SessionOptions
from service.artifact import read_artifact
from service.experts import pick_layers, read_layers, route_response
from service.faults import EngineFault, InvalidField
from service.request import Request
from service.routing import choose_damping
from service.served import ServedModel, load_texts, make_served
from workers.team import Team, TeamConfig

_CHUNK = 512  # rows of a step


def compute_routes(path: Path, message: pb.RouteRequest) -> pb.RouteResponse:
    """The answer to `message`, whatever its size, from a container. Raises InvalidField, EngineFault, or what opening the model raises."""
    model = open_served(path)
    layers = read_layers(message.layers, model)
    damping = choose_damping(message, info=model.info)
    prompt = model.read_prompt(message)
    if len(prompt.tokens) > model.bounds.max_context:
        raise InvalidField(prompt.field, f"has {len(prompt.tokens)} tokens; the context holds {model.bounds.max_context}")
    request = Request("route", tuple(prompt.tokens), GREEDY, trace=True, damping=damping)
    request.arrived = request.started = time.monotonic()
    chunks = [pick_layers(chunk, layers, model) for chunk in _run(path, request)]
    request.routed = len(prompt.tokens) * model.info.router_layers if damping is not None else 0
    request.first_token = request.last_token = time.monotonic()
    return route_response(request, chunks, layers=layers, model=model, now=request.last_token)


def open_served(path: Path) -> ServedModel:
    """The model without its weights: texts and bounds."""
    artifact = read_artifact(path)
    with Model.open(path) as model:
        info = model.info
    tokenizer, template = load_texts(artifact)
    return make_served(artifact, info, tokenizer, template, name="", kv_tokens=info.max_context, default_max_tokens=1)


def _run(path: Path, request: Request) -> Iterator[Routes]:
    """The routes of each chunk of its prompt."""
    count = len(request.prompt)
    rows = min(_CHUNK, count)
    blocks = range(-(-count // KV_BLOCK))
    options = SessionOptions(max_rows=rows, max_seqs=1, max_logit_rows=1, kv_blocks=len(blocks), trace_routes=1, max_slots=1)
    work = SeqWork((), 0, blocks, damping=request.damping, slot=0, routes=True)
    with Team.open(path, TeamConfig(workers_per_node=0, front_lane="on", session=options)) as team:
        for start in range(0, count, rows):
            (result,), _ = team.session.step([replace(work, tokens=request.prompt[start : start + rows], start=start)])
            if not result.ok or result.routes is None:
                raise EngineFault("NUMERIC", result.error)
            request.rerouted += result.rerouted
            yield result.routes
