"""One row for each experiment: what it is, what it costs, how far it came and how good it was."""

from __future__ import annotations

import csv
import functools
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from core import logical, metrics, parameters
from core.optimizers import CONSTANTS
from core.types import CountsRunFlops, HasLayers, Model, can
from launch.experiment import Experiment
from launch.suites import measured
from launch.suites.plan import Entry
from models import trm
from tasks.puzzles.task import PuzzleTask

GOAL = 0.8  # accuracy whose first step is told
TABLE = "puzzle_table"  # of a recursive model: a row for each puzzle, counted apart as in the paper

Row = Mapping[str, Any]


def rows(entries: Sequence[Entry], *, status: Mapping[str, str], run_dirs: Mapping[str, str]) -> list[Row]:
    """A row for each entry, in order.

    Args:
      entries: of a plan.
      status: by id, in words.
      run_dirs: by id, where its run is: that of another entry for a duplicate.
    """
    scores = {entry.id: scored(entry.experiment, measured.read(run_dirs[entry.id])) for entry in entries}
    return [
        {
            **described(entry),
            "status": status[entry.id],
            **scores[entry.id],
            **_over_seeds([scores[e.id]["exact_accuracy"] for e in entries if e.path == entry.path]),
            "run": run_dirs[entry.id],
        }
        for entry in entries
    ]


def described(entry: Entry) -> Row:
    """What an experiment is, and what it costs, from its configuration alone."""
    run = entry.experiment
    asked = run.task.asked if isinstance(run.task, PuzzleTask) else (None, None)
    return {
        "group": entry.group,
        "experiment": entry.name,
        "same_as": entry.same_as or "",
        "seed": run.seed,
        "parameters": trained_parameters(run.model, run.task.length),
        "depth": depth(run.model),
        "puzzles": asked[0],
        "copies": asked[1],
        "batch": run.batch_size,
        "total_steps": run.total_steps,
        "total_eflop": flops(run, run.total_steps, 1e18),
        "evaluated": evaluated(run),
    }


def scored(run: Experiment, found: measured.Measured) -> Row:
    """How far a run came, and how good it was there."""
    best = found.best(measured.SCORE)
    curve = found.curve(measured.SCORE)
    exact, in_training = found.last(measured.SCORE), found.last("exact_accuracy")
    said = found.texts.get(metrics.EVALUATED_ON)
    return {
        "steps": found.step,
        "rows": found.step * run.batch_size,
        "eflop": flops(run, found.step, 1e18),
        "exact_accuracy": exact,
        "best_exact_accuracy": best[1] if best else None,
        "best_step": best[0] if best else None,
        "goal_step": found.first_at(measured.SCORE, least=GOAL),
        "cell_accuracy": found.last("validation/accuracy"),
        "q_halt_accuracy": found.last("validation/q_halt_accuracy"),
        "train_exact_accuracy": in_training,
        "gap": None if None in (exact, in_training) else in_training - exact,
        "train_steps_per_puzzle": found.last("steps"),
        "validation_loss": found.last("validation/loss"),
        "step_seconds": found.median("step_seconds"),
        "curve": curve,
        **({"evaluated": said} if said else {}),
    }


def _over_seeds(accuracies: Sequence[float | None]) -> Row:
    """Mean and distance of the highest from the lowest, where there are several."""
    known = [a for a in accuracies if a is not None]
    if len(known) < 2:
        return {"mean_of_seeds": None, "spread_of_seeds": None}
    return {"mean_of_seeds": statistics.fmean(known), "spread_of_seeds": max(known) - min(known)}


@functools.cache
def trained_parameters(model: Model, length: int) -> int:
    """Entries of what is trained, without a table of puzzles."""
    spec = {name: jax.ShapeDtypeStruct((2, length), "int32") for name in _INPUTS}
    spec |= {"puzzle_ids": jax.ShapeDtypeStruct((2,), "int32"), "weights": jax.ShapeDtypeStruct((2, length), "float32")}
    shapes, _ = logical.abstract_init(model.init, jax.random.key(0), spec)
    beside = parameters.matches(shapes, parameters.present(shapes, (*CONSTANTS, TABLE)))
    sizes = jax.tree.map(lambda a, out: 0 if out else math.prod(a.shape), shapes, beside)
    return sum(jax.tree.leaves(sizes))


_INPUTS = ("inputs", "targets", "labels", "segment_ids", "positions")


def depth(model: Model) -> int | None:
    """Layers in a row in one step of a recursive model: outer cycles x (inner cycles + 1) x layers."""
    if not isinstance(model, trm.TRM):
        return model.num_layers if can(model, HasLayers) else None
    return model.h_cycles * (model.l_cycles + 1) * model.num_layers


def flops(run: Experiment, steps: int, unit: float) -> float | None:
    """Of training up to a step, in `unit`, without recomputation and evaluation; None where the model does not say."""
    if can(run.model, CountsRunFlops):
        return run.model.training_flops(run.task.length, rows=run.batch_size, steps=steps) / unit
    return run.flops_per_step * steps / unit if run.flops_per_step else None


def evaluated(run: Experiment) -> str:
    """What a score will be of, as far as the configuration says; a run says it exactly."""
    most, count = run.eval_batches * run.batch_size, run.task.eval_puzzles if isinstance(run.task, PuzzleTask) else None
    if count is None:
        return f"at most {most:,} held-out rows"
    return f"at most {min(most, count):,} held-out puzzles, seed {run.task.eval_seed}"


def as_csv(table: Sequence[Row]) -> str:
    """The table without curves; numbers in full."""
    out = io.StringIO()
    names = [name for name in table[0] if name != "curve"] if table else []
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in table)
    return out.getvalue()
