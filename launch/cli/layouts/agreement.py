"""`launch/run agreement`: measures that strategies change no number, on this machine's CPU."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from core import slices
from core.errors import UserError
from launch import terminal
from launch.cli import flags

HELP = "measure how far every strategy's numbers are from one device's"
EXAMPLE = """launch/run agreement
  launch/run agreement --only fsdp zero1 --steps 20
  launch/run agreement --processes 2 4
  launch/run agreement --model trm
  launch/run agreement --model mine:build --strategy mine:tensor_only@v4-8
  launch/run agreement --experiment mine.gin --slice v4-8 --gin "STRATEGY = @strategies.fsdp()"
  launch/run agreement --experiment mine.gin --only fsdp tensor"""

SHIPPED_CHIPS = 16  # of the largest slice of `parallel.agreement.EXAMPLES`
PARTS = ("gradients", "losses", "params", "opt_state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is compared."""
    flags.add(parser, "--steps", default=3, help="steps to train (default: 3); tolerances were measured through 20")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the shipped strategies")
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--model",
        metavar="NAME",
        help="transformer (default) or trm, or MODULE:FUNCTION, a function of no arguments that returns your model",
    )
    subject.add_argument(
        "--experiment",
        metavar="EXPERIMENT.gin",
        help="compare this experiment: its model, batches of its task, and its strategy unless you name others",
    )
    flags.add(parser, "--gin", "--slice")
    parser.add_argument(
        "--strategy", metavar="MODULE:FUNCTION@SLICE", action="append", default=[], help="one of yours; repeatable"
    )
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
    """Prints one row per strategy: 0, or 1 where one is beyond its tolerance or, asked for, cannot hold the model."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.into is None:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(_devices(args))
    sys.path.append(str(Path.cwd()))
    from launch.verify import agreement

    _check_flags(args)
    experiment = _experiment(args)
    examples = _examples(args, agreement, experiment)
    if experiment:
        experiment = agreement.sized(experiment, examples)
    subject = _subject(args, agreement, experiment)
    if args.into:
        agreement.record(subject, {n: examples[n] for n in args.record}, steps=args.steps, into=args.into)
        return 0
    _check(args, examples)
    if experiment:
        _require_devices(examples)
        data = agreement.own_batches(experiment, steps=args.steps)
    else:
        data = list(agreement.batches_for(subject.model, steps=args.steps, rows=agreement.rows_for(examples)))
    rows = agreement.measure(subject, examples, data, bfloat16=not args.float32_only)
    for processes in args.processes:
        command = [sys.executable, "-m", "launch", "agreement", *_passed_on(args)]
        held = {row.name: examples[row.name] for row in rows if not row.refused}
        found = agreement.measure_played(subject, held, data, processes=processes, command=command)
        rows = [row if row.refused else row._replace(played={**row.played, processes: found[row.name]}) for row in rows]
    return _say(rows, args)


def _say(rows: list[Any], args: argparse.Namespace) -> int:
    console = terminal.console(170, markup=False, soft_wrap=True)
    console.print(_table([row for row in rows if not row.refused], args))
    refused = [row for row in rows if row.refused]
    for row in refused:
        console.print(f"{row.name} on {row.slice} is refused: {row.refused}")
    beyond = [sentence for row in rows for sentence in row.beyond]
    for sentence in beyond:
        console.print(f"differs: {sentence}")
    return 1 if beyond or (refused and (args.only or args.strategy or args.experiment)) else 0


def _devices(args: argparse.Namespace) -> int:
    """CPU devices for the largest slice there is; needed before jax is imported, so read from the command line."""
    named = [*(_split(text)[1] for text in args.strategy), *([args.slice] if args.slice else [])]
    return max([SHIPPED_CHIPS, *(slices.get(name).chips for name in named)])


def _require_devices(examples: dict[str, Any]) -> None:
    """Makes enough CPU devices where the experiment's file names a larger slice than the command line does.

    Raises:
      UserError: a module of the experiment has used a device already, which fixes their number.
    """
    import jax

    largest = max((slices.get(example.slice) for example in examples.values()), key=lambda s: s.chips)
    if jax.config.jax_num_cpu_devices >= largest.chips:
        return
    try:
        jax.config.update("jax_num_cpu_devices", largest.chips)
    except RuntimeError as error:
        raise UserError(
            f"{largest.name} needs {largest.chips} devices, and a module of the experiment used a device when it was "
            f"imported (an array, jax.random.key …), which fixes their number: add --slice {largest.name}"
        ) from error


def _check_flags(args: argparse.Namespace) -> None:
    if not args.experiment and (args.gin or args.slice):
        flag = "--gin" if args.gin else "--slice"
        raise UserError(f"{flag} changes an experiment, and none is given: add --experiment EXPERIMENT.gin")
    if args.slice and (args.only or args.strategy):
        raise UserError(
            f"--slice {args.slice} is that of the experiment's own strategy, which is not compared when --only or "
            "--strategy name others, with slices of their own: leave out --slice, or --only and --strategy"
        )


def _check(args: argparse.Namespace, examples: dict[str, Any]) -> None:

    for processes in args.processes:
        for slice_name in dict.fromkeys(e.slice for e in examples.values()):
            slices.get(slice_name).shared_by(processes)


def _passed_on(args: argparse.Namespace) -> list[str]:
    """Arguments for the other processes, all but the names of the examples."""
    names = ("--steps", "--model", "--experiment", "--slice", "--gin", "--strategy")
    return [*flags.passed_on(args, *names), *(["--only", *args.only] if args.only else [])]


def _experiment(args: argparse.Namespace) -> Any:
    """The experiment of the file and the bindings; None without --experiment."""
    from launch import configuration

    if not args.experiment:
        return None
    return configuration.load(args.experiment, bindings=args.gin, slice_name=args.slice).build()


def _subject(args: argparse.Namespace, agreement: Any, experiment: Any) -> Any:
    if not experiment:
        return agreement.Subject(_model(args.model or "transformer", agreement))
    options = {"accum_steps": experiment.accum_steps, "gather_once": experiment.gather_once}
    axes = {name: field.axes for name, field in experiment.task.spec(experiment.batch_size).items()}
    return agreement.Subject(experiment.model, axes, experiment.seed, options)


def _examples(args: argparse.Namespace, agreement: Any, experiment: Any) -> dict[str, Any]:
    """The examples to compare, by name: those of --only and of --strategy.

    Without either, the experiment's own strategy; without an experiment, all of `agreement.EXAMPLES`.
    """
    known, mine = dict(agreement.EXAMPLES), {}
    for text in args.strategy:
        name, example = _own(text, agreement)
        if name in known:
            raise UserError(f"--strategy {text}: there is already a strategy named {name!r}; give yours another name")
        known[name] = mine[name] = example
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise UserError(f"no strategy {', '.join(unknown)}; expected some of {', '.join(known)}")
    if chosen := {**({k: known[k] for k in args.only} if args.only else {}), **mine}:
        return chosen
    return {experiment.strategy.name: agreement.Example(experiment.slice, experiment.strategy)} if experiment else known


def _own(text: str, agreement: Any) -> tuple[str, Any]:
    from parallel.strategy import Strategy

    function, slice_name = _split(text)
    made = _made(function, flag="--strategy")
    if not isinstance(made, Strategy):
        raise UserError(
            f"--strategy {text}: it returned a {type(made).__name__}; expected a parallel.strategies.Strategy"
        )
    return made.name, agreement.Example(slice_name, made)


def _split(text: str) -> tuple[str, str]:
    function, at, slice_name = text.rpartition("@")
    if not at:
        raise UserError(f"--strategy {text!r}: expected MODULE:FUNCTION@SLICE, such as mine:tensor_only@v4-8")
    return function, slice_name


def _model(name: str, agreement: Any) -> Any:
    from core.types import HasVocabulary, Model, missing

    if name in agreement.MODELS:
        return agreement.MODELS[name]
    model = _made(name, flag="--model")
    if lacks := [*missing(model, Model), *missing(model, HasVocabulary)]:
        raise UserError(
            f"--model {name}: the {type(model).__name__} it returned has no {', '.join(lacks)} (README, Your own model)"
        )
    return model


def _made(name: str, *, flag: str) -> Any:
    """Returns the result of the user's function MODULE:FUNCTION, which must need no arguments."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(f"{flag} {name!r}: expected MODULE:FUNCTION, such as mine:build")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another
        raise UserError(f"{flag} {name}: no module {error.name}, here or on PYTHONPATH") from error
    except AttributeError as error:
        raise UserError(f"{flag} {name}: {error}") from error
    if not callable(function):
        raise UserError(f"{flag} {name}: expected a function, found a {type(function).__name__}")
    needs = [p.name for p in inspect.signature(function).parameters.values() if _is_required(p)]
    if needs:
        raise UserError(
            f"{flag} {name}: it needs {', '.join(needs)}; give a function of no arguments that calls it with them"
        )
    return function()


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variadic


def _table(rows: Any, args: argparse.Namespace) -> Table:
    title = f"largest difference from one device after {args.steps} steps, absolute (ulp of the leaf)"
    table = Table(title=title, box=box.MARKDOWN)
    headings = ["strategy", "slice", *PARTS, *(f"params, {n} processes" for n in args.processes)]
    for heading in (*headings, *([] if args.float32_only else ["bfloat16 losses"])):
        table.add_column(heading)
    for row in rows:
        cells = [_cell(row.float32[part]) for part in PARTS] + [_cell(apart["params"]) for apart in row.played.values()]
        narrow = f"{row.bfloat16['losses'].absolute:.1e}" if row.bfloat16 else "–"
        table.add_row(row.name, row.slice, *cells, *([] if args.float32_only else [narrow]))
    return table


def _cell(apart: Any) -> str:
    return f"{apart.absolute:.1e} ({apart.ulp:.0f})"
