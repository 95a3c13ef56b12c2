"""`launch/run evaluate RUN --gates`: compares gates and controls on held-out chunks of a run that trains an adapter.

The adapter has fast weights, which learn while it reads. For each chunk a gate chooses SKIP (keep the fast weights) or
UPDATE (learn from the chunk). One pass computes the losses of both choices and the gates' signals; then each gate
decides about the same chunks. A control is another pass with the same parameters and one change: no learning, weights
reset at every mini-batch, weights read before they learn from the same token, or shuffled tokens.
"""

import argparse
import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from core import units
from core.errors import UserError
from core.files import paths
from core.training import frozen, scoring
from launch import loaded_model, terminal
from launch.experiments import saved_run
from launch.loaded_model import LoadedModel
from models.ttt import evaluation, gates
from models.ttt.adapter import HIDDEN, AdaptedDecoder
from models.ttt.evaluation import Chunks

EVALUATION = {"gates": ("budget", "controls", "against", "label")}
EXAMPLE = "launch/run evaluate runs/ponder/quick --gates skip,update,random,oracle,reconstruction --controls resets"
CONTROLS: Mapping[str, Mapping[str, Any]] = {  # changed settings of the layer, by control
    "no_learning": {"rate_scale": 0.0},
    "resets": {"resets": True},
    "offset": {"diagonal": -1},
}
SHUFFLED = "shuffled"
_NO_CHOICE = ("skip", "update")  # gates that decide alike about every chunk
_TIMED_BATCHES = 3
_USUAL_BUDGET = 2.0
_SECONDS_BETWEEN_LINES = 15.0
_COLUMNS = ("loss", "perplexity", "update_rate", "recovery", "agreement", "cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this evaluation."""
    own = parser.add_argument_group("gates of an adapter with test-time training")
    own.add_argument("--gates", metavar="GATE[,GATE]", help="such as skip,update,random,oracle,reconstruction")
    own.add_argument("--budget", metavar="B", type=float, help="mean cost, 1 to 3 (default: 2)")
    own.add_argument("--controls", metavar="NAME[,NAME]", help="some of no_learning, resets, offset, shuffled")
    own.add_argument("--against", metavar="FILE", help="chunks.csv of another run on the same rows, such as a control")
    own.add_argument("--label", metavar="NAME", help="added to the names of the files, such as the language")


def run(args: argparse.Namespace) -> int:
    """Evaluates gates, prints the table, and writes table and chunks to RUN/evaluation.

    Raises UserError if options are invalid, or the run or its data does not fit.
    """
    names = [name for name in args.gates.split(",") if name]
    if not names:
        raise UserError("--gates: expected names of gates, such as skip,update,random,oracle,reconstruction")
    budget = _USUAL_BUDGET if args.budget is None else args.budget
    chosen = {name: gates.named(name, budget=budget) for name in names}
    controls = [name for name in (args.controls or "").split(",") if name]
    if unknown := [name for name in controls if name not in (*CONTROLS, SHUFFLED)]:
        raise UserError(f"--controls {','.join(unknown)}: expected some of {', '.join((*CONTROLS, SHUFFLED))}")
    if args.all_steps or args.submission or args.simulate:
        raise UserError(
            "--all-steps, --submission and --simulate do not go with --gates, which runs in one process: leave them out"
        )
    against = _read_chunks(args.against) if args.against else None
    found = saved_run.read_step(args.run_dir, step=args.step, bindings=args.gin, slice_name=args.slice)
    experiment = found.experiment()
    loaded_model.choose_devices(experiment.slice, is_simulated=False)
    if not isinstance(experiment.model, AdaptedDecoder):
        raise UserError(
            f"--gates: the model of {args.run_dir} is {type(experiment.model).__name__}, which has no gate: expected a "
            "run of gin/ponder"
        )
    if experiment.model.carry != "none" and (others := [name for name in chosen if name not in _NO_CHOICE]):
        raise UserError(
            f"--gates {','.join(others)}: with CARRY = {experiment.model.carry!r}, the loss of a chunk depends on "
            "decisions about earlier ones, which this comparison does not follow; expected some of "
            f"{', '.join(_NO_CHOICE)}"
        )
    if SHUFFLED in controls and HIDDEN in experiment.task.spec(experiment.batch_size):
        raise UserError(
            "--controls shuffled: the hidden states of shuffled tokens were not computed before; leave it out, or give "
            "a run that reads tokens"
        )
    if problems := experiment.data_problems(prepared=False):
        raise UserError("\n".join(problems))
    name = args.run_dir if args.step is None else f"{args.run_dir}@{args.step}"
    loaded = loaded_model.load(name, slice_name=args.slice, bindings=args.gin)
    frozen.require_base(experiment.task, frozen.checksum(loaded.program, loaded.params))
    sizes: dict[str, Any] = {"batch_size": experiment.batch_size, "eval_batches": experiment.evaluation.eval_batches}
    asked = scoring.select(experiment.task, **sizes, rows=args.num_examples)
    asked.task.prepare(found.run_dir, is_host_zero=False)
    layout = loaded.program.partitioner.data_layout(experiment.batch_size)
    print(f"{loaded.where}, on {asked.describe()}", flush=True)
    batches = list(asked.open(layout))
    report = _Report(loaded, batches, chosen)
    for control in controls:
        report.add_control(control)
    if against is not None:
        report.compare(args.against, against)
    report.show()
    folder = paths.resolve(found.run_dir) / "evaluation"
    suffix = f"_{args.label}" if args.label else ""
    about = {"model": loaded.where, "evaluated_on": asked.describe(), "budget": budget}
    for file in report.write(folder, suffix, about):
        print(file)
    return 0


class _Report:
    def __init__(self, loaded: LoadedModel, batches: Sequence[Any], chosen: Mapping[str, Any]):
        assert isinstance(loaded.model, AdaptedDecoder)
        self._loaded, self._model, self._batches, self._gates = loaded, loaded.model, batches, chosen
        self.chunks = _evaluated(loaded, loaded.model, batches, "skip and update")
        self.decided = {name: evaluation.decide(gate, self.chunks) for name, gate in chosen.items()}
        self.rows = {name: self._row(decided.updates) for name, decided in self.decided.items()}
        self.losses: dict[str, np.ndarray] = {}  # UPDATE's losses under each control
        self.differences: dict[str, tuple[float, float, float]] = {}
        for name, row in self.rows.items():
            row["milliseconds"] = self._milliseconds(chosen[name])
            row["gflops"] = self._gflops(row["update_rate"], chosen[name])

    def _row(self, updates: np.ndarray) -> dict[str, float]:
        chunks = self.chunks
        row = evaluation.score(chunks, updates)
        ours = np.where(updates, chunks.loss_update, chunks.loss_skip)
        _, row["gain_low"], row["gain_high"] = evaluation.interval(chunks, ours, chunks.loss_skip)
        return row

    def add_control(self, name: str) -> None:
        model, batches = self._model, self._batches
        if name == SHUFFLED:
            draw = np.random.default_rng(0)
            batches = [_shuffled(batch, model.chunk, draw) for batch in batches]
        else:
            model = dataclasses.replace(model, layer=dataclasses.replace(model.layer, **CONTROLS[name]))
        found = _evaluated(self._loaded, model, batches, name)
        self.losses[name] = found.loss_update
        if name == SHUFFLED:
            self.differences["gain of update, tokens shuffled"] = evaluation.interval(
                found, found.loss_update, found.loss_skip
            )
        else:
            self.differences[f"update better than {name}"] = evaluation.interval(
                self.chunks, self.chunks.loss_update, found.loss_update
            )

    def compare(self, where: str, theirs: Mapping[tuple[int, int, int], tuple[float, float]]) -> None:
        places = list(zip(self.chunks.document.tolist(), self.chunks.place.tolist(), strict=True))
        counted: dict[tuple[int, int], int] = {}
        keys = []
        for place in places:
            counted[place] = counted.get(place, -1) + 1
            keys.append((*place, counted[place]))
        same = set(keys) == set(theirs) and all(
            tokens == theirs[key][0] for key, tokens in zip(keys, self.chunks.tokens.tolist(), strict=True)
        )
        if not same:
            raise UserError(f"--against {where}: its chunks are others; evaluate both runs on the same rows")
        losses = np.asarray([theirs[key][1] for key in keys])
        self.differences[f"update better than that of {where}"] = evaluation.interval(
            self.chunks, self.chunks.loss_update, losses
        )

    def _milliseconds(self, gate: Any) -> float:
        """Returns the milliseconds per chunk; NaN for gates that see all chunks before they decide."""
        if hasattr(gate, "decide_all"):
            return float("nan")
        model = dataclasses.replace(self._model, gate=gate)
        state, key = gate.init(), jax.random.key(0)
        with self._loaded.program.partitioner.tracing():
            step = jax.jit(model.decided)
            placed = self._loaded.program.put(self._batches[0])
            jax.block_until_ready(step(self._loaded.params, state, key, placed))  # the first call compiles
            times = []
            for batch in self._batches[:_TIMED_BATCHES]:
                placed = self._loaded.program.put(batch)
                began = time.perf_counter()
                jax.block_until_ready(step(self._loaded.params, state, key, placed))
                times.append(time.perf_counter() - began)
        rows, length = self._batches[0]["inputs"].shape
        return 1e3 * float(np.median(times)) / (rows * length // model.chunk)

    def _gflops(self, rate: float, gate: Any) -> float:
        model = self._model
        reads = getattr(gate, "reads", "")
        runs = 1.0 if reads == "reconstruction" or hasattr(gate, "decide_all") else rate
        head = 2.0 * model.base.embed_dim * model.stored_vocab_size * (rate if reads == "loss" else 0.0)
        return 1e-9 * model.chunk * (model.base_flops() + runs * model.layer_flops() + head)

    def show(self) -> None:
        chunks = self.chunks
        count = units.counted(len(np.unique(chunks.document)), "document")
        print(f"\n{units.counted(len(chunks.tokens), 'chunk')} of {count}, {int(chunks.tokens.sum()):,} tokens")
        table = Table("gate", box=box.SIMPLE)
        for heading in (*_COLUMNS, "gain [95 %]", "GFLOPs/chunk", "ms/chunk"):
            table.add_column(heading.replace("_", " "), justify="right", no_wrap=True)
        for name, row in self.rows.items():
            gain = f"{row['gain']:+.4f} [{row['gain_low']:+.4f}, {row['gain_high']:+.4f}]"
            others = (f"{row['gflops']:.2f}", _figure(row["milliseconds"], 1))
            table.add_row(name, *(_figure(row[column], 4) for column in _COLUMNS), gain, *others)
        terminal.console(160).print(table)
        for name, (mean, low, high) in self.differences.items():
            print(f"{name}: {mean:+.4f} nats a token, 95 % [{low:+.4f}, {high:+.4f}]")
        for name, value in self._correlations().items():
            print(f"correlation of {name} and advantage: {value:+.3f}")

    def _correlations(self) -> dict[str, float]:
        signals = self.chunks.signals
        named = {"loss of the base": signals.loss, "reconstruction loss": signals.step_0}
        named["its improvement"] = np.asarray(signals.step_0) - np.asarray(signals.step_1)
        found = {n: evaluation.correlation(np.asarray(v), self.chunks.advantage) for n, v in named.items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}  # NaN: a constant

    def write(self, folder: Any, suffix: str, about: Mapping[str, Any]) -> list[str]:
        rows = {
            name: {column: value if math.isfinite(value) else None for column, value in row.items()}
            for name, row in self.rows.items()
        }
        differences = {
            name: [value if math.isfinite(value) else None for value in found]
            for name, found in self.differences.items()
        }
        result = {**about, "gates": rows, "differences": differences, "correlations": self._correlations()}
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        files = {f"gates{suffix}.json": text, f"chunks{suffix}.csv": self._csv()}
        for name, content in files.items():
            paths.write_text_atomically(folder / name, content)
        return [str(folder / name) for name in files]

    def _csv(self) -> str:
        chunks, out = self.chunks, io.StringIO()
        columns: dict[str, np.ndarray] = {**chunks._asdict(), "advantage": chunks.advantage}
        columns |= {f"loss_{name}": values for name, values in self.losses.items()}
        columns |= {name: decided.updates.astype(int) for name, decided in self.decided.items()}
        columns |= {f"threshold_{n}": d.thresholds for n, d in self.decided.items() if d.thresholds is not None}
        writer = csv.writer(out)
        writer.writerow(columns)
        writer.writerows(zip(*(np.asarray(values).tolist() for values in columns.values()), strict=True))
        return out.getvalue()


def _figure(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _evaluated(loaded: LoadedModel, model: AdaptedDecoder, batches: Sequence[Any], what: str) -> Chunks:
    answers, last = [], time.monotonic()
    with loaded.program.partitioner.tracing():
        step: Callable = jax.jit(lambda params, batch: dict(model.evaluate(params, jax.random.key(0), batch).extras))
        for number, batch in enumerate(batches, 1):
            answers.append(jax.device_get(step(loaded.params, loaded.program.put(batch))))
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"{what}: {number} of {units.counted(len(batches), 'batch', 'batches')}", flush=True)
    return evaluation.collected(answers)


def _shuffled(batch: Mapping[str, np.ndarray], chunk: int, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Shuffles the target tokens with weights above 0 within each chunk; inputs follow the shuffled targets."""
    targets, inputs = batch["targets"].copy(), batch["inputs"].copy()
    for row, weights in enumerate(batch["weights"]):
        for begin in range(0, targets.shape[1], chunk):
            places = begin + np.flatnonzero(weights[begin : begin + chunk])
            targets[row, places] = targets[row, draw.permutation(places)]
            inputs[row, places[1:]] = targets[row, places[:-1]]
    return {**batch, "targets": targets, "inputs": inputs}


def _read_chunks(file: str) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Returns (tokens, loss of UPDATE) by (document, place, occurrence) from another evaluation's file."""
    found: dict[tuple[int, int, int], tuple[float, float]] = {}
    counted: dict[tuple[int, int], int] = {}
    try:
        for row in csv.DictReader(io.StringIO(paths.resolve(file).read_text())):
            place = (int(row["document"]), int(row["place"]))
            counted[place] = counted.get(place, -1) + 1
            found[(*place, counted[place])] = float(row["tokens"]), float(row["loss_update"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--against {file}: {type(error).__name__}: {error}; give the chunks.csv of another evaluation"
        ) from error
    return found
