"""Finds the devices of this machine and of this process; prepares GPUs."""

import importlib.metadata
import json
import os
import subprocess
import sys
from typing import NamedTuple

import jax

from core import extras, jax_internals, slices
from core.errors import UserError
from launch import environment
from launch.hosts import tpu_host

# The program that looks for `local`. It is a process of its own, because JAX keeps GPU memory until its process ends.
_LOOK = "import jax, json; print(json.dumps([jax.devices()[0].device_kind, jax.local_device_count()]))"
_SECONDS, _SMI_SECONDS = 120, 10
_SAID = 1000  # last characters of JAX's output that an error shows
_FRACTION, _PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


class GpuMemory(NamedTuple):
    """How JAX allocates GPU memory.

    Attributes:
      fraction: the share of each GPU's memory that JAX may allocate.
      is_preallocated: whether JAX allocates that share at the start.
      is_chosen: whether an environment variable sets one of these.
    """

    fraction: float
    is_preallocated: bool
    is_chosen: bool


def gpu_memory() -> GpuMemory:
    """Reads XLA_PYTHON_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_PREALLOCATE. Raises UserError if one is malformed."""
    fraction, preallocate = environment.read(_FRACTION), environment.read(_PREALLOCATE)
    try:
        share = slices.GPU_MEMORY_FRACTION if fraction is None else float(fraction)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{_FRACTION}={fraction!r}: expected a number above 0, up to 1")
    if (preallocate or "true").lower() not in ("true", "false", "1", "0"):
        raise UserError(f"{_PREALLOCATE}={preallocate!r}: expected true or false")
    is_off = preallocate is not None and preallocate.lower() in ("false", "0")
    return GpuMemory(share, not is_off, fraction is not None or preallocate is not None)


def prepare_gpus() -> None:
    """Sets JAX's share of GPU memory, and the order of GPUs, unless set.

    Call it before JAX initializes the GPUs. CUDA_DEVICE_ORDER makes CUDA and nvidia-smi number them alike.

    Raises:
      UserError: other processes use the GPUs, and no variable sets JAX's share.
    """
    memory = gpu_memory()
    os.environ.setdefault(*_ORDER)
    if not memory.is_chosen and (held := gpus_in_use(free=memory.fraction)):
        raise UserError(
            f"other processes use GPUs of this machine:\n  {'; '.join(held)}\nJAX allocates {memory.fraction:.0%} of a "
            "GPU's memory at its start. Wait for them or end them, choose other GPUs with CUDA_VISIBLE_DEVICES, or "
            f"divide the memory with {_FRACTION} (such as 0.4) in each of them"
        )
    os.environ.setdefault(_FRACTION, str(slices.GPU_MEMORY_FRACTION))


def gpus_in_use(*, free: float) -> list[str]:
    """Returns a line for each visible GPU with a share of free memory below `free`.

    Empty if nvidia-smi is missing or fails, and if CUDA_VISIBLE_DEVICES is set and empty.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    chosen = environment.read("CUDA_VISIBLE_DEVICES")
    gpus = _nvidia_smi("--query-gpu=index,uuid,memory.used,memory.total", chosen)
    processes = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name", chosen)
    lines = []
    for index, uuid, used, total in (row for row in gpus if len(row) == 4 and row[2].isdigit() and row[3].isdigit()):
        if int(used) > (1 - free) * int(total):
            names = [f"process {row[1]} ({row[2]})" for row in processes if len(row) == 3 and row[0] == uuid]
            by = f" by {', '.join(names)}" if names else ""
            lines.append(f"GPU {index}: {used} of {total} MiB in use{by}")
    return lines


def _nvidia_smi(query: str, gpus: str | None) -> list[list[str]]:
    command = ["nvidia-smi", *(["-i", gpus] if gpus else []), query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def _require_gpus_in_use(asked: str | None, *, said: str = "") -> None:
    """On a machine with GPUs, JAX can fall back to the CPU with only a warning; this raises UserError."""
    if asked or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    gpus = _nvidia_smi("--query-gpu=name,driver_version", environment.read("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return
    listed = "; ".join(f"{name}, driver {driver}" for name, driver in (row for row in gpus if len(row) == 2))
    plugins = _cuda_plugins()
    why = (
        f"JAX's plugin for them ({', '.join(plugins)}) cannot use them: is the driver as new as its CUDA needs?"
        if plugins
        else f"JAX has no plugin for them: `{extras.install('cuda')}` adds it"
    )
    printed = f". JAX printed:\n{said[-_SAID:]}" if plugins and said else ""
    raise UserError(
        f"JAX would use the CPU of this machine, which has GPUs:\n  {listed}\n{why}. To use the CPU, set "
        f"JAX_PLATFORMS=cpu before JAX is imported{printed}"
    )


def _asked() -> str | None:
    return jax.config.values["jax_platforms"] or jax.config.values.get("jax_platform_name")  # its former name


def _cuda_plugins() -> list[str]:
    found = importlib.metadata.entry_points(group="jax_plugins")
    return [
        f"{plugin.name} {plugin.dist.version if plugin.dist else ''}".strip()
        for plugin in found
        if "cuda" in plugin.name
    ]


def of_this_process() -> slices.Slice:
    """Initializes JAX's devices in this process, and returns their slice.

    Raises:
      UserError: the devices cannot be used, or belong to a slice of several hosts.
    """
    place, asked = tpu_host.look(), _asked()
    prepare_platform()
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise UserError(f"JAX finds no devices on this machine: {error}") from error
    if device.platform == "cpu":
        _require_gpus_in_use(asked)
    if device.platform == "tpu" and place.accelerator_type:
        found = slices.get(place.accelerator_type)
    else:
        found = slices.of_device_kind(device.device_kind, per_host=jax.local_device_count(), hosts=jax.process_count())
    if found.hosts > 1:
        raise UserError(
            f"this machine is one of the {found.hosts} hosts of {found.name}, and this is for the devices of one "
            "machine: write the experiment as a gin file, and start it with launch/pod.sh"
        )
    return found


def prepare_platform() -> None:
    """Chooses the platform of this process, unless its devices are initialized or JAX_PLATFORMS is set.

    Raises UserError if JAX would use the CPU of a machine with GPUs.
    """
    if jax_internals.backends_are_initialized():
        return
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    asked = _asked()
    if not (asked or plugins or tpu_host.look().on_tpu_host):
        _require_gpus_in_use(asked)
        jax.config.update("jax_platforms", "cpu")  # without TPU and GPU, an installed libtpu would print errors
    if any("cuda" in name for name in plugins) and (not asked or {"cuda", "gpu"} & set(asked.split(","))):
        prepare_gpus()


def local() -> slices.Slice:
    """Returns the slice of this machine: its TPU slice, its GPUs, or its CPU.

    Raises UserError if JAX does not list its devices.
    """
    place = tpu_host.look()
    if place.accelerator_type:
        return slices.get(place.accelerator_type)
    environ = dict([_ORDER]) | os.environ | {"TPU_SKIP_MDS_QUERY": "1"}
    look = [sys.executable, "-c", _LOOK]
    try:
        done = subprocess.run(look, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"JAX did not list the devices of this machine within {_SECONDS} s; does nvidia-smi answer?"
        ) from error
    if done.returncode:
        raise UserError(f"JAX finds no devices on this machine:\n{done.stderr.strip()[-_SAID:]}")
    kind, count = json.loads(done.stdout.splitlines()[-1])
    if kind == "cpu":
        _require_gpus_in_use(environment.read("JAX_PLATFORMS"), said=done.stderr.strip())
    return slices.of_device_kind(kind, per_host=count, hosts=1)
