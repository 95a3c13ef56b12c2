"""Compiler options for each TPU generation and for GPUs, and for initialization on CPUs."""

import os
from collections.abc import Mapping

from core import slices

Value = str | int | bool
Options = Mapping[str, Value]
Overrides = Mapping[str, Value | None]  # None removes an option

_LEVEL = "xla_backend_optimization_level"
_EVERYWHERE: Options = {
    # Splitting an einsum into steps around a ring of permutes made 7B on v4-32 1.8 times as slow by the compiler's own
    # estimate; gathering first is better.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
    # Splits an all-gather into a start and an end, so that other work can be scheduled between them.
    "xla_enable_async_all_gather": True,
}

# Fusing all-gathers with neighboring computation is supported only on v5e: elsewhere the compiler warns of wrong
# results and hangs, and a newer one refuses to compile.
_FUSED_GATHERS: Options = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": True}

# SparseCores run the collectives while the TensorCore computes.
_SPARSE_CORE_COLLECTIVES: Options = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # SparseCores use the device shape of the TensorCores for transfers.
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}

# Splits an all-to-all into a start and an end, so that other work is scheduled while chips exchange tokens.
_ASYNC_EXCHANGE: Options = {"xla_tpu_enable_async_all_to_all": True}

# Schedules collectives beside computation, and combines small ones into messages that use a link well.
_GPU: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**28,
    "xla_gpu_enable_triton_gemm": False,  # cuBLAS is faster for the large products of a step, and compiles faster
}

OPTIONS: Mapping[str, Options] = {
    "v4": _EVERYWHERE,
    "v5p": {**_EVERYWHERE, **_SPARSE_CORE_COLLECTIVES, "xla_tpu_scoped_vmem_limit_kib": 49152},
    "v5e": {**_EVERYWHERE, **_FUSED_GATHERS},
    "v6e": {**_EVERYWHERE, **_SPARSE_CORE_COLLECTIVES},
    "tpu7x": {**_EVERYWHERE, **_SPARSE_CORE_COLLECTIVES, "xla_tpu_scoped_vmem_limit_kib": 49152},
    "cpu": {},
    **dict.fromkeys(slices.GPUS, _GPU),
}


_OF_TPUS = ("xla_tpu_", "xla_jf_", "xla_sc_")  # beginnings of the names of options that only TPUs have


def initialization_on_cpus() -> dict[str, Value]:
    """Returns XLA's optimization level 1, as compiler options; none if XLA_FLAGS sets a level.

    Level 1 compiles faster; initialization runs only once.
    """
    return {} if _LEVEL in os.environ.get("XLA_FLAGS", "") else {_LEVEL: 1}


def options(
    generation: str, overrides: Overrides | None = None, *, mesh_shape: Mapping[str, int] | None = None
) -> dict[str, Value]:
    """Returns the compiler options of a chip generation.

    Args:
      generation: a key of `OPTIONS`, such as `v4`, `h100` or `cpu`.
      overrides: options to add or replace; None removes one. Options for TPUs alone are left out for other devices.
      mesh_shape: degree by mesh axis; if `expert` is not 1, TPUs use asynchronous all-to-alls.
    """
    exchanges = generation in slices.CHIPS and (mesh_shape or {}).get("expert", 1) != 1
    given = overrides or {}
    if generation not in slices.CHIPS:
        given = {name: value for name, value in given.items() if not name.startswith(_OF_TPUS)}
    merged = {**OPTIONS[generation], **(_ASYNC_EXCHANGE if exchanges else {}), **given}
    return {name: value for name, value in merged.items() if value is not None}


def problems(overrides: Overrides) -> list[str]:
    """Returns the problems with overrides that can be found without the compiler."""
    found = []
    for name, value in overrides.items():
        if not isinstance(name, str) or not name.startswith("xla_"):
            found.append(f"{name!r}: expected the name of a compiler option, such as 'xla_tpu_scoped_vmem_limit_kib'")
        elif value is not None and not isinstance(value, str | int | bool):
            found.append(f"{name} = {value!r}: expected a bool, an int or a string, or None to remove the option")
    return found
