"""One row per experiment: its configuration, its cost, how far it was trained and its scores."""

from __future__ import annotations

import csv
import functools
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from core import logical, metrics
from core.batches import Field, batch_shapes
from core.types import CountsRunFlops, HasEffectiveDepth, HasLayers, Model, can
from launch.experiment import Experiment
from launch.experiments.suites import Entry
from tasks.puzzles.task import PuzzleTask

SCORE = "validation/exact_accuracy"
GOAL = 0.8  # accuracy for which the first step that reaches it is reported
_EXA = 1e18

ResultRow = Mapping[str, Any]


def rows(entries: Sequence[Entry], *, status: Mapping[str, str], run_dirs: Mapping[str, str]) -> list[ResultRow]:
    """Returns a row for each entry, in order.

    Args:
      entries: entries of a suite.
      status: status text by entry id.
      run_dirs: run directories by entry id; a duplicate has that of the other entry.
    """
    found = [_row(entry, status[entry.id], run_dirs[entry.id]) for entry in entries]
    for entry, row in zip(entries, found, strict=True):
        seeds = [r["exact_accuracy"] for e, r in zip(entries, found, strict=True) if e.path == entry.path]
        known = [accuracy for accuracy in seeds if accuracy is not None]
        if len(known) > 1:
            row |= {"mean_of_seeds": statistics.fmean(known), "spread_of_seeds": max(known) - min(known)}
    return found


def _row(entry: Entry, status: str, run_dir: str) -> dict[str, Any]:
    run, found = entry.experiment, metrics.read(run_dir)
    puzzles, copies = run.task.asked if isinstance(run.task, PuzzleTask) else (None, None)
    best_step, best = found.best(SCORE) or (None, None)
    exact, in_training = found.last(SCORE), found.last("exact_accuracy")
    return {
        "group": entry.group,
        "experiment": entry.name,
        "same_as": entry.same_as or "",
        "status": status,
        "seed": run.seed,
        "parameters": trained_parameters(run),
        "depth": depth(run.model),
        "puzzles": puzzles,
        "copies": copies,
        "batch": run.batch_size,
        "steps": found.step,
        "total_steps": run.total_steps,
        "rows": found.step * run.batch_size,
        "eflop": _eflop(run, found.step),
        "total_eflop": _eflop(run, run.total_steps),
        "exact_accuracy": exact,
        "mean_of_seeds": None,
        "spread_of_seeds": None,
        "best_exact_accuracy": best,
        "best_step": best_step,
        "goal_step": found.first_at(SCORE, least=GOAL),
        "cell_accuracy": found.last("validation/accuracy"),
        "q_halt_accuracy": found.last("validation/q_halt_accuracy"),
        "train_exact_accuracy": in_training,
        "gap": None if None in (exact, in_training) else in_training - exact,
        "train_steps_per_puzzle": found.last("steps"),
        "validation_loss": found.last("validation/loss"),
        "step_seconds": found.median("step_seconds"),
        "evaluated": found.texts.get(metrics.EVALUATED_ON, evaluated_on(run)),
        "curve": found.curve(SCORE),
        "run": run_dir,
    }


def trained_parameters(run: Experiment) -> int:
    """Counts trained parameters, without constants and without tables of which a step uses a few rows."""
    return _trained_parameters(run.model, tuple(run.task.spec(run.task.num_streams).items()))


@functools.cache
def _trained_parameters(model: Model, fields: tuple[tuple[str, Field], ...]) -> int:
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch_shapes(dict(fields)))
    counted = jax.tree.map(lambda s: s.trainable and s.kind != "table", specs)
    return sum(jax.tree.leaves(jax.tree.map(lambda shape, yes: yes * math.prod(shape.shape), shapes, counted)))


def depth(model: Model) -> int | None:
    """Layers that one training step applies in sequence."""
    if can(model, HasEffectiveDepth):
        return model.effective_depth
    return model.num_layers if can(model, HasLayers) else None


def _eflop(run: Experiment, steps: int) -> float | None:
    """Training EFLOP up to a step, without rematerialisation and evaluation; None if the model does not count them."""
    if can(run.model, CountsRunFlops):
        return run.model.training_flops(run.row_length, rows=run.batch_size, steps=steps) / _EXA
    return run.flops_per_step * steps / _EXA if run.flops_per_step else None


def evaluated_on(run: Experiment) -> str:
    """Describes the rows of the run's evaluations from the configuration; the run's own record is more exact."""
    most, count = run.eval_batches * run.batch_size, run.task.eval_puzzles if isinstance(run.task, PuzzleTask) else None
    if count is None:
        return f"at most {most:,} held-out rows"
    return f"at most {min(most, count):,} held-out puzzles, seed {run.task.eval_seed}"


def as_csv(table: Sequence[ResultRow]) -> str:
    """Returns the table as CSV, without the curves; numbers are not rounded."""
    out = io.StringIO()
    names = [name for name in table[0] if name != "curve"] if table else []
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)  # None is written as an empty cell
    return out.getvalue()
