"""A Ray cluster of two nodes on this machine, each with a worker, and what tests do to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pipeline.engine import RAY_ENVIRONMENT

_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
"""The object store fits into the little /dev/shm that a container has."""
_SECOND = {**_NODE, "num_gpus": 1}
"""The GPU is in name only: Ray hands out what a node says that it has."""
_HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A node that is gone is missed after two seconds, not fifteen. One that is slow has as long as ever."""


class RayCluster:
    """Two nodes; the second can be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**_NODE, "_system_config": _HEALTH})
        self._second: Any = self._cluster.add_node(**_SECOND)

    @property
    def address(self) -> str:
        """For --ray."""
        return str(self._cluster.address)

    def kill_second_node(self) -> None:
        """SIGKILLs its raylet; its workers die with it."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def restore(self) -> None:
        """Brings a second node where it was killed."""
        if self._second is None:
            self._second = self._cluster.add_node(**_SECOND)

    def stop(self) -> None:
        self._cluster.shutdown()


@contextmanager
def running_cluster() -> Iterator[RayCluster]:
    """A cluster whose workers import what this process can."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.stop()
