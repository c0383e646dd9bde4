"""A Ray cluster of three nodes on this machine."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

_SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}
NODES = 3


@pytest.fixture
def cluster() -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: agents on Ray. Ray is not installed: pip install 'colibri[ray]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=_SMALL | {"include_dashboard": False})
        try:
            for _ in range(NODES - 1):
                cluster.add_node(**_SMALL)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
