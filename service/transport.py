"""How gRPC moves bytes within a process. It looks once, when it is imported first."""

from __future__ import annotations

VARIABLE = "GRPC_EXPERIMENTS"
FEWER_HOPS = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"
"""A message is read and written by the thread that waits for it, not handed through a pool of three or four: a round trip of an expert
mini-batch takes about 100 us less of 420 (`colibri bench experts`). For processes whose calls are few and short."""
