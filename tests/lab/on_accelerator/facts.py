"""Facts of the device: versions, memory, peaks of matrix products, bandwidth of a copy."""

import os
import platform
import subprocess
from importlib import metadata

import jax
import jax.numpy as jnp

from core import jax_internals, slices, versions
from core.slices import GIB
from launch.hosts import machine
from tests.lab.on_accelerator.recorder import Recorder, Request, seconds_of

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")
_PRECISIONS = {  # of products of matrices: dtype, and what JAX is asked for
    "bfloat16": ("bfloat16", None),
    "float32, by default": ("float32", None),
    "float32, tf32": ("float32", "tensorfloat32"),
    "float32, highest": ("float32", "highest"),
}


def measure(record: Recorder, request: Request) -> None:
    """Measures the first device of this machine."""
    slice_ = machine.of_this_process()
    device = jax.local_devices()[0]
    record.figure(
        "device", f"{slice_.name}: {device.device_kind}", beside=device.client.platform_version.splitlines()[0]
    )
    record.figure("host", f"{os.cpu_count()} cores, {_host_memory():.0f} GiB", beside=platform.platform())
    for name, text in _versions().items():
        record.figure(name, text)
    if text := _driver():
        record.figure("driver", text)
    else:
        record.absent("driver", "nvidia-smi does not answer")
    if cudnn := jax_internals.cudnn_version():
        record.figure("cuDNN", str(cudnn))
    else:
        record.absent("cuDNN", "JAX has found no cuDNN")
    _memory(record, device, slice_.chip)
    _products(record, request, slice_.chip)
    _copy(record, request, slice_.chip)


def _host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), **versions.of_training()}
    for name in _PLUGINS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _memory(record: Recorder, device: jax.Device, chip: slices.Chip) -> None:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        record.absent("memory that JAX may allocate", f"JAX counts no memory of {device.platform} devices")
        return
    table = f"table: {chip.usable_hbm_bytes / GIB:.1f} of {chip.hbm_bytes / GIB:.0f} GiB"
    record.figure("memory that JAX may allocate", stats["bytes_limit"] / GIB, "GiB", beside=table)


def _products(record: Recorder, request: Request, chip: slices.Chip) -> None:
    """Random matrices: products of zeros are faster than of data."""
    size = request.sized(8192, 512)
    keys = jax.random.split(jax.random.key(0))
    for name, (dtype, precision) in _PRECISIONS.items():
        if precision == "tensorfloat32" and chip.platform != "cuda":
            record.absent(f"product, {name}", "only GPUs of NVIDIA have tf32")
            continue
        a, b = (jax.random.normal(key, (size, size)).astype(dtype) for key in keys)
        product = jax.jit(lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision))
        flops = 2 * size**3 / seconds_of(lambda a=a, b=b, product=product: product(a, b), calls=10)
        table = f"{flops / chip.peak_flops:.0%} of the table's peak" if chip.peak_flops and dtype == "bfloat16" else ""
        record.figure(f"product of {size}, {name}", flops / 1e12, "TFLOP/s", beside=table)


def _copy(record: Recorder, request: Request, chip: slices.Chip) -> None:
    count = request.sized(2**28, 2**22)  # float32
    source = jax.random.normal(jax.random.key(0), (count,))
    negated = jax.jit(jnp.negative)
    rate = 2 * source.nbytes / seconds_of(lambda: negated(source), calls=4)
    table = "" if chip.platform == "cpu" else f"{rate / chip.hbm_bytes_per_second:.0%} of the table's"
    record.figure(f"read and write {units_of(source.nbytes)}", rate / 1e9, "GB/s", beside=table)


def units_of(count: int) -> str:
    """Formats bytes."""
    return f"{count / GIB:.3g} GiB" if count >= GIB else f"{count / 2**20:.3g} MiB"
