"""The first thing of a start: the model's team is opened on a thread of its own while the rest of the service is still being imported.

Imports no more than that needs.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future

from engine_c import KV_FORMATS, SessionOptions
from service.collector import seldom_collect
from service.config import ServeConfig
from workers.automatic_config import Automatic
from workers.keeping import Keep
from workers.slot import SupervisorConfig
from workers.team import Team, TeamConfig

SWITCH = 0.0002
"""Seconds (sys.setswitchinterval). Python's 5 ms is how long the engine's thread would wait between steps while the loop has messages to
write, and how long the one that opens the team would wait again and again while modules are imported."""

STARTS = 3
"""One that hangs while it starts is killed early enough for so many tries within start_timeout."""


def begin_opening(config: ServeConfig) -> Future[Team]:
    """Opens the team of config.model. Whoever gets it closes it; if nobody does, its workers end with this process."""
    sys.setswitchinterval(SWITCH)
    seldom_collect()  # what is imported stays
    opening: Future[Team] = Future()
    opening.set_running_or_notify_cancel()  # nobody can call it off: it would leave workers behind

    def work() -> None:
        try:
            opening.set_result(Team.open(config.model, team_config(config)))
        except BaseException as error:
            opening.set_exception(error)

    threading.Thread(target=work, name="opening", daemon=True).start()
    return opening


def team_config(config: ServeConfig) -> TeamConfig:
    """The part of the settings that the engine and its workers are built from."""
    options = SessionOptions(
        max_rows=config.max_rows,
        max_seqs=config.max_seqs,
        max_logit_rows=config.logit_rows,
        kv_format=KV_FORMATS[config.kv_format],
        spin_us=config.spin_us,
        hang_ms=config.hang_ms,
        trace_routes=1,
        max_slots=config.max_seqs,
        split_down=int(config.experts_api or bool(config.nodes)),
    )
    return TeamConfig(
        load_mode=config.load,
        keep=Keep(but=config.layers_elsewhere) if config.nodes and config.nodes_local_experts == "none" else None,
        placement=config.placement,
        smt=config.smt,
        workers_per_node=config.workers_per_node,
        threads_per_worker=config.threads_per_worker,
        front_lane=config.front_lane,
        session=options,
        kv_bytes=config.kv_memory,
        start_timeout_s=config.start_timeout,
        rebalance=config.rebalance,
        automatic=Automatic(interval_s=config.rebalance_interval, replicas=config.rebalance_replicas),
        supervisor=SupervisorConfig(start_s=config.start_timeout / STARTS),
    )
