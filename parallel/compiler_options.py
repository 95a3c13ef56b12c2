"""One table of TPU compiler options by kind of slice.

The compiler rejects a name it does not know, and a test compiles with every row, so the table cannot rot. Each option
says why it is here; figures are in parallel/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.slices import Slice

Options = Mapping[str, str | int | bool]

_ALL: Options = {
    # Splitting an einsum into steps around a ring of permutes made 7B on v4-32 1.8 times as slow by the compiler's own
    # estimate; gathering first is better.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
    # Weight gathers run beside the computation that precedes them.
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}

_BY_GENERATION: Mapping[str, Options] = {"v4": {}, "v5p": {}, "v5e": {}, "v6e": {}}


def compiler_options(slice: Slice) -> Options:
    """What to pass as `compiler_options` when compiling for this slice; nothing for CPU devices that play it."""
    return {**_ALL, **_BY_GENERATION[slice.generation]}
