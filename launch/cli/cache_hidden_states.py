"""Computes the hidden states of a frozen base model once, for runs that train adapters on it."""

import argparse
import time

import jax
import numpy as np

from core import units
from core.checkpoints import reading
from core.errors import UserError
from core.files import paths
from core.types import Params
from launch import environment, flags, loaded_model
from launch.config import loader
from launch.experiment import Experiment
from launch.loaded_model import LoadedModel
from launch.settings import Initialization
from models.ttt.adapter import AdaptedDecoder
from tasks.code import cached, chunks

COMMAND = ("runs", "cache-hidden-states")
HELP = "compute the hidden states of an adapter's frozen base once, for tasks of cached.cached_hidden"
EXAMPLE = """launch/run cache-hidden-states gin/ponder/quick.gin --out runs/ponder/hidden
  launch/run cache-hidden-states gin/ponder/smollm2_135m.gin --gin "FOLDER = 'smollm2'" --out runs/hidden"""
_SECONDS_BETWEEN_LINES = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT.gin", help="whose model is an AdaptedDecoder")
    parser.add_argument("--out", metavar="DIR", required=True, help="a local folder; complete splits in it are kept")
    parser.add_argument(
        "--rows", metavar="TRAIN,VALIDATION,TEST", default="", help="most rows of each split (default: all)"
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=flags.at_least(1), default=4, help="rows at a time (default: 4)"
    )
    flags.add(parser, "--gin")


def run(args: argparse.Namespace) -> int:
    """Writes the hidden states of the base model."""
    limits = _limits(args.rows)
    if paths.is_remote(args.out):
        raise UserError(f"--out {args.out}: expected a local folder, which training maps into memory")
    paths.check_writable(paths.resolve(args.out))
    loaded_model.choose_devices(None, is_simulated=False)
    experiment = loader.load(args.experiment, bindings=args.gin).build()
    model, task = _parts(experiment)
    base = loaded_model.load(experiment.initialization.init_from, dtype=model.base_dtype, averaged=False)
    params, checksum = _stored(base, model)
    task.prepare(environment.run_directory(args.experiment, experiment.slice), is_host_zero=True)
    _require_fitting_data(experiment, prepared=True)
    hidden = jax.jit(model.hidden)
    last, began = 0.0, time.monotonic()
    steps = cached.write(
        args.out,
        task,
        lambda batch: np.asarray(hidden(params, batch)),
        limits=limits,
        rows=args.batch_size,
        model={"base": base.where, "checksum": checksum, "chunk": model.chunk},
    )
    for split, done, total in steps:
        if (now := time.monotonic()) - last >= _SECONDS_BETWEEN_LINES or done == total:
            last = now
            print(f"{split}: {done:,} of {units.counted(total, 'row')}, {now - began:.0f} s", flush=True)
    print(f"{args.out} is complete: train on it with TASK = @cached.cached_hidden()")
    return 0


def _limits(text: str) -> dict[str, int]:
    parts = text.split(",") if text else [str(2**31)] * len(chunks.SPLITS)
    if len(parts) != len(chunks.SPLITS) or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"--rows {text}: expected three numbers above 0, of training, validation and test rows")
    return dict(zip(chunks.SPLITS, map(int, parts), strict=True))


def _stored(base: LoadedModel, model: AdaptedDecoder) -> tuple[Params, int]:
    params = jax.tree.map(lambda a: a.astype(model.base_dtype), base.params)
    specs = reading.by_name(base.program.param_specs)
    leaves = {name: leaf for name, leaf in reading.by_name(params).items() if specs[name].kind != "constant"}
    return params, reading.checksum(leaves)


def _parts(experiment: Experiment) -> tuple[AdaptedDecoder, chunks.ChunkTask]:
    model, task = experiment.model, experiment.task
    if not isinstance(model, AdaptedDecoder) or not isinstance(task, chunks.ChunkTask):
        raise UserError(
            f"launch/run cache-hidden-states: the model is {type(model).__name__} and the task {type(task).__name__}; "
            "expected an AdaptedDecoder and a task of chunks, such as @files.code_files()"
        )
    if not experiment.initialization.init_from:
        raise UserError("launch/run cache-hidden-states: INIT_FROM is not set: name the run or the folder of the base")
    if task.length % model.chunk:
        raise UserError(
            f"launch/run cache-hidden-states: AdaptedDecoder.chunk = {model.chunk} does not divide the {task.length} "
            "positions of a row: set LENGTH to a multiple of it"
        )
    defaults = Initialization()
    for name in ("init_patterns", "init_renames", "init_layers"):
        if (given := getattr(experiment.initialization, name)) != getattr(defaults, name):
            raise UserError(
                f"launch/run cache-hidden-states: {name.upper()} = {given!r}: the base is read as it is; leave it out"
            )
    _require_fitting_data(experiment, prepared=False)
    return model, task


def _require_fitting_data(experiment: Experiment, *, prepared: bool) -> None:
    if problems := experiment.data_problems(prepared=prepared):
        raise UserError("\n".join(problems))
