"""The one table of TPU compiler options, for every program and every kind of slice; CPU devices take none of them.

The compiler rejects a name it does not know, and a test compiles with the table for each kind of slice, so it cannot
rot. Each option says why it is here; parallel/README.md has what they do together.
"""

from __future__ import annotations

from collections.abc import Mapping

Options = Mapping[str, str | int | bool]

OPTIONS: Options = {
    # Splitting an einsum into steps around a ring of permutes made 7B on v4-32 1.8 times as slow by the compiler's own
    # estimate; gathering first is better.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
    # A gather is a start and an end, with other work between them.
    "xla_enable_async_all_gather": True,
    # What runs between them is fused with the collective, so that one core computes and sends.
    "xla_tpu_enable_async_collective_fusion": True,
    # Gathers are among what is fused so.
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    # One collective may run beside several computations.
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    # The TensorCore computes while it drives a collective.
    "xla_tpu_overlap_compute_collective_tc": True,
}
