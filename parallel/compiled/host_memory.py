"""Checks that a host has enough memory for a run.

The estimate is a lower bound: the data pipeline, the compiler and the program itself are not counted.
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import psutil

from core import units
from core.batches import Field, batch_size
from core.errors import UserError
from core.slices import GIB
from core.training import prefetch
from core.types import SizesEvaluation, Task, can
from parallel import mesh
from parallel.compiled import report
from parallel.partitioner import Program

_ASSEMBLED = 2  # copies of a batch on the host: in its streams, and assembled
_ROW_NUMBER_BYTES = 64  # of `DataLayout.rows`: a Python integer, its place in two tuples and in an array


def available_bytes() -> int:
    """Returns the bytes that this machine can allocate without swapping."""
    return psutil.virtual_memory().available


def require_simulated(needed_bytes: int, *, slice_name: str) -> None:
    """Checks that a simulation fits into this machine's free memory.

    Raises:
      UserError: it does not fit.
    """
    available = available_bytes()
    if needed_bytes > available:
        raise UserError(
            f"simulating {slice_name} needs {units.size(needed_bytes)} for the model on all its chips, and this "
            f"machine has {units.size(available)} of free memory. Give a smaller slice (--slice) or a smaller model, "
            "or take a machine with more memory."
        )


def per_host(program: Program, task: Task, *, eval_batches: int, saved_bytes: float) -> dict[str, int]:
    """Returns the bytes that the host with the most rows needs at once, by purpose.

    Args:
      eval_batches: batches of an evaluation.
      saved_bytes: a chip's activations that are kept on its host.
    """
    rows = _host_rows(program)
    row_bytes = _row_bytes(program)
    held_out_rows_end = can(task, SizesEvaluation)  # then EVAL_BATCHES may be far more than the task has
    return {
        "batches": _ASSEMBLED * rows * row_bytes,
        "row numbers": rows * _ROW_NUMBER_BYTES,
        "evaluation": 0 if held_out_rows_end else eval_batches * rows * row_bytes,
        "saved activations": int(saved_bytes * program.partitioner.slice.devices_per_host),
        "a checkpoint": report.totals(program).whole // program.partitioner.slice.hosts,
    }


def simulated(program: Program, task: Task, *, eval_batches: int) -> dict[str, int]:
    """Returns the bytes that a simulation of all hosts and chips needs at once, by purpose."""
    slice_, own = program.partitioner.slice, per_host(program, task, eval_batches=eval_batches, saved_bytes=0)
    sizes = report.totals(program)
    batch = batch_size(program.spec) * _row_bytes(program)
    return {
        "batches": slice_.hosts * own["batches"] + prefetch.HELD * batch,
        "row numbers": slice_.hosts * own["row numbers"],
        "evaluation": slice_.hosts * own["evaluation"],
        "state and gradients": (sizes.everything + sizes.params) * slice_.devices,
    }


def problem(
    need: Mapping[str, int], program: Program, task: Task, *, eval_batches: int, have_bytes: int, whose: str
) -> str:
    """Returns the error message, with a fix, if `need` exceeds `have_bytes`, else "".

    Args:
      need: bytes by purpose.
      whose: the machine that has them, such as `this host`.
    """
    total = sum(need.values())
    if total <= have_bytes:
        return ""
    parts = ", ".join(f"{name} {_gib(count)}" for name, count in need.items() if 100 * count >= total)
    fixed = need.get("a checkpoint", 0) + need.get("state and gradients", 0)
    if fixed > have_bytes:
        what = f"the state of {program.partitioner.slice.name}"
        fix = (
            "take more hosts or a smaller model; --check smoke uses a tiny model with the same slice, mesh and strategy"
        )
    else:
        what = f"BATCH_SIZE = {batch_size(program.spec):,} rows of {_row_bytes(program):,} bytes"
        saved = need.get("saved activations", 0)
        what += " and the activations that are saved on the host" if saved else ""
        rows = int(batch_size(program.spec) * (have_bytes - fixed) / (total - fixed))
        schedule = program.partitioner.pipeline
        cuts = program.accum_steps * (schedule.num_microbatches if schedule else 1)
        unit = math.lcm(cuts * program.partitioner.row_shards, task.num_streams)
        fixes = [f"set BATCH_SIZE to at most {rows // unit * unit:,}"] if rows >= unit else []
        if total - saved <= have_bytes:
            fixes += ["raise ACCUM_STEPS", "let the model save less on the host (remat)"]
        elif need["evaluation"] > need["batches"]:
            fixes.append(f"{'' if fixes else 'set '}EVAL_BATCHES (now {eval_batches}) lower")
        *others, last = fixes or ["use machines with more memory"]
        fix = f"{', '.join(others)}, or {last}" if others else last
    return f"{what}: needs {_gib(total)} of host memory ({parts}), and {whose} has {_gib(have_bytes)}. Fix: {fix}"


def require(program: Program, task: Task, *, eval_batches: int) -> None:
    """Checks that this machine's free memory suffices for one host of a run.

    Activations that the model saves on the host are not counted.

    Raises:
      UserError: it does not suffice.
    """
    need, have = per_host(program, task, eval_batches=eval_batches, saved_bytes=0), available_bytes()
    if said := problem(need, program, task, eval_batches=eval_batches, have_bytes=have, whose="this host"):
        raise UserError(said)


def _host_rows(program: Program) -> int:
    at = program.partitioner
    few = at.batch_shardings({"rows": Field((at.row_shards,), jnp.int32, ("batch",))})["rows"]
    return int(mesh.largest_share(few, at.row_shards) * batch_size(program.spec))


def _row_bytes(program: Program) -> int:
    return sum(s.size // s.shape[0] * s.dtype.itemsize for s in program.spec.values())


def _gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB"
