"""`launch/run bisect`: runs two variants of an experiment for a few steps and names the first tensor that differs.

Each variant runs in its own processes, which simulate the hosts of its slice. Both variants (A and B) train on the
batches that A reads.
"""

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from core import slices, units
from core.checkpoints import steps as saved_steps
from core.errors import UserError
from core.files import paths
from core.types import ChoosesDtype, Shrinks, can
from launch import environment, flags, terminal
from launch.check import preflight
from launch.config import loader
from launch.experiment import Experiment
from launch.hosts import cluster, simulate
from launch.runs import prepared_run, smoke
from parallel.compiled import host_memory
from parallel.verify import first_difference as bisect
from parallel.verify.agreement import computing_in
from parallel.verify.first_difference import Verdict
from parallel.verify.recording import Recording

COMMAND = ("layouts", "bisect")
HELP = "run two variants of an experiment and name the first step, layer and tensor that differ"
EXAMPLE = """launch/run bisect gin/quickstart.gin "" "hosts=2"
  launch/run bisect gin/quickstart.gin "include 'gin/strategies/fsdp.gin'" "include 'gin/strategies/tensor.gin'"
  launch/run bisect gin/quickstart.gin "STRATEGY = @mine.rules()" "STRATEGY = @strategies.fsdp(); hosts=2" --steps 5
  launch/run bisect gin/quickstart.gin "config=before.gin" "checkpoint=runs/quickstart-v4-16@100" --full

A and B are lists separated by ; of gin bindings, hosts=N (the number of processes that simulate the slice; default 1),
checkpoint=RUN@STEP (the initial state) and config=OTHER.gin (in place of EXPERIMENT.gin); "" is the experiment."""


class Variant(NamedTuple):
    """One of the two variants, parsed from the command line.

    Attributes:
      config: the experiment file.
      bindings: gin bindings.
      hosts: number of processes that simulate the slice.
      checkpoint: the folder of the checkpoint from which it starts; None: it starts from its seed.
    """

    config: str
    bindings: tuple[str, ...]
    hosts: int
    checkpoint: paths.Path | None

    def __str__(self) -> str:
        """Returns text that `parse` reads."""
        start = [f"checkpoint={self.checkpoint.parent}@{self.checkpoint.name}"] if self.checkpoint else []
        return "; ".join((f"config={self.config}", f"hosts={self.hosts}", *start, *self.bindings))

    def experiment(self, slice_name: str | None) -> Experiment:
        """Builds the experiment."""
        return loader.load(self.config, bindings=self.bindings, slice_name=slice_name).build()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bisect`."""
    flags.add(parser, "EXPERIMENT.gin")
    parser.add_argument("a", metavar="A", help='the first variant, such as "STRATEGY = @strategies.fsdp()"')
    parser.add_argument("b", metavar="B", help='the second, such as "hosts=2"')
    flags.add(parser, "--slice")
    flags.add(parser, "--steps", default=3, help="steps to train (default: 3)")
    parser.add_argument(
        "--full", action="store_true", help="use the experiment's sizes instead of those of a smoke run"
    )
    parser.add_argument("--own-dtype", action="store_true", help="compute in the model's dtype instead of float32")
    parser.add_argument("--tolerance", metavar="ULP", type=flags.positive, help="replaces the measured tolerances")
    parser.add_argument("--record", choices=("A", "B"), help=argparse.SUPPRESS)  # in a host's process
    parser.add_argument("--into", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs both variants and prints where they diverge.

    Returns:
      0 if they are equal within the tolerances, 1 if they differ; 128 or more if a signal ended a variant.

    Raises:
      UserError: a variant is malformed or cannot be run.
    """
    variants = {side: parse(text, experiment=args.experiment) for side, text in (("A", args.a), ("B", args.b))}
    experiments = {side: variant.experiment(args.slice) for side, variant in variants.items()}
    if args.record:
        return _record(args, variants, experiments)
    for side, experiment in experiments.items():
        if not args.full and not can(experiment.model, Shrinks):
            raise UserError(
                f"{side}: {type(experiment.model).__name__} has no shrink, so there is no small model: add --full"
            )
        if experiment.initialization.init_from and variants[side].checkpoint is None:
            print(
                f"note: {side} starts from its seed, not from INIT_FROM; checkpoint=RUN starts from a run", flush=True
            )
    played = {side: slices.get(experiments[side].slice).shared_by(variants[side].hosts) for side in "AB"}
    with tempfile.TemporaryDirectory(prefix="renga-bisect-") as folder:
        for side in "AB" if args.full else "":  # memory holds every step of a variant
            variant, name = variants[side], experiments[side].slice
            checked = preflight.require(variant.config, bindings=variant.bindings, slice_name=name, run_dir=folder)
            assert checked.program is not None
            assert checked.experiment is not None
            need = host_memory.simulated(checked.program, checked.experiment.task, eval_batches=0)
            state_bytes = need["state and gradients"]
            host_memory.require_simulated(state_bytes * (args.steps + 2), slice_name=name)
        options = flags.passed_on(args, "--steps", "--slice", "--full", "--own-dtype")
        command = [*environment.COMMAND, "bisect", args.experiment, *map(str, variants.values()), *options]
        for side, slice_ in played.items():
            hosts = units.counted(slice_.hosts, "process plays", "processes play")
            print(f"{side}: {hosts} {slice_.name}", flush=True)
            own = [*command, "--record", side, "--into", folder]
            if code := simulate.run(slice_, command=own, log_directory=Path(folder) / f"logs_{side}"):
                if code < 128:
                    raise UserError(f"{side} could not be run (exit code {code}); the output of its host is above")
                return code
        ours, theirs = (dict(np.load(f"{folder}/{side}.npz")) for side in "AB")
    return _compare(args, experiments, ours, theirs)


def parse(text: str, *, experiment: str) -> Variant:
    """Parses a variant: gin bindings, `hosts=N`, `checkpoint=RUN` and `config=FILE`, separated by `;`.

    `experiment`: the experiment file of a variant without `config`.

    Raises UserError if `hosts` is not a positive integer, or there is no such checkpoint.
    """
    settings, bindings = {"config": experiment, "hosts": "1", "checkpoint": ""}, []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        if setting := re.fullmatch(r"(hosts|checkpoint|config)\s*=\s*(.*)", part):
            settings[setting[1]] = setting[2]
        else:
            bindings.append(part)
    if not settings["hosts"].isdecimal() or not int(settings["hosts"]):
        raise UserError(f"variant {text!r}: hosts={settings['hosts']}: expected a whole number from 1 up")
    config = os.path.expanduser(settings["config"])  # noqa: PTH111 (a relative one stays as typed)
    checkpoint = saved_steps.find(settings["checkpoint"]) if settings["checkpoint"] else None
    return Variant(config, tuple(bindings), int(settings["hosts"]), checkpoint)


def _record(args: argparse.Namespace, variants: dict[str, Variant], experiments: dict[str, Experiment]) -> int:
    experiment = experiments[args.record]
    if not args.full:
        experiment = smoke.shrink(experiment, beside=[experiments["B" if args.record == "A" else "A"]])
    start = variants[args.record].checkpoint
    if start is None:  # a checkpoint may lack frozen parameters, which INIT_FROM names
        of_seed = dataclasses.replace(experiment.initialization, init_from="")
        experiment = dataclasses.replace(experiment, initialization=of_seed)
    if not args.own_dtype:
        experiment = dataclasses.replace(experiment, model=computing_in(experiment.model, "float32"))
    host = cluster.join(slices.get(experiment.slice), limits=cluster.limits(experiment.health))
    run = prepared_run.prepare_run(
        experiment,
        config=" ".join(sys.argv),
        revision="",
        run_dir=f"{args.into}/run",
        last_step=args.steps,
        host=host,
    )
    theirs = dict(np.load(f"{args.into}/A.npz")) if args.record == "B" else None
    recording = bisect.run(
        run.program, experiment.task, steps=args.steps, checkpoint=start, origin=run.origin, data_of=theirs
    )
    if host.is_zero:
        np.savez(f"{args.into}/{args.record}.npz", allow_pickle=False, **recording)
    return 0


def _compare(args: argparse.Namespace, experiments: dict[str, Experiment], ours: Recording, theirs: Recording) -> int:
    models = [experiment.model for experiment in experiments.values()]
    dtypes = sorted({str(model.dtype) if can(model, ChoosesDtype) else "float32" for model in models})
    tolerance = bisect.BFLOAT16 if args.own_dtype and "bfloat16" in dtypes else bisect.TOLERANCE
    if args.tolerance is not None:
        tolerance = dict.fromkeys(tolerance, (args.tolerance, args.tolerance))
    verdict = bisect.judge(ours, theirs, tolerance=tolerance)
    first, row = verdict.first, verdict.first or verdict.largest
    size = row.remark or f"{row.ulp:.3g} ulp apart ({row.absolute:.2g})"
    found = "different:" if first else f"equal through step {args.steps}: the largest difference is"
    console = terminal.console(120, markup=False, soft_wrap=True)
    console.print(f"{found} {row}: {size}; tolerance {verdict.allowed(row):g} ulp")
    console.print(_table(verdict))
    given = bisect.given(ours, theirs)
    if start := given["start"]:
        names = ", ".join(f"{row.place} {row.tensor}" for row in start[:3])
        console.print(f"note: the runs start from different states: {len(start)} tensors, {names} …")
    if data := given["data"]:
        step, tensor = data[0].step, data[0].tensor
        console.print(f"note: B reads other data from step {step} on ({tensor}); both ran on A's data")
    if not args.own_dtype and dtypes != ["float32"]:
        console.print(f"note: computed in float32, not in {' and '.join(dtypes)} (--own-dtype)")
    return 1 if first else 0


def _table(verdict: Verdict) -> Table:
    table = Table(box=None)
    for heading in ("step", "phase", "place", "tensor", "ulp", "absolute", ""):
        table.add_column(heading, justify="right" if heading in ("step", "ulp", "absolute") else "left")
    for row in verdict.shown():
        mark = "<- first" if row is verdict.first else "differs" if verdict.differs(row) else "agrees"
        table.add_row(str(row.step), row.phase, row.place, row.tensor, f"{row.ulp:.3g}", f"{row.absolute:.2g}", mark)
    return table
