"""Wraps the parts of JAX's private API that Renga uses."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, source_info_util, xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import JaxprEqn


def backends_are_initialized() -> bool:
    """Returns whether this process has initialized its devices."""
    return xla_bridge.backends_are_initialized()


def process_index() -> int:
    """Returns the index of this host, without initializing the devices."""
    return distributed.global_state.process_id


def process_count() -> int:
    """Returns the number of hosts, without initializing the devices."""
    return distributed.global_state.num_processes


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service; None if there is none."""
    return distributed.global_state.client


def detected_cluster(timeout_seconds: float) -> tuple[str | None, int | None, int | None]:
    """Returns the coordinator's address, the number of processes and this one's index; each may be None."""
    coordinator, process_count, process_index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(timeout_seconds)
    )
    return coordinator, process_count, process_index


def addresses_of_slice() -> Sequence[str]:
    """Returns the addresses of the hosts of this TPU slice; empty outside of one."""
    if cloud_tpu_cluster.GceTpuCluster.is_env_present():
        return cloud_tpu_cluster.GceTpuCluster._get_worker_list_in_slice()
    if cloud_tpu_cluster.GkeTpuCluster.is_env_present():
        return cloud_tpu_cluster.GkeTpuCluster._get_worker_list_in_slice()
    return ()


def source_of(equation: JaxprEqn) -> str:
    """Returns where an equation comes from in the user's source: `model.py:12:8 (function)`."""
    return source_info_util.summarize(equation.source_info)


def run_equation(equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Runs one equation of a jaxpr on values; returns its results."""
    parameters = equation.primitive.get_bind_params(equation.params)
    name_stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    context = source_info_util.user_context(equation.source_info.traceback, name_stack=name_stack)
    with context, equation.ctx.manager:
        results = equation.primitive.bind(*values, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def cudnn_version() -> int | None:
    """Returns the version of cuDNN that JAX has found, such as 91002; None without one."""
    try:
        return fused_attention_stablehlo.check_cudnn_version()
    except RuntimeError:  # it has no other answer
        return None


# Parameters of the private derivative of the splash kernel; the first ones are the keyword arguments of a kernel.
_SPLASH_BACKWARD = (
    "save_residuals",
    "mask_value",
    "is_mqa",
    "block_sizes",
    "residual_checkpoint_name",
    "mask_function",
    "attn_logits_soft_cap",
    "interpret",
    "res",
    "do",
)


def splash_gradients(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Any,
    means: jax.Array,
    log_total: jax.Array,
    d_means: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of a splash attention kernel for queries, keys and values.

    In a ring, the normalizers are those of all keys; the kernel's public derivative uses those of its own keys. Shapes:
    H query heads, N key heads, T queries, S keys, K entries per head.

    Args:
      kernel: a `SplashAttentionKernel`.
      q: [H, T, K].
      k, v: [N, S, K].
      segments: `SegmentIds` of queries and keys.
      means: outputs of attention over all keys, [H, T, K].
      log_total: logs of their normalizers, [H, T].
      d_means: gradient with respect to `means`, [H, T, K].

    Raises:
      RuntimeError: the kernel of this JAX version has other parameters.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel  # runs with a ring only

    name = "_splash_attention_bwd"
    backward = getattr(splash_attention_kernel, name, None)
    found = None if backward is None else tuple(inspect.signature(backward).parameters)
    if backward is None or found != _SPLASH_BACKWARD:
        raise RuntimeError(
            f"JAX {jax.__version__}: {splash_attention_kernel.__name__}.{name} has the parameters {found}, expected "
            f"{_SPLASH_BACKWARD}: adapt core/jax_internals.py, or set ring = False, which gathers keys and values"
        )
    saved = (q, k, v, segments, None, means, log_total, kernel.dq_mask_info, kernel.dkv_mask_info)
    dq, dk, dv = backward(res=saved, do=d_means, **kernel.kwargs)[3:6]
    return dq, dk, dv
