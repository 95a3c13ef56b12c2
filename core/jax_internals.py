"""Everything of JAX's private API that Renga uses: what has no public counterpart that touches no device.

No other module imports `jax._src`, and a test holds that. A new version of JAX may move these names: this is the one
place to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import clusters, distributed, source_info_util, xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from jax.extend.core import JaxprEqn


def backends_are_initialized() -> bool:
    """Whether this process has touched a device."""
    return xla_bridge.backends_are_initialized()


def process_index() -> int:
    """Which host this is; `jax.process_index()` would touch the devices."""
    return distributed.global_state.process_id


def process_count() -> int:
    """How many hosts there are; `jax.process_count()` would touch the devices."""
    return distributed.global_state.num_processes


def coordination_client() -> Any:
    """The client of the coordination service: barriers and a store of texts; None in a single process."""
    return distributed.global_state.client


def detected_cluster(timeout_seconds: float) -> tuple[str | None, int | None, int | None]:
    """Address of the coordinator, number of processes and index of this one, as JAX detects them; None: not found."""
    coordinator, process_count, process_index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(timeout_seconds)
    )
    return coordinator, process_count, process_index


def addresses_of_slice() -> Sequence[str]:
    """Addresses of the hosts of this TPU slice, in their order; none on a machine that is not part of one."""
    for kind in (cloud_tpu_cluster.GceTpuCluster, cloud_tpu_cluster.GkeTpuCluster):
        if kind.is_env_present():
            return kind._get_worker_list_in_slice()
    return ()


def source_of(equation: JaxprEqn) -> str:
    """Where in the user's source an equation comes from: `model.py:12:8 (function)`."""
    return source_info_util.summarize(equation.source_info)
