"""`Trainer`: trains, evaluates and samples a model from Python, without gin, on the devices of this process."""

import contextlib
import dataclasses
import difflib
import functools
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

from core import versions
from core.checkpoints import copying, steps
from core.checkpoints.warm_start import GivenParameters
from core.errors import UserError, check_integer
from core.files import paths
from core.hosts import activity
from core.optimizers import Optimizer, Transformation
from core.training import compilation, metrics, scoring
from core.training.run_lock import RunLock
from core.types import Model, Params, Task
from launch import loaded_model
from launch import settings as settings_groups
from launch.experiment import Experiment
from launch.experiments import evaluate, saved_run
from launch.hosts import cluster, machine
from launch.loaded_model import LoadedModel
from launch.runs import continuation, prepared_run, train
from launch.runs.progress import Waiting
from parallel.strategy import Strategy

_OWN = {  # what an experiment file binds and a trainer does not take
    "slice": "a trainer uses the devices of this process",
    "steps": "fit(steps) takes it",
    "total_steps": "fit(steps) takes it",
    "phase": "fit trains all phases",
}
_OF_WATCHDOG = {field.name for field in dataclasses.fields(settings_groups.Health)} - {"replica_check_interval"}


class Trainer:
    """A run on the devices of this process.

    Its state is in the run directory: another `Trainer` with the same arguments continues it.

    Attributes:
      run_dir: the run directory.
    """

    def __init__(
        self,
        *,
        model: Model,
        task: Task,
        optimizer: Optimizer | Transformation,
        strategy: Strategy,
        run_dir: str | os.PathLike[str],
        batch_size: int,
        init_from: str | Params = "",
        **settings: Any,
    ):
        """Checks the arguments; writes nothing.

        Args:
          model: a model; see `core.types.Model`, or `HaikuModel` for a Haiku function.
          task: the data, from `tasks`, or a `SampledTask`.
          optimizer: an optimizer of Renga, or any optax transformation.
          strategy: how arrays are sharded over the devices.
          run_dir: where checkpoints and metrics are written, local or gs://; one run per directory.
          batch_size: rows of a batch; a multiple of `task.num_streams`.
          init_from: parameters that a new run starts from: a run, RUN@STEP or the folder of a published model; or
            arrays in memory, `{module: {name: array}}`, such as `params` of another trainer, which are copied.
          **settings: other settings of `launch.experiment` and `launch.settings`, such as `seed`, `accum_steps`,
            `eval_interval`, `eval_batches`, `checkpoint_interval`, `init_layers` and `frozen`.

        Raises:
          UserError: an argument has the wrong type, is out of range or is unknown.
        """
        self._held: tuple[str, LoadedModel, LoadedModel] | None = None  # folder of the last one loaded; whole, split
        self._given = None if isinstance(init_from, str) else GivenParameters(init_from)
        fields = {field.name for field in dataclasses.fields(Experiment)}
        known = (fields | settings_groups.HOMES.keys()) - {*_OWN, *_OF_WATCHDOG, *settings_groups.GROUPS}
        for name in sorted(settings.keys() & _OF_WATCHDOG):
            raise UserError(
                f"Trainer: {name} = {settings[name]!r}: nothing watches a process of Trainer for hangs, so it has no "
                "such limit. Leave it out, or train with a gin file and launch/run train"
            )
        for name in sorted(set(settings) - set(known)):
            close = difflib.get_close_matches(name, known, n=1)
            nearest = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(sorted(known))}"
            raise UserError(f"Trainer: unknown setting {name!r}: {_OWN.get(name, nearest)}")
        if not isinstance(run_dir, str | os.PathLike) or not os.fspath(run_dir):
            raise UserError(f"Trainer: run_dir = {run_dir!r}: expected a local path or gs://BUCKET/…")
        self.run_dir = str(paths.resolve(run_dir))
        self._experiment = Experiment(  # slice and steps are known later
            slice="cpu:1",
            total_steps=_last_start(settings.get("phases", ())) + 1,
            model=model,
            task=task,
            optimizer=optimizer,
            strategy=strategy,
            batch_size=batch_size,
            **settings_groups.grouped({**settings, "init_from": init_from if isinstance(init_from, str) else ""}),
        )

    def fit(self, steps: int) -> dict[str, float]:
        """Trains from the newest checkpoint, or from the start, to a total of `steps` steps.

        A later checkpoint of `checkpoint_mirror` is copied to the run directory first. The last step is saved. Nothing
        is trained if that many steps are done already. After an interruption, the same call continues from the newest
        checkpoint.

        Returns:
          The last validation means, such as `validation/loss`; empty without `eval_batches`.

        Raises:
          UserError: `steps`, the layout, the data, the run directory or the mirror cannot be used.
          NonFiniteLossError: the loss or its gradient was not finite, and `non_finite` ends the run.
          DivergedError: copies of an array on several devices differ, at a multiple of `replica_check_interval`.
        """
        check_integer(steps, where="steps", least=1)
        self._held = None  # its parameters would take memory of the devices
        if place := self._experiment.checkpointing.checkpoint_mirror:
            copying.check_place(self.run_dir, place, hosts=1)
        project = self._experiment.logging.wandb_project
        metrics.require_wandb(project, run_dir=self.run_dir)
        metrics.require_wandb_login(project)
        if problems := self._experiment.data_problems(prepared=False):
            raise UserError("\n".join(problems))
        with contextlib.ExitStack() as stack:
            lock = RunLock.acquire(self.run_dir, say=lambda text: print(f"note: {text}", flush=True))
            stack.callback(lock.release)
            stack.enter_context(lock.explaining())
            experiment = self._on_devices(total_steps=max(steps, self._experiment.total_steps))
            experiment.require_trainable()
            activity.at(activity.OPENING)
            compilation.found_at_start.cache_clear()  # of an earlier call
            stack.enter_context(Waiting())
            prepare = functools.partial(self._prepared, experiment, last_step=steps, started=time.monotonic())
            return train.run_alone(experiment, prepare, self.run_dir, last_step=steps, lock=lock)

    def evaluate(self, *, rows: int | Literal["all"] | None = None, step: int | None = None) -> dict[str, float]:
        """Computes the mean metrics of a checkpoint on held-out rows, and saves them.

        Args:
          rows: number of held-out rows, or "all"; None: those of the run's own evaluations.
          step: the checkpoint; None: the newest.

        Returns:
          The means, such as `loss`.

        Raises:
          UserError: there is no such checkpoint, it does not fit, or there are no such rows.
        """
        for name, value in (("rows", rows), ("step", step)):
            if value is not None and (name, value) != ("rows", "all"):
                check_integer(value, where=name, least=1)
        (chosen,) = steps.select(self.run_dir, step=step, every=False)  # errors before a device is used
        built = continuation.phase_of(self._on_devices().spans(), chosen).experiment
        sizes: dict[str, Any] = {"batch_size": built.batch_size, "eval_batches": built.evaluation.eval_batches}
        asked = scoring.select(built.task, **sizes, rows=rows, asked=("rows=N", "rows='all'"))
        experiment = dataclasses.replace(built, task=asked.task, max_epochs=None)  # of training data
        run = self._prepared(experiment, experiment.spans()[0], last_step=1)
        results, _ = evaluate.score(run, asked, step=step)
        return dict(results.checkpoints[0]["means"])

    def generate(self, prompt: str | Sequence[int], *, step: int | None = None, **options: Any) -> str:
        """Continues a prompt, given as text or as ids, with the parameters of a checkpoint.

        Args:
          prompt: the prompt.
          step: the checkpoint; None: the newest.
          **options: `max_tokens`, `sampling` (default: the most likely token) and `seed`, as in
            `launch.loaded_model.LoadedModel.continued`.

        Raises:
          UserError: there is no such checkpoint, or the model cannot continue the prompt.
        """
        return self.loaded(step=step).continued([prompt], **options)[0].text

    def loaded(self, *, step: int | None = None) -> LoadedModel:
        """Returns the model with the parameters of a checkpoint, by default the newest.

        Of a model of images and text, it is the decoder, which generates. The trainer keeps this model until it loads
        another one or trains.

        Raises:
          UserError: there is no such checkpoint, or it does not fit.
        """
        return self._loaded(step)[1]

    def _loaded(self, step: int | None) -> tuple[LoadedModel, LoadedModel]:
        """Returns the whole model and, for a model of images and text, its decoder; otherwise the model again."""
        place = self.run_dir if step is None else f"{self.run_dir}@{step}"
        folder = str(steps.find(place))
        if self._held is None or self._held[0] != folder:
            self._held = None  # frees the memory of one before another is read
            experiment = self._on_devices().spans()[-1].experiment
            whole = loaded_model.load_step(experiment, paths.resolve(folder), slice_name=experiment.slice)
            self._held = (folder, whole, loaded_model.split(whole, experiment.task))
        return self._held[1:]

    @property
    def params(self) -> Params:
        """The parameters of the newest checkpoint; averaged ones if the optimizer averages.

        Raises:
          UserError: there is no checkpoint, or it does not fit.
        """
        return self._loaded(None)[0].params

    def _on_devices(self, **changes: Any) -> Experiment:
        return dataclasses.replace(self._experiment, slice=machine.of_this_process().name, **changes)

    def _prepared(
        self, experiment: Experiment, span: Any, *, last_step: int, started: float | None = None
    ) -> prepared_run.Run:
        return prepared_run.prepare_run(
            span,
            config=saved_run.described(experiment),
            revision=versions.git_revision(),
            run_dir=self.run_dir,
            last_step=last_step,
            host=cluster.ALONE,
            started=started,
            given=self._given,
        )


def _last_start(phases: object) -> int:
    """Returns the step after which the last phase starts, or 0; `Experiment` reports malformed phases."""
    listed = phases if isinstance(phases, Sequence) else ()
    return max([0, *(phase.after for phase in listed if isinstance(getattr(phase, "after", None), int))])
