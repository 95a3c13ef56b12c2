"""Prints a run's summary, progress lines, causes of long waits, and results."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping

import jax
from rich.panel import Panel
from rich.table import Table

from core import slices, units
from core.checkpoints import reading, writing
from core.checkpoints.steps import LeftOut
from core.hosts import activity
from core.step import TrainState
from core.training import compilation, frozen
from core.training.compilation import Totals
from core.training.evaluation import curves_apart
from core.training.goodput import Slowest
from core.types import ChoosesKernels, CountsFlops, DescribesEvaluation, FramesTexts, Generates, can, lacking
from launch import terminal
from launch.experiment import Experiment, padding
from launch.hosts import cluster
from launch.hosts.cluster import Host
from launch.runs.prepared_run import INIT_FROM, Run, cache_folder
from parallel import strategy
from parallel.compiled import report
from parallel.generation import generating, sampling, text_part
from parallel.partitioner import Program
from tasks.text.ids import decode_continuation, stop_ids, with_bos

SAMPLE_IDS, TEMPERATURE = 200, 0.8  # for the continuation of PROMPT

WAITS = {  # the text for activities that may take long
    activity.OPENING: "setting up the run",
    activity.PREPARING: "preparing the data",
    activity.RESTORING: "initializing or restoring the state",
    activity.READING: "reading data",
    activity.COMPILING: "compiling the training step",
    activity.MEETING: "waiting for all hosts, to evaluate or save",
    activity.EVALUATING: "evaluating",
    activity.SAVING: "saving a checkpoint",
    activity.ENDING: "finishing the run",
}
_MOST_HOSTS = 8  # the summary has a line for this many hosts; each host's log has its own
_LOOK_SECONDS = 0.5
_READING_SECONDS = 1  # the first wait for data, which every start has, is printed after this time
_FIRST_SECONDS = 10  # other waits: then every 10 s in the first minute, later every minute


def show_summary(
    run: Run, *, resumed_from: int | None, measured: Mapping[str, str], left_out: LeftOut | None = None
) -> None:
    """Prints a panel that describes the run.

    Args:
      resumed_from: the step of the checkpoint; None or 0: a fresh start.
      measured: further rows of the panel, by name.
      left_out: the arrays that checkpoints leave out; None: none.
    """
    experiment = run.experiment
    card = rows(experiment, run.program, host=run.host)
    if INIT_FROM in run.meta:
        card["start"] = f"parameters of {run.meta[INIT_FROM]}"
    if evaluated := evaluated_on(experiment):
        card["validation"] = f"on {evaluated}"
    left = f"resumed from {resumed_from:,}" if resumed_from else "fresh"
    early = f" of {experiment.total_steps:,}" if run.last_step < experiment.total_steps else ""
    if epochs := run.span.epochs:
        repeated = f"; data repeat after step {run.span.step_of_epoch(1):,}" if epochs > 1 else ""
        card["epochs"] = (
            f"about {units.significant(epochs, 2)} of the training data, to step {run.span.last_step:,}{repeated}"
        )
    if run.span.count > 1:
        card["phase"] = f"{run.span.number} of {run.span.count}, after step {run.span.first_step:,}"
    if about := cluster.about_hosts():
        card["hosts"] = "\n".join(units.shortened(about, most=_MOST_HOSTS))
    folder = cache_folder(run.run_dir)
    card["programs"] = f"{compilation.found_at_start(folder) or 'none'} compiled before this start, kept in {folder}"
    card |= {
        **measured,
        "saves": _saves(run, left_out),
        "steps": f"to {run.last_step:,}{early}, {left}",
        "run": run.run_dir,
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in card.items():
        grid.add_row(f"[bold]{name}[/bold]", value)
    terminal.console(118).print(Panel(grid, title="renga", title_align="left", expand=False))


def _saves(run: Run, left_out: LeftOut | None) -> str:
    settings = run.experiment.checkpointing
    saved = reading.without(run.program.abstract_state, left_out.arrays if left_out else ())
    whole, alone = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(t)) for t in (saved, saved.params))
    every = settings.params_checkpoint_interval
    saves = writing.estimate_saves(
        run.run_dir,
        interval=settings.checkpoint_interval,
        keep=settings.keep_checkpoints,
        size_bytes=whole,
        keeps_best=bool(settings.keep_best),
        keep_params=settings.keep_params_checkpoints if every else 0,
        params_bytes=alone,
    )
    if every:
        saves += (
            f"; the parameters alone every {units.counted(every, 'step')} and at the end, keeping the latest "
            f"{settings.keep_params_checkpoints}, {units.size(alone)} each"
        )
    if settings.checkpoint_mirror:
        saves += f"; copied to {settings.checkpoint_mirror}"
    if left_out:
        saves += f"; without {units.counted(len(left_out.arrays), 'frozen parameter')}, which stay in {left_out.source}"
    return saves


def rows(experiment: Experiment, program: Program, *, host: Host) -> dict[str, str]:
    """Returns rows of the summary by name, such as `slice`, `model` and `state`."""
    slice_ = slices.get(experiment.slice)
    sizes = report.totals(program)
    parameters = sum(math.prod(row.shape) for row in report.rows(program) if row.path.startswith("params/"))
    card = {
        "slice": f"{slice_.name}: {slice_.counted if slice_.is_tpu else units.counted(slice_.devices, 'device')} on "
        f"{units.counted(slice_.hosts, 'host')}"
        + (f", {slice_.topology_name}" if slice_.is_tpu else f", {jax.devices()[0].device_kind}")
        + (f"; simulated by {units.counted(host.count, 'process', 'processes')}" if host.simulated else ""),
        "strategy": f"{experiment.strategy.name}: {strategy.mesh_text(program.partitioner.shape)}",
        "model": f"{type(experiment.model).__name__}, {parameters:,} parameters" + padding(program),
        "data": experiment.task.describe(),
        "batch": _batch(experiment),
        "state": f"{units.size(sizes.everything)} per {slice_.chip.unit} (parameters {units.size(sizes.params)}, "
        f"optimizer {units.size(sizes.opt_state)}); {units.size(sizes.whole)} in all",
    }
    if slice_.chip.platform == "cuda":
        card |= _on_gpus(experiment, program)
    if experiment.frozen:
        trained = sum(math.prod(shape.shape) for shape in program.trained_params)
        card["trained"] = f"{trained:,} parameters; the others are frozen, in {experiment.frozen_dtype}"
    if schedule := program.partitioner.pipeline:
        card["pipeline"] = schedule.describe(program.partitioner.shape["stage"])
    if experiment.gather_once and experiment.accum_steps > 1:  # one microbatch means one gather anyway
        card["gathered"] = (
            f"{units.size(program.gathered_bytes)} more per {slice_.chip.unit}: parameters and gradients whole, "
            "once per step"
        )
    if not can(experiment.model, CountsFlops):
        card["compute"] = f"no FLOPs, no MFU: {lacking(experiment.model, CountsFlops)}"
    elif flops := experiment.flops_per_step:
        least = f"; {units.seconds(flops / slice_.peak_flops)} at the slice's bf16 peak" if slice_.peak_flops else ""
        card["compute"] = f"{units.flops(flops)} per step{least}"
    return card


def _on_gpus(experiment: Experiment, program: Program) -> dict[str, str]:
    from launch.hosts import machine

    memory = machine.gpu_memory()
    when = "at the start" if memory.is_preallocated else "when it is needed"
    found = {"memory": f"up to {memory.fraction:.0%} of each GPU, allocated {when}"}
    if can(experiment.model, ChoosesKernels):
        with program.partitioner.tracing():
            found["attention"] = experiment.model.attention_on_gpus(experiment.row_length)
    return found


def _batch(experiment: Experiment) -> str:
    """Returns text such as `8 rows x 128 tokens = 1,024 tokens, with images [64, 64, 3]`."""
    spec, text = experiment.task.spec(experiment.batch_size), units.counted(experiment.batch_size, "row")
    if experiment.unit == "token":
        tokens = units.counted(experiment.tokens_per_step, "token")
        text += f" x {units.counted(experiment.row_length, 'token')} = {tokens}"
    others = {name: field.shape[1:] for name, field in spec.items() if "length" not in field.axes}
    more = [f"{name} {list(shape)}" for name, shape in others.items() if shape]
    text += f", with {', '.join(more)}" if more else ""
    return text + (f", in {experiment.accum_steps} microbatches" if experiment.accum_steps > 1 else "")


def show_end(run: Run, state: TrainState, validation: Mapping[str, float], *, checksum: int | None) -> None:
    """Prints the results and a sample of the model's text. All hosts must call it.

    Args:
      validation: the metrics of the last evaluation; empty if there was none.
      checksum: of frozen parameters before training; None if none is frozen.

    Raises:
      RuntimeError: frozen parameters have changed.
    """
    experiment = run.experiment
    if checksum is not None and checksum != (after := frozen.checksum(run.program, state.params)):
        raise RuntimeError(
            f"frozen parameters have changed: checksum {after:08x} after training, {checksum:08x} before"
        )
    written = _sample(experiment, run.program, state)
    if jax.process_index() != 0:
        return
    if validation:
        print(f"\n{_validated(experiment, validation)}")
    if written:
        print(f"\nThe model continues {experiment.evaluation.prompt!r}:\n\n{terminal.printable(written)}\n")
    elif experiment.evaluation.prompt and not can(experiment.model, Generates):
        print(f"\nPROMPT = {experiment.evaluation.prompt!r} is not continued: {lacking(experiment.model, Generates)}\n")
    if checksum is not None:
        print(f"frozen      checksum {checksum:08x}, at the start of this process and now")
    print(f"run         {run.run_dir}\ntensorboard launch/run tensorboard {run.run_dir}", flush=True)


def evaluated_on(experiment: Experiment) -> str:
    """Describes the rows that evaluations score; "" if unknown or none."""
    if not experiment.evaluation.eval_batches or not can(experiment.task, DescribesEvaluation):
        return ""
    return experiment.task.evaluated_on(experiment.evaluation.eval_batches * experiment.batch_size)


def _validated(experiment: Experiment, validation: Mapping[str, float]) -> str:
    evaluated = evaluated_on(experiment)
    if not evaluated and "validation/loss" in validation:  # which an evaluation without weight lacks
        return f"validation loss {validation['validation/loss']:.4f} nats per {experiment.unit}"
    means = {name.removeprefix("validation/"): value for name, value in sorted(validation.items())}
    plain, curves = curves_apart(means)
    lines = ["  ".join(f"{name} {value:.4f}" for name, value in plain.items())]
    for name, values in curves.items():
        lines.append(f"{name} by step: " + " ".join(f"{value:.3f}" for value in values))
    return "\n".join([f"validation on {evaluated}" if evaluated else "validation", *lines])


def _sample(experiment: Experiment, program: Program, state: TrainState) -> str:
    if not experiment.evaluation.prompt or not can(experiment.model, Generates):
        return ""
    vocabulary = experiment.task.vocabulary
    prompt = vocabulary.encode(experiment.evaluation.prompt)
    if not prompt or not can(experiment.task, FramesTexts) or experiment.task.begins_with_bos():
        prompt = with_bos(prompt, vocabulary)
    params = program.optimizer.evaluated(state.params, state.opt_state)
    generator = generating.Generator(*text_part.of(program, params))
    most = generator.max_positions
    prompt = prompt[-(experiment.row_length if most is None else most // 2) :]
    count = SAMPLE_IDS if most is None else min(SAMPLE_IDS, most - len(prompt))
    how = {"max_tokens": count, "sampling": sampling.Sampling(temperature=TEMPERATURE), "num_ids": vocabulary.size}
    [found] = generator.generate([prompt], stop_ids=stop_ids(vocabulary), **how)
    return decode_continuation(vocabulary, prompt, found.ids)


class Progress:
    """Prints progress lines such as this on host 0.

        step   100/200  loss 2.1034  1.21 s/step  3,385 tokens/s  ETA 2:01

    Args:
      unit: what throughput counts: "token" or "row".
    """

    def __init__(self, last_step: int, *, host: Host, unit: str):
        self._last_step = last_step
        self._unit = unit
        self._host = host
        self._has_reported = False

    def start(self, step: int, *, evaluates: bool) -> None:
        """Host 0 prints a note if nothing is left to train; others print where they start.

        `evaluates`: whether the run has evaluations, of which the last one follows then.
        """
        if not self._host.is_zero:
            print(f"{self._host.name}: from step {step} to {self._last_step}", flush=True)
        if step >= self._last_step:
            self.note(f"step {step} is done{'; its evaluation follows' if evaluates else ': nothing is left to train'}")

    def compiled(self, totals: Totals) -> None:
        """Prints the numbers of programs compiled and read from the cache, and the time."""
        self.note(
            f"compiled {units.counted(totals.programs - totals.found, 'program')} and read {totals.found} "
            f"from the cache, in {units.seconds(totals.seconds)}"
        )

    def line(self, step: int, values: Mapping[str, float], *, slowest: Slowest | None = None) -> None:
        """Prints the metrics of an interval of steps, and which host delayed the others, if any."""
        if step == self._last_step or not self._has_reported:  # the first report includes the compilation
            eta = ""
        else:
            eta = f"  ETA {units.clock((self._last_step - step) * values['step_seconds'])}"
        self._has_reported = True
        waiting = values["input_wait_seconds"]
        starved = f"  waits {waiting:.2f} s for data" if waiting > 0.1 * values["step_seconds"] else ""
        if slowest is not None:
            starved += f"  waits {slowest.seconds:.2f} s for host {slowest.host}"
        mfu = f"  {100 * values['mfu']:.1f} % MFU" if "mfu" in values else ""
        self.note(
            f"step {step:>6}/{self._last_step}  loss {values['loss']:.4f}  {values['step_seconds']:.3g} s/step  "
            f"{values['tokens_per_second']:,.0f} {self._unit}s/s{mfu}{eta}{starved}"
        )

    def warning(self, text: str) -> None:
        """Prints a warning."""
        self.note(f"warning: {text}")

    def note(self, text: str) -> None:
        """Prints a message on its own line, on host 0 alone."""
        if self._host.is_zero:
            print(text, flush=True)

    def validation(self, step: int, values: Mapping[str, float], *, scored: str = "") -> None:
        """Prints the means of an evaluation and what it scored."""
        shown, _ = curves_apart(values)
        means = "  ".join(f"{name.removeprefix('validation/')} {value:.4f}" for name, value in shown.items())
        self.note(f"step {step:>6}/{self._last_step}  validation: {means}{f'  ({scored})' if scored else ''}")


class Waiting:
    """Prints, from a thread, the cause and duration of long waits: `compiling the training step, 0:20`.

    Args:
      say: prints a line; None: to standard output.
    """

    def __init__(
        self, say: Callable[[str], None] | None = None, *, place: Callable[[], activity.Place] = activity.place
    ):
        self._say = say or functools.partial(print, flush=True)
        self._place = place
        self._last = activity.Place(0, "", 0.0)
        self._earlier_seconds, self._due = 0.0, _FIRST_SECONDS  # earlier parts; next line
        self._has_read = False  # whether a line about reading data was printed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Prints the activity and its duration if a line is due."""
        place, last = self._place(), self._last
        is_first_reading = place.activity == activity.READING and not self._has_read
        if place.activity == last.activity and place.part != last.part:
            self._earlier_seconds += last.seconds
        elif place.activity != last.activity or place.seconds < last.seconds:
            self._earlier_seconds = 0.0
            self._due = _READING_SECONDS if is_first_reading else _FIRST_SECONDS
        self._last, seconds = place, self._earlier_seconds + place.seconds
        if place.activity not in WAITS or seconds < self._due:
            return
        if is_first_reading:
            self._has_read, self._due = True, _FIRST_SECONDS
        while self._due <= seconds:
            self._due += 10 if self._due < 60 else 60
        self._say(", ".join(filter(None, (WAITS[place.activity], place.part, units.clock(seconds)))))

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()
