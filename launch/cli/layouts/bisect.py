"""`launch/run bisect`: runs two variants of an experiment for a few steps and names the first tensor that differs.

Each variant runs in processes of its own, by this same command with --record, which are the hosts of its slice with
CPU devices for chips. Both compute on the batches that A reads; B's own are only held against them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from core import paths, units
from core.errors import UserError
from core.slices import Slice
from launch import terminal
from launch.cli import flags

HELP = "run two variants of an experiment and name the first step, layer and tensor that differ"
EXAMPLE = """launch/run bisect gin/quickstart.gin "" "hosts=2"
  launch/run bisect gin/quickstart.gin "include 'gin/strategies/fsdp.gin'" "include 'gin/strategies/tensor.gin'"
  launch/run bisect gin/quickstart.gin "STRATEGY = @mine.rules()" "STRATEGY = @strategies.fsdp(); hosts=2" --steps 5
  launch/run bisect gin/quickstart.gin "config=before.gin" "checkpoint=runs/gin/quickstart@100" --full

A and B are text: gin bindings, hosts=N (that many processes play the slice; 1 unless said), checkpoint=RUN@STEP (the
state to start from), config=OTHER.gin (in place of EXPERIMENT.gin), with ; between them; "" is the experiment."""

SHOWN_BEFORE, SHOWN_AT, SHOWN_AFTER = 4, 6, 2


class Variant(NamedTuple):
    """One side: what its text says."""

    config: str
    bindings: tuple[str, ...]
    hosts: int
    checkpoint: tuple[str, int] | None

    def __str__(self) -> str:
        """Text that says the same in a process with another HOME."""
        start = [f"checkpoint={self.checkpoint[0]}@{self.checkpoint[1]}"] if self.checkpoint else []
        return "; ".join((f"config={self.config}", f"hosts={self.hosts}", *start, *self.bindings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is compared, and how closely."""
    flags.add(parser, "EXPERIMENT.gin")
    parser.add_argument("a", metavar="A", help='the first variant, such as "STRATEGY = @strategies.fsdp()"')
    parser.add_argument("b", metavar="B", help='the second, such as "hosts=2"')
    flags.add(parser, "--slice")
    flags.add(parser, "--steps", default=3, help="steps to train (default: 3)")
    size = parser.add_mutually_exclusive_group()
    flags.add(size, "--smoke", help="smallest sizes of model, rows and batch (the default)")
    size.add_argument("--full", action="store_true", help="the sizes of the experiment")
    parser.add_argument("--own-dtype", action="store_true", help="compute in the model's dtype instead of float32")
    parser.add_argument("--tolerance", metavar="ULP", type=float, help="instead of the measured ones")
    parser.add_argument("--record", choices=("A", "B"), help=argparse.SUPPRESS)  # as a host's process
    parser.add_argument("--into", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs both sides and says where they part: 0 equal, 1 different."""
    if args.tolerance is not None and args.tolerance < 0:
        raise UserError(f"--tolerance {args.tolerance}: expected at least 0")
    if args.record:
        return _record(args)
    os.environ["JAX_PLATFORMS"] = "cpu"
    variants = _variants(args)
    experiments = [_experiment(variant, args) for variant in variants]
    played = [_slice(variant, experiment) for variant, experiment in zip(variants, experiments, strict=True)]
    with tempfile.TemporaryDirectory(prefix="renga-bisect-") as folder:
        if args.full:
            for variant, experiment in zip(variants, experiments, strict=True):
                _require_memory(variant, experiment, steps=args.steps, run_dir=folder)
        for side, slice_ in zip("AB", played, strict=True):
            command = [sys.executable, "-m", "launch", "bisect", *_passed_on(args), "--record", side, "--into", folder]
            if code := _run_side(side, slice_, command, into=Path(folder)):
                return code
        return _compare(args, experiments, Path(folder))


def parse(text: str, *, experiment: str) -> Variant:
    """A parsed variant.

    Raises:
      UserError: a number or a checkpoint that cannot be read; a setting given twice.
    """
    settings: dict[str, str] = {}
    bindings = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        setting = re.fullmatch(r"(hosts|checkpoint|config)\s*=\s*(.*)", part)
        if setting is None:
            bindings.append(part)
        elif setting[1] in settings:
            raise UserError(f"variant {text!r}: {setting[1]} is given twice")
        else:
            settings[setting[1]] = setting[2]
    hosts = settings.get("hosts", "1")
    if not hosts.isdecimal() or int(hosts) < 1:
        raise UserError(f"variant {text!r}: hosts={hosts}: expected a whole number from 1 up")
    config = os.path.expanduser(settings.get("config", experiment))  # noqa: PTH111 (a relative one stays as typed)
    return Variant(config, tuple(bindings), int(hosts), _checkpoint(settings.get("checkpoint")))


def _checkpoint(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    run_dir, _, step = text.rpartition("@")
    if not run_dir or not step.isdecimal():
        raise UserError(f"checkpoint={text}: expected RUN@STEP, such as runs/gin/quickstart@100")
    return str(paths.resolve(run_dir)), int(step)


def _variants(args: argparse.Namespace) -> list[Variant]:
    return [parse(text, experiment=args.experiment) for text in (args.a, args.b)]


def _passed_on(args: argparse.Namespace) -> list[str]:
    """Returns the text of this side for a host's process, with paths that do not depend on its HOME."""
    options = flags.passed_on(args, "--steps", "--slice", "--full", "--own-dtype")
    return [args.experiment, *map(str, _variants(args)), *options]


def _experiment(variant: Variant, args: argparse.Namespace) -> Any:
    from launch import configuration

    return configuration.load(variant.config, bindings=variant.bindings, slice_name=args.slice).build()


def _slice(variant: Variant, experiment: Any) -> Slice:
    """The slice as this side's processes play it.

    Raises:
      UserError: they cannot share its chips; the state that they are to start from is not there.
    """
    from core import slices

    if variant.checkpoint:
        _require_checkpoint(*variant.checkpoint)
    return slices.get(experiment.slice).shared_by(variant.hosts)


def _require_checkpoint(run_dir: str, step: int) -> None:
    from core.checkpoints import steps as saved_steps

    folder = paths.resolve(run_dir) / "checkpoints"
    if step not in (there := saved_steps.complete(folder)):
        raise UserError(
            f"checkpoint={run_dir}@{step}: no complete checkpoint of step {step} in {folder}; there are "
            f"{', '.join(map(str, there)) or 'none'}"
        )


def _run_side(side: str, slice_: Slice, command: Sequence[str], *, into: Path) -> int:
    """Plays the hosts of one side; 0, or the code that a signal gives.

    Raises:
      UserError: it could not be run.
    """
    from launch.hosts import simulate

    print(f"{side}: {units.counted(slice_.hosts, 'process plays', 'processes play')} {slice_.name}", flush=True)
    code = simulate.run(slice_, command=command, log_directory=into / f"logs_{side}")
    if code and code < 128:
        raise UserError(f"{side} could not be run (exit code {code}); what its host said is above")
    return code


def _require_memory(variant: Variant, experiment: Any, *, steps: int, run_dir: str) -> None:
    """Refuses sizes whose every step this machine could not keep."""
    from launch import host_memory
    from launch.check import preflight

    checked = preflight.check(
        variant.config, bindings=variant.bindings, slice_name=experiment.slice, run_dir=run_dir, smoked=False
    )
    if not checked.ok:
        raise UserError("\n".join(f"{f.name}: {f.detail}" for f in checked.findings if not f.ok))
    host_memory.require_simulated(checked.training_bytes * (steps + 2), slice_name=experiment.slice)


def _record(args: argparse.Namespace) -> int:
    """One host's process of one side."""
    from core import slices
    from launch.hosts import cluster
    from launch.runs import prepared_run, smoke
    from launch.verify import bisect

    variants = _variants(args)
    experiments = [_experiment(variant, args) for variant in variants]
    mine = "AB".index(args.record)
    experiment, other = experiments[mine], experiments[1 - mine]
    if not args.full:
        experiment = smoke.shrink(experiment, beside=[other])
    if not args.own_dtype:
        experiment = _in_float32(experiment)
    host = cluster.join(slices.get(experiment.slice), limits=experiment.limits)
    run = prepared_run.prepare_run(
        experiment,
        config_text=" ".join(sys.argv),
        revision="",
        run_dir=f"{args.into}/run",
        last_step=args.steps,
        host=host,
    )
    theirs = dict(np.load(f"{args.into}/A.npz")) if args.record == "B" else None
    recording = bisect.run(run, steps=args.steps, checkpoint=variants[mine].checkpoint, data_of=theirs)
    if host.is_zero:
        np.savez(f"{args.into}/{args.record}.npz", **recording)
    return 0


def _in_float32(experiment: Any) -> Any:
    from core.types import ChoosesDtype, can

    model = experiment.model
    if not (dataclasses.is_dataclass(model) and can(model, ChoosesDtype)):
        return experiment
    return dataclasses.replace(experiment, model=dataclasses.replace(model, dtype="float32"))


def _compare(args: argparse.Namespace, experiments: list[Any], folder: Path) -> int:
    from core.types import ChoosesDtype, can
    from launch.verify import bisect

    ours, theirs = (dict(np.load(folder / f"{side}.npz")) for side in "AB")
    dtypes = [str(e.model.dtype) if can(e.model, ChoosesDtype) else "float32" for e in experiments]
    tolerance = bisect.BFLOAT16 if args.own_dtype and "bfloat16" in dtypes else bisect.TOLERANCE
    if args.tolerance is not None:
        tolerance = dict.fromkeys(tolerance, (args.tolerance, args.tolerance))
    verdict = bisect.judge(ours, theirs, tolerance=tolerance)
    console = terminal.console(120)
    _say(console, verdict, steps=args.steps)
    for note in _notes(bisect.given(ours, theirs)):
        console.print(f"note: {note}", markup=False)
    if not args.own_dtype and set(dtypes) != {"float32"}:
        console.print(f"note: computed in float32, not in {' and '.join(sorted(set(dtypes)))} (--own-dtype)")
    return 0 if verdict.first is None else 1


def _say(console: Console, verdict: Any, *, steps: int) -> None:
    row = verdict.first or verdict.largest
    size = row.remark or f"{row.ulp:.3g} ulp apart ({row.absolute:.2g})"
    allowed = f"tolerance {verdict.allowed(row):g} ulp"
    if verdict.first is None:
        console.print(
            f"equal through step {steps}: the largest difference is {row}: {size}; {allowed}",
            markup=False,
            soft_wrap=True,
        )
    else:
        console.print(f"different: {row}: {size}; {allowed}", markup=False, soft_wrap=True)
    console.print(_table(verdict))


def _table(verdict: Any) -> Table:
    """Neighbours of the first difference, each group by its worst tensor; of equal runs, the worst of each phase."""
    table = Table(box=None)
    for heading in ("step", "phase", "place", "tensor", "ulp", "absolute", ""):
        table.add_column(heading, justify="right" if heading in ("step", "ulp", "absolute") else "left")
    for row in _shown(verdict):
        mark = "<- first" if row is verdict.first else "differs" if verdict.differs(row) else "agrees"
        cells = (str(row.step), row.phase, row.place, row.tensor, f"{row.ulp:.3g}", f"{row.absolute:.2g}", mark)
        table.add_row(*cells)
    return table


def _shown(verdict: Any) -> list[Any]:
    worst: dict[Any, Any] = {}
    for row in verdict.rows:
        group = row.group if verdict.first else (row.step, row.phase)
        worst[group] = max(worst.get(group, row), row, key=lambda r: r.ulp)
    if verdict.first is None:
        return list(worst.values())
    groups = list(worst)
    at = groups.index(verdict.first.group)
    inside = sorted((r for r in verdict.rows if r.group == verdict.first.group), key=lambda r: -r.ulp)
    before = [worst[g] for g in groups[max(at - SHOWN_BEFORE, 0) : at]]
    agreeing = [r for r in inside[SHOWN_AT:] if not verdict.differs(r)][:1]
    return [*before, *inside[:SHOWN_AT], *agreeing, *(worst[g] for g in groups[at + 1 : at + 1 + SHOWN_AFTER])]


def _notes(given: dict[str, list[Any]]) -> list[str]:
    notes = []
    if given["start"]:
        names = ", ".join(f"{row.place} {row.tensor}" for row in given["start"][:3])
        notes.append(f"the runs start from different states: {len(given['start'])} tensors, {names} …")
    if given["data"]:
        row = given["data"][0]
        notes.append(f"B reads other data from step {row.step} on ({row.tensor}); both ran on what A reads")
    return notes
