"""The summary that a run prints when it starts, and its results when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from rich.panel import Panel
from rich.table import Table

from core import slices, units
from core.checkpoints import writing
from core.train_state import TrainState
from core.types import CountsFlops, DescribesEvaluation, Generates, can, lacking
from launch import terminal
from launch.experiment import Experiment, padding
from launch.hosts.cluster import Host
from launch.runs import progress
from parallel import report, sampling, strategy
from parallel.partitioner import Program

SAMPLE_IDS = 200


def show(
    experiment: Experiment,
    program: Program,
    *,
    run_dir: str,
    resumed_from: int | None,
    last_step: int,
    host: Host,
    measured: Mapping[str, str],
) -> None:
    """Prints a panel that describes the run, with the rows of `measured`."""
    grid = Table.grid(padding=(0, 2))
    card = rows(experiment, program, host=host)
    left = f"resumed from {resumed_from:,}" if resumed_from else "fresh"
    if experiment.init_from:
        card["start"] = f"parameters of {experiment.init_from}"
    early = f" of {experiment.total_steps:,}" if last_step < experiment.total_steps else ""
    if evaluated := evaluated_on(experiment):
        card["validation"] = f"on {evaluated}"
    saves = writing.estimate_saves(
        run_dir,
        interval=experiment.checkpoint_interval,
        keep=experiment.keep_checkpoints,
        size_bytes=report.totals(program).whole,
    )
    for name, value in {
        **card,
        **measured,
        "saves": saves,
        "steps": f"to {last_step:,}{early}, {left}",
        "run": run_dir,
    }.items():
        grid.add_row(f"[bold]{name}[/bold]", value)
    terminal.console(118).print(Panel(grid, title="renga", title_align="left", expand=False))


def rows(experiment: Experiment, program: Program, *, host: Host) -> dict[str, str]:
    """Rows of the summary: slice, strategy, model, data, batch, and memory per chip."""
    slice_ = slices.get(experiment.slice)
    sizes = report.totals(program)
    parameters = sum(math.prod(row.shape) for row in report.rows(program) if row.path.startswith("params/"))
    card = {
        "slice": f"{slice_.name}: {units.counted(slice_.chips, 'chip')} on {units.counted(slice_.hosts, 'host')}, "
        f"{slice_.topology_name}"
        + (f"; simulated by {units.counted(host.count, 'process', 'processes')}" if host.simulated else ""),
        "strategy": f"{experiment.strategy.name}: {strategy.mesh_text(program.partitioner.shape)}",
        "model": f"{type(experiment.model).__name__}, {parameters:,} parameters" + padding(experiment.model),
        "data": experiment.task.describe(),
        "batch": _batch(experiment),
        "state": f"{units.size(sizes.everything)} per chip (parameters {units.size(sizes.params)}, optimizer "
        f"{units.size(sizes.opt_state)}); {units.size(sizes.whole)} in all",
    }
    if schedule := program.partitioner.pipeline:
        card["pipeline"] = schedule.describe(program.partitioner.shape["stage"])
    if experiment.gather_once and experiment.accum_steps > 1:  # one microbatch is one gather anyway
        card["gathered"] = (
            f"{units.size(program.gathered_bytes)} more per chip: parameters and gradients whole, once per step"
        )
    if not can(experiment.model, CountsFlops):
        card["compute"] = f"no FLOPs, no MFU: {lacking(experiment.model, CountsFlops)}"
    elif flops := experiment.flops_per_step:
        card["compute"] = (
            f"{units.flops(flops)} per step; {units.seconds(flops / slice_.peak_flops)} at the slice's bf16 peak"
        )
    return card


def _batch(experiment: Experiment) -> str:
    """Formats `8 rows x 128 tokens = 1,024 tokens, with images [64, 64, 3]`; the tokens only if rows have some."""
    spec, text = experiment.task.spec(experiment.batch_size), units.counted(experiment.batch_size, "row")
    if experiment.unit == "token":
        tokens = units.counted(experiment.tokens_per_step, "token")
        text += f" x {units.counted(experiment.row_length, 'token')} = {tokens}"
    others = {name: field.shape[1:] for name, field in spec.items() if "length" not in field.axes}
    more = [f"{name} {list(shape)}" for name, shape in others.items() if shape]
    text += f", with {', '.join(more)}" if more else ""
    return text + (f", in {experiment.accum_steps} microbatches" if experiment.accum_steps > 1 else "")


def show_end(
    experiment: Experiment, program: Program, state: TrainState, validation: Mapping[str, float], *, run_dir: str
) -> None:
    """Prints the result, a sample of the model's text, and where the files are. All hosts call it; host 0 prints."""
    written = _sample(experiment, program, state)
    if jax.process_index() != 0:
        return
    if validation:
        print(f"\n{_validated(experiment, validation)}")
    if written:
        print(f"\nThe model continues {experiment.prompt!r}:\n\n{terminal.printable(written)}\n")
    elif experiment.prompt and not can(experiment.model, Generates):
        print(f"\nPROMPT = {experiment.prompt!r} is not continued: {lacking(experiment.model, Generates)}\n")
    print(f"run         {run_dir}\ntensorboard launch/run tensorboard {run_dir}", flush=True)


def evaluated_on(experiment: Experiment) -> str:
    """Returns what the evaluation is computed on; empty if the task does not say."""
    if not experiment.eval_batches or not can(experiment.task, DescribesEvaluation):
        return ""
    return experiment.task.evaluated_on(experiment.eval_batches * experiment.batch_size)


def _validated(experiment: Experiment, validation: Mapping[str, float]) -> str:
    """The validation loss, or every mean of a task that describes its evaluation."""
    if not (evaluated := evaluated_on(experiment)):
        return f"validation loss {validation['validation/loss']:.4f} nats per {experiment.unit}"
    means = {name.removeprefix("validation/"): value for name, value in sorted(validation.items())}
    plain, curves = progress.curves_apart(means)
    lines = ["  ".join(f"{name} {value:.4f}" for name, value in plain.items())]
    for name, values in curves.items():
        lines.append(f"{name} by step: " + " ".join(f"{value:.3f}" for value in values))
    return "\n".join([f"validation on {evaluated}", *lines])


def _sample(experiment: Experiment, program: Program, state: TrainState) -> str:
    """The model's continuation of the prompt, which starts like a training row; empty if it cannot generate."""
    if not experiment.prompt or not can(experiment.model, Generates):
        return ""
    vocabulary = experiment.task.vocabulary
    prompt = [vocabulary.bos_id, *vocabulary.encode(experiment.prompt)]
    return vocabulary.decode(sampling.continue_prompt(program, state, prompt, count=SAMPLE_IDS))
