"""Finds the devices of this machine, for SLICE `local`."""

import json
import os
import subprocess
import sys

from core import slices
from core.errors import UserError
from launch.hosts import tpu_host

# In a process of its own, because JAX keeps the memory of GPUs until its process ends.
_LOOK = "import jax, json; print(json.dumps([jax.devices()[0].device_kind, jax.local_device_count()]))"
_SECONDS = 120


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
