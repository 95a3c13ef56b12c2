"""`launch/run agreement`: measures how strategies change the results of training, on this machine's CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from core import slices
from core.errors import UserError
from launch import configuration, terminal
from launch.cli import flags
from launch.verify import agreement
from launch.verify.agreement import Row, Subject
from parallel.agreement import EXAMPLES, Example

HELP = "measure how far every strategy's numbers are from one device's"
EXAMPLE = """launch/run agreement
  launch/run agreement --only fsdp zero1 --steps 20
  launch/run agreement --processes 2 4
  launch/run agreement --model trm
  launch/run agreement --experiment mine.gin --slice v4-8 --gin "STRATEGY = @mine.rules()"
  launch/run agreement --experiment mine.gin --only fsdp tensor"""

PARTS = ("gradients", "losses", "params", "opt_state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "--steps", default=3, help="steps to train (default: 3); tolerances were measured through 20")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=EXAMPLES, help="some of the shipped strategies")
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--model", choices=agreement.MODELS, help="default: transformer")
    subject.add_argument(
        "--experiment",
        metavar="EXPERIMENT.gin",
        help="compare this experiment: its model, batches of its task, and its strategy unless --only names others",
    )
    flags.add(parser, "--gin", "--slice")
    parser.add_argument("--float32-only", action="store_true", help="leave the bfloat16 column out")
    parser.add_argument(
        "--processes",
        type=flags.at_least(1),
        nargs="+",
        default=[],
        metavar="N",
        help="also with the chips of each slice shared among N processes, a column for each N",
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # as one of those processes
    parser.add_argument("--record", nargs="+", metavar="NAME", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Prints one row per strategy. Returns 1 if one exceeds its tolerance, or if a requested one refuses the model."""
    if not args.experiment and (args.gin or args.slice):
        raise UserError("--gin and --slice change an experiment, and none is given: add --experiment EXPERIMENT.gin")
    if args.only and args.slice:
        raise UserError(f"--slice {args.slice} is for the experiment's own strategy; those of --only have their slices")
    examples = {name: EXAMPLES[name] for name in args.only or EXAMPLES}
    _provide_devices(examples.values())
    experiment, subject = None, Subject(agreement.MODELS[args.model or "transformer"])
    if args.experiment:
        experiment = configuration.load(args.experiment, bindings=args.gin, slice_name=args.slice).build()
        if not args.only:
            examples = {experiment.strategy.name: Example(experiment.slice, experiment.strategy)}
            _provide_devices(examples.values())
        experiment = agreement.sized(experiment, examples)
        options = {"accum_steps": experiment.accum_steps, "gather_once": experiment.gather_once}
        axes = {name: field.axes for name, field in experiment.task.spec(experiment.batch_size).items()}
        frozen = {"frozen": experiment.frozen, "frozen_dtype": experiment.frozen_dtype}
        subject = Subject(experiment.model, axes, experiment.seed, options, frozen)
    if args.into:
        agreement.record(subject, {n: examples[n] for n in args.record}, steps=args.steps, into=args.into)
        return 0
    for processes in args.processes:  # errors before anything runs
        for example in examples.values():
            slices.get(example.slice).shared_by(processes)
    if experiment:
        data = agreement.own_batches(experiment, steps=args.steps)
    else:
        data = list(agreement.batches_for(subject.model, steps=args.steps, rows=agreement.rows_for(examples)))
    rows = agreement.measure(subject, examples, data, bfloat16=not args.float32_only)
    command = [sys.executable, "-m", "launch", "agreement", *(["--only", *args.only] if args.only else [])]
    command += flags.passed_on(args, "--steps", "--model", "--experiment", "--slice", "--gin")
    for processes in args.processes:
        held = {row.name: examples[row.name] for row in rows if not row.refused}
        found = agreement.measure_played(subject, held, data, processes=processes, command=command)
        rows = [row if row.refused else row._replace(played={**row.played, processes: found[row.name]}) for row in rows]
    return _show(rows, args)


def _provide_devices(examples: Iterable[Example]) -> None:
    """Makes enough CPU devices for the largest slice.

    Raises:
      UserError: a module of the experiment has already used a device, which fixes their number.
    """
    needed = max(slices.get(example.slice).chips for example in examples)
    try:
        if jax.config.jax_num_cpu_devices < needed:
            jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError as error:
        raise UserError(
            f"{needed} devices are needed, and a module of the experiment used a device when it was imported (an "
            f"array, jax.random.key …), which fixes their number: set JAX_NUM_CPU_DEVICES={needed}"
        ) from error


def _show(rows: Sequence[Row], args: argparse.Namespace) -> int:
    headings = ["strategy", "slice", *PARTS, *(f"params, {n} processes" for n in args.processes)]
    headings += [] if args.float32_only else ["bfloat16 losses"]
    title = f"largest difference from one device after {args.steps} steps, absolute (ulp of the leaf)"
    console = terminal.console(170, markup=False, soft_wrap=True)
    cells = [_cells(row, args) for row in rows if not row.refused]
    console.print(terminal.markdown(headings, cells, text=("strategy", "slice"), title=title))
    refused = [row for row in rows if row.refused]
    for row in refused:
        console.print(f"{row.name} on {row.slice} is refused: {row.refused}")
    beyond = [sentence for row in rows for sentence in row.beyond]
    for sentence in beyond:
        console.print(f"differs: {sentence}")
    return 1 if beyond or (refused and (args.only or args.experiment)) else 0


def _cells(row: Row, args: argparse.Namespace) -> list[str]:
    found = [*(row.float32[part] for part in PARTS), *(apart["params"] for apart in row.played.values())]
    cells = [row.name, row.slice, *(f"{difference.absolute:.1e} ({difference.ulp:.0f})" for difference in found)]
    narrow = f"{row.bfloat16['losses'].absolute:.1e}" if row.bfloat16 else "–"
    return cells if args.float32_only else [*cells, narrow]
