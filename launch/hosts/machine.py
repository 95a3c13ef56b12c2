"""Finds the devices of this machine, for SLICE `local`, and of this process."""

import importlib.metadata
import json
import os
import subprocess
import sys

import jax

from core import jax_internals, slices
from core.errors import UserError
from launch.hosts import tpu_host

# For `local`: in a process of its own, because JAX keeps the memory of GPUs until its process ends.
_LOOK = "import jax, json; print(json.dumps([jax.devices()[0].device_kind, jax.local_device_count()]))"
_SECONDS = 120


def of_this_process() -> slices.Slice:
    """Returns the slice of the devices that JAX gives this process, which it initializes.

    Raises:
      UserError: JAX can use no devices here, Renga does not know them, or they belong to a slice of several hosts.
    """
    place = tpu_host.look()
    is_chosen = jax.config.jax_platforms or jax_internals.backends_are_initialized()
    if not (is_chosen or place.on_tpu_host or importlib.metadata.entry_points(group="jax_plugins")):
        jax.config.update("jax_platforms", "cpu")  # neither TPU nor GPU: an installed libtpu would print errors
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(slices.GPU_MEMORY_FRACTION))
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise UserError(f"JAX finds no devices on this machine: {error}") from error
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


def local() -> slices.Slice:
    """Returns the slice of this machine: its TPU slice, its GPUs, or its CPU.

    Raises:
      UserError: JAX can use no devices here, or Renga does not know them.
    """
    place = tpu_host.look()
    if place.accelerator_type:
        return slices.get(place.accelerator_type)
    environ = os.environ | {"TPU_SKIP_MDS_QUERY": "1"}
    look = [sys.executable, "-c", _LOOK]
    try:
        done = subprocess.run(look, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"JAX did not list the devices of this machine within {_SECONDS} s; does nvidia-smi answer?"
        ) from error
    if done.returncode:
        raise UserError(f"JAX finds no devices on this machine:\n{done.stderr.strip()[-1000:]}")
    kind, count = json.loads(done.stdout.splitlines()[-1])
    return slices.of_device_kind(kind, per_host=count, hosts=1)
