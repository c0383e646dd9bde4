"""Clients with the service config PATIENCE: what leaves, is away or comes back costs them time and no call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ops.bench.served import free_port
from service.client import Client, generate_request
from tests.integration.serving import PATIENCE, serving, until

REQUEST = generate_request("hello", max_tokens=8, temperature=0, ignore_eos=True)


def test_patient_clients_use_all_servers_and_then_those_that_stay(tiny_model: Path) -> None:
    with serving(tiny_model) as staying, serving(tiny_model) as leaving:
        expected = staying.client.complete(REQUEST).token_ids
        with Client(f"ipv4:{staying.target},{leaving.target}", timeout=PATIENCE, patient=True) as client:

            def ask() -> bool:
                assert client.complete(REQUEST).token_ids == expected
                return leaving.gate.entered > 0

            until(ask, "the other one is asked too")
            before = staying.gate.entered
            until(lambda: ask() and staying.gate.entered > before, "and the first again")
            leaving.loop.call_soon_threadsafe(leaving.server.request_stop)
            for _ in range(20):
                ask()


def test_patient_clients_wait_for_a_server(tiny_model: Path) -> None:
    port = free_port()
    target = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool, Client(target, timeout=PATIENCE, patient=True) as client:
        waiting = pool.submit(client.complete, REQUEST)
        with Client(target, timeout=PATIENCE) as hasty, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            hasty.complete(REQUEST)
        with serving(tiny_model, port=port):
            assert len(waiting.result(PATIENCE).token_ids) == 8
