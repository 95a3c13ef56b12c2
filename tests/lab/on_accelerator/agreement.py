"""Training steps of small models on the device, compared with the CPU of the same machine.

The models are those by which strategies are compared (`models.agreement_subjects`): a decoder and a recursive model.
In float32 with products in full precision, the tolerance is that of strategies on CPUs. A GPU multiplies float32
matrices in tf32 by default, whose products have 10 bits; that difference is recorded without a verdict.
"""

from collections.abc import Mapping
from typing import Any

import jax

from core import slices
from core.batches import Field
from launch.hosts import machine
from models.agreement_subjects import MODELS, batches_for, optimizer_of
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.verify import agreement
from parallel.verify.agreement import Trajectory
from tests.lab.on_accelerator.recorder import Recorder, Request

_STEPS = 3
# Of the losses: sums of hundreds of bfloat16 terms, whose 8 bits are rounded in another order at every product.
_OF_BFLOAT16 = 0.02
_PARTS = ("gradients", "losses", "params", "opt_state")


def measure(record: Recorder, request: Request) -> None:
    """Compares every model in float32 (full precision, and the device's default) and in bfloat16."""
    here = machine.of_this_process()
    place = slices.get("v5e-1" if here.is_tpu else f"{here.generation}:1")
    device = jax.local_devices()[0]
    host = next(iter(_host_devices()), None)
    if host is None:
        record.absent("agreement with the CPU", "JAX offers no CPU devices beside these: unset JAX_PLATFORMS")
        return
    for name, model in MODELS.items():
        for dtype in ("float32", "bfloat16"):
            with jax.default_matmul_precision("highest"):
                there = _run(model, slices.get("cpu:1"), host, dtype)
                here = _run(model, place, device, dtype)
            _compared(record, f"{name}, {dtype}", here, there, dtype)
            if device.platform == "cuda" and dtype == "float32":
                by_default = agreement.compare(_run(model, place, device, dtype), there)["losses"]
                record.figure(f"{name}, float32 by default: losses", by_default.relative, "relative")


def _host_devices() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:  # the platform was left out
        return []


def _run(model: Any, place: slices.Slice, device: jax.Device, dtype: str) -> Trajectory:
    data = list(batches_for(model, steps=_STEPS))
    spec = {name: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for name, a in data[0].items()}
    bound = Partitioner(strategies.data_parallel(), slice=place, devices=[device])
    computing = agreement.computing_in(model, dtype)
    with jax.default_device(device):
        return agreement.run(bound.program(computing, optimizer_of(model), spec, seed=7), data)


def _compared(record: Recorder, name: str, here: Trajectory, there: Trajectory, dtype: str) -> None:
    apart: Mapping[str, agreement.Difference] = agreement.compare(here, there)
    if dtype == "bfloat16":
        found = apart["losses"].relative
        record.figure(f"{name}: losses", found, "relative", f"tolerance {_OF_BFLOAT16:g}", found <= _OF_BFLOAT16)
        return
    allowed = agreement.tolerance("data_parallel")
    for part in _PARTS:
        found = apart[part].ulp
        record.figure(f"{name}: {part}", found, "ulp", f"tolerance {allowed[part]:.0f}", found <= allowed[part])
