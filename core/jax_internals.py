"""Wraps the parts of JAX's private API that Renga uses.

Their public counterparts do not exist or would initialize devices. No other module imports `jax._src` (a test checks
this), so a new version of JAX requires changes here only.
"""

from collections.abc import Sequence
from typing import Any

from jax._src import clusters, distributed, source_info_util, xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from jax.extend.core import JaxprEqn


def backends_are_initialized() -> bool:
    """Returns True if this process has initialized its devices."""
    return xla_bridge.backends_are_initialized()


def process_index() -> int:
    """Returns the index of this host; `jax.process_index()` would initialize the devices."""
    return distributed.global_state.process_id


def process_count() -> int:
    """Returns the number of hosts; `jax.process_count()` would initialize the devices."""
    return distributed.global_state.num_processes


def coordination_client() -> Any:
    """Returns the client of the coordination service (barriers, key-value store); None in a single process."""
    return distributed.global_state.client


def detected_cluster(timeout_seconds: float) -> tuple[str | None, int | None, int | None]:
    """Returns the coordinator's address, the number of processes and this one's index; None if not detected."""
    coordinator, process_count, process_index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(timeout_seconds)
    )
    return coordinator, process_count, process_index


def addresses_of_slice() -> Sequence[str]:
    """Returns the addresses of the hosts of this TPU slice, in order; empty on a machine outside a slice."""
    for kind in (cloud_tpu_cluster.GceTpuCluster, cloud_tpu_cluster.GkeTpuCluster):
        if kind.is_env_present():
            return kind._get_worker_list_in_slice()
    return ()


def source_of(equation: JaxprEqn) -> str:
    """Returns the place in the user's source that an equation comes from: `model.py:12:8 (function)`."""
    return source_info_util.summarize(equation.source_info)
