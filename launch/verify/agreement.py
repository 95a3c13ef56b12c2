"""`launch/run agreement`: measures, on this machine's CPU, how strategies change the results of training."""

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from core import slices
from core.batches import batch_size
from core.errors import UserError
from core.hosts import activity
from launch import environment, flags, program_identity
from launch.config import loader
from launch.experiment import Experiment
from launch.hosts import cluster, simulate
from launch.runs import smoke
from launch.verify import agreement_report, own_model
from models.agreement_subjects import MODELS, ROWS, batches_for, optimizer_name, optimizer_of
from parallel import mesh
from parallel.verify import agreement, recording
from parallel.verify.agreement import EXAMPLES, ONE_DEVICE, Apart, Batch, Example, Subject

COMMAND = ("layouts", "agreement")
HELP = "measure how much the results of each strategy differ from those of one device"
EXAMPLE = """launch/run agreement
  launch/run agreement --only fsdp zero1 --steps 20
  launch/run agreement --processes 2 4
  launch/run agreement --model trm
  launch/run agreement --model mine:build --json agreement.json
  launch/run agreement --experiment mine.gin --slice v4-8 --gin "STRATEGY = @mine.rules()"
  launch/run agreement --experiment mine.gin --only fsdp tensor"""


def sized(experiment: Experiment, examples: Mapping[str, Example]) -> Experiment:
    """Reduces an experiment to small sizes that the examples can shard.

    A model or task that has no smaller sizes stays.
    """
    first, *others = [dataclasses.replace(experiment, slice=e.slice, strategy=e.strategy) for e in examples.values()]
    return smoke.shrink(first, beside=others, partly=True)


def own_batches(experiment: Experiment, *, steps: int) -> list[Batch]:
    """Returns the first training batches of the experiment's own task. Raises UserError if its data has problems."""
    one = ONE_DEVICE
    alone = dataclasses.replace(experiment, slice=one.slice, strategy=one.strategy, accum_steps=1, gather_once=False)
    program = alone.bind(jax.devices())
    with tempfile.TemporaryDirectory(prefix="renga-agreement-") as folder:
        if not (problems := alone.data_problems(prepared=False)):
            alone.task.prepare(folder, is_host_zero=True)
            problems = alone.data_problems(prepared=True)
        if problems:
            raise UserError("\n".join(problems))
        return agreement.batches_of(alone.task, program, steps=steps)


def rows_for(examples: Mapping[str, Example]) -> int:
    """Returns the least common multiple of ROWS and the numbers of devices of the examples' slices."""
    return math.lcm(ROWS, *(slices.get(example.slice).devices for example in examples.values()))


def measure_played(
    subject: Subject, examples: Mapping[str, Example], data: Sequence[Batch], *, processes: int, command: Sequence[str]
) -> dict[str, Apart]:
    """Compares each example, with its devices divided among processes, with one device in float32.

    Args:
      subject: the model and its training options.
      examples: strategies with their slices, by name.
      data: global batches, one for each step.
      processes: number of processes per slice.
      command: the command of each process, without `--into` and `--record`.

    Raises:
      UserError: the processes cannot be run.
    """
    want = agreement.run(subject.alone(data[0], dtype="float32"), data)
    found: dict[str, Apart] = {}
    with tempfile.TemporaryDirectory(prefix="renga-agreement-") as name:
        folder = Path(name)
        for step, batch in enumerate(data):
            np.savez(folder / f"batch_{step}.npz", allow_pickle=False, **batch)
        for slice_name in dict.fromkeys(example.slice for example in examples.values()):
            names = [name for name, example in examples.items() if example.slice == slice_name]
            argv = [*command, "--into", str(folder), "--record", *names]
            played = slices.get(slice_name).shared_by(processes)
            if code := simulate.run(played, command=argv, log_directory=folder / f"logs_{slice_name}"):
                if code >= 128:  # a signal: this process ends with the same code
                    raise SystemExit(code)
                raise UserError(f"{processes} processes of {slice_name} could not be run (exit code {code})")
        for name in examples:
            with np.load(folder / f"{name}.npz") as leaves:
                played = jax.tree.unflatten(jax.tree.structure(want), [leaves[key] for key in leaves.files])
            found[name] = agreement.compare(played, want)
    return found


def record(subject: Subject, examples: Mapping[str, Example], *, steps: int, into: Path) -> None:
    """Trains on the batches in `into`, as one process of a simulated slice; saves the results there.

    Args:
      subject: the model and its training options.
      examples: strategies to train under, by name; all have the same slice.
      steps: number of steps.
      into: the folder of the batches and the results.
    """
    data = [dict(np.load(into / f"batch_{step}.npz")) for step in range(steps)]
    (slice_name,) = {example.slice for example in examples.values()}
    host = cluster.join(slices.get(slice_name))
    for name, example in examples.items():
        activity.at(name)
        program = subject.under(example, data[0], dtype="float32")
        mine = list(program.partitioner.data_layout(batch_size(data[0])).rows)
        trajectory = agreement.run(program, [{k: a[mine] for k, a in batch.items()} for batch in data])
        if host.is_zero:
            np.savez(into / f"{name}.npz", *map(recording.storable, jax.tree.leaves(trajectory)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `agreement`."""
    flags.add(parser, "--steps", default=3, help="steps to train (default: 3); the tolerances were measured through 20")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=EXAMPLES, help="measure only these strategies")
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--model",
        type=_model,
        metavar="MODEL",
        help=f"{' or '.join(MODELS)} (default: transformer), or your own: MODULE:FUNCTION returns a model and its task",
    )
    subject.add_argument(
        "--experiment",
        metavar="EXPERIMENT.gin",
        help="compare this experiment: its model, batches of its task, and its strategy unless --only names others",
    )
    flags.add(parser, "--gin", "--slice", "--json", "--overwrite")
    parser.add_argument(
        "--own-optimizer",
        action="store_true",
        help="train with the experiment's optimizer instead of AdamW with epsilon 1e-4, for which tolerances were "
        "measured: with a smaller epsilon, rounding changes updates whose gradient is nearly zero",
    )
    parser.add_argument("--float32-only", action="store_true", help="omit the bfloat16 column")
    parser.add_argument(
        "--processes",
        type=flags.at_least(1),
        nargs="+",
        default=[],
        metavar="N",
        help="also with the chips of each slice shared among N processes, a column for each N",
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # in one of the processes of `measure_played`
    parser.add_argument("--record", nargs="+", metavar="NAME", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Prints one row per strategy.

    Returns 1 if one differs from one device, one that was asked for does not support the model, or none does; otherwise
    0.

    Raises UserError if options contradict each other.
    """
    if not args.experiment and (args.gin or args.slice or args.own_optimizer):
        raise UserError(
            "--gin, --slice and --own-optimizer are of an experiment, and none is given: add --experiment "
            "EXPERIMENT.gin"
        )
    if args.only and args.slice:
        raise UserError(f"--slice {args.slice} is not valid with --only, whose strategies have slices of their own")
    examples: Mapping[str, Example] = {name: EXAMPLES[name] for name in args.only or EXAMPLES}
    mesh.provide_cpu_devices(max(slices.get(example.slice).devices for example in examples.values()))
    subject, experiment, examples, optimizer, modules = _compared(args, examples)
    if args.into:
        record(subject, {n: examples[n] for n in args.record}, steps=args.steps, into=args.into)
        return 0
    for processes in args.processes:  # errors before anything runs
        for example in examples.values():
            slices.get(example.slice).shared_by(processes)
    if experiment:
        data, source = own_batches(experiment, steps=args.steps), experiment.task.describe()
    else:
        data, source = list(batches_for(subject.model, steps=args.steps, rows=rows_for(examples))), "random tokens"
    shared = {"processes": args.processes, "modules": modules}
    what = agreement_report.about(subject, data, source=source, optimizer=optimizer, **shared)
    rows = agreement.measure(subject, examples, data, bfloat16=not args.float32_only)
    command = [*environment.COMMAND, "agreement", *(["--only", *args.only] if args.only else [])]
    command += flags.passed_on(args, "--steps", "--model", "--experiment", "--slice", "--gin", "--own-optimizer")
    for processes in args.processes:
        held = {row.name: examples[row.name] for row in rows if not row.refused}
        found = measure_played(subject, held, data, processes=processes, command=command)
        rows = [row if row.refused else row._replace(played={**row.played, processes: found[row.name]}) for row in rows]
    agreement_report.show(rows, what, processes=args.processes, bfloat16=not args.float32_only)
    if args.json:
        agreement_report.write(args.json, rows, what)
    is_asked = args.only or args.experiment
    return 1 if any(row.beyond or (row.refused and is_asked) for row in rows) or all(row.refused for row in rows) else 0


class _Compared(NamedTuple):
    """The model and the examples of one comparison; `experiment` is None if the batches are random."""

    subject: Subject
    experiment: Experiment | None
    examples: Mapping[str, Example]
    optimizer: str
    modules: Mapping[str, str]


def _compared(args: argparse.Namespace, examples: Mapping[str, Example]) -> _Compared:
    if args.experiment:
        config = loader.load(args.experiment, bindings=args.gin, slice_name=args.slice)
        experiment = config.build()
        modules = program_identity.own_modules(experiment, config)
        if not args.only:
            examples = {experiment.strategy.name: Example(experiment.slice, experiment.strategy)}
            mesh.provide_cpu_devices(max(slices.get(example.slice).devices for example in examples.values()))
        experiment = sized(experiment, examples)
    elif args.model and args.model not in MODELS:
        model, task = own_model.load(args.model)
        modules = own_model.modules(args.model, model, task)
        if task is None:
            return _Compared(Subject(model, optimizer_of(model)), None, examples, optimizer_name(model), modules)
        experiment = Experiment(
            slice=ONE_DEVICE.slice,
            strategy=ONE_DEVICE.strategy,
            model=model,
            task=task,
            optimizer=optimizer_of(model),
            batch_size=math.lcm(rows_for(examples), task.num_streams),
            total_steps=args.steps,
        )
    else:
        model = MODELS[args.model or "transformer"]
        return _Compared(Subject(model, optimizer_of(model)), None, examples, optimizer_name(model), {})
    options = {"accum_steps": experiment.accum_steps, "gather_once": experiment.gather_once}
    axes = {name: field.axes for name, field in experiment.task.spec(experiment.batch_size).items()}
    frozen = {"frozen": experiment.frozen, "frozen_dtype": experiment.frozen_dtype}
    optimizer, name = optimizer_of(experiment.model), optimizer_name(experiment.model)
    if args.own_optimizer:
        optimizer, name = experiment.optimizer, program_identity.optimizer_text(config)
    subject = Subject(experiment.model, optimizer, axes, experiment.seed, options, frozen)
    return _Compared(subject, experiment, examples, name, modules)


def _model(text: str) -> str:
    module, colon, function = text.partition(":")
    if text in MODELS or (module and colon and function.isidentifier()):
        return text
    raise argparse.ArgumentTypeError(f"{text}: expected {', '.join(MODELS)}, or MODULE:FUNCTION such as mine:build")
