"""Finds runs and reads their configurations, from run directories alone."""

import dataclasses
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from core import identity
from core.checkpoints import published_files, reading, steps
from core.errors import UserError
from core.files import paths
from launch import environment
from launch.config import LoadedConfig, differences, loader, sources
from launch.config.trust import Trust
from launch.experiment import OF_PYTHON, Experiment
from launch.runs import continuation
from launch.settings import GROUPS
from models.decoder.published import families

CONFIG = "config.gin"


class SavedRun(NamedTuple):
    """A run that was read from its directory.

    Attributes:
      run_dir: the run directory, as a resolved path.
      config: the configuration of the run, after overrides.
      step: the checkpoint's step that `config` was read from; None: the run directory.
    """

    run_dir: str
    config: LoadedConfig
    step: int | None = None

    def experiment(self) -> Experiment:
        """Builds the experiment; of several phases, the one that trained `step`, or the last one without a step."""
        spans = self.config.build().spans()
        return spans[-1].experiment if self.step is None else continuation.phase_of(spans, self.step).experiment


def read(
    run_dir: str, *, step: paths.Path | None = None, bindings: Sequence[str] = (), slice_name: str | None = None
) -> SavedRun:
    """Reads the configuration of a run.

    Args:
      run_dir: the run directory, local or gs://.
      step: the folder of a checkpoint whose configuration is read, if it has one; None: the run's.
      bindings, slice_name: override the configuration, as in `loader.load`.

    Raises:
      UserError: there is no run that gin can build, or its configuration has mistakes.
    """
    is_of_hub = run_dir.startswith(published_files.HUB)
    folder = paths.resolve("." if is_of_hub else run_dir)
    text = None if is_of_hub else (step and _text_of_step(step)) or config(run_dir)
    if text is None:
        refuse_published(run_dir)
        if run_dir.endswith(".gin"):
            own = environment.run_directory(run_dir, "SLICE")
            raise UserError(f"{run_dir!r} is an experiment file; give the directory of its run, such as {own}")
        what = f"it has no {CONFIG}" if folder.exists() else "there is no such folder"
        if not paths.is_remote(folder) and folder.exists() and not os.access(folder, os.X_OK):
            what = "you may not enter this folder"
        raise UserError(f"no run in {str(folder)!r}: {what}. Give a run directory, such as runs/quickstart-v4-16")
    if text.startswith(OF_PYTHON):
        raise UserError(
            f"{str(folder)!r} is a run of renga.Trainer; its {CONFIG} describes Python objects, which gin cannot build "
            f"again. In Python, make the same Trainer(…, run_dir={str(folder)!r}): it trains, evaluates and generates"
        )
    published_files.use_copies(run_dir)
    name = f"{folder}/{CONFIG}" if step is None else f"the configuration of step {step.name} of {folder}"
    loaded = loader.load(name, text=text, bindings=bindings, slice_name=slice_name, of_environment=True, trust=Trust())
    return SavedRun(str(folder), loaded, int(step.name) if step is not None else None)


def refuse_published(text: str) -> None:
    """Raises UserError if `text` names a published model instead of a run."""
    is_of_hub = text.startswith(published_files.HUB)
    if is_of_hub or (paths.resolve(text) / published_files.CONFIG).exists():
        said = "" if is_of_hub else families.of_images(families.read_config(paths.resolve(text)))
        raise UserError(
            f"{text!r} is a published model, not a run. launch/run generate takes it, and launch/run evaluate "
            f"with --lm-eval, --humaneval or --task{said and f'. It {said}'}"
        )


def read_step(run_dir: str, *, step: int | None, **options: Any) -> SavedRun:
    """Reads the configuration that is saved in a checkpoint or, without checkpoints, the run's.

    `step`: the checkpoint's step; None: the newest. `options`: `bindings` and `slice_name` of `read`.
    """
    if run_dir.startswith(published_files.HUB) or not steps.has_folder(run_dir):
        return read(run_dir, **options)
    folder = paths.resolve(run_dir) / steps.FOLDER
    (chosen,) = steps.select(run_dir, step=step, every=False)
    return read(run_dir, step=folder / str(chosen), **options)


def _text_of_step(step: paths.Path) -> str | None:
    with reading.refusing_damage(step):
        return steps.read(step).meta.get("config")


def described(experiment: Experiment) -> str:
    """Returns gin comments that describe an experiment of `renga.Trainer`, to save as its configuration."""
    groups = [experiment, *(getattr(experiment, name) for name in GROUPS)]
    lines = [f"# {name} = {identity.text(value)}" for part in groups for name, value in _unusual(part)]
    return "\n".join([OF_PYTHON, *lines]) + "\n"


def _unusual(part: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name not in GROUPS and (usual is dataclasses.MISSING or value != usual):
            yield field.name, value


def config(run_dir: str) -> str | None:
    """Returns the text of the run's file CONFIG; None if there is none."""
    file = paths.resolve(run_dir) / CONFIG
    return file.read_text() if file.exists() else None


def configuration(run_dir: str) -> tuple[str | None, str]:
    """Returns the text of the run's file CONFIG, or None and why it cannot be compared ("" if there is none)."""
    try:
        text = config(run_dir)
        if text is None or text.startswith(OF_PYTHON):
            return None, "" if text is None else "it contains a run of renga.Trainer"
        loader.parse(text)
    except OSError as error:
        return None, f"its {CONFIG} cannot be read: {error.strerror}"
    except sources.ERRORS as error:
        return None, f"its {CONFIG} is no configuration: {error}"
    return text, ""


def find_runs(root: str, texts: Iterable[str], *, ignoring: Collection[str] = ()) -> dict[str, list[str]]:
    """Returns, for each of the configurations `texts`, the directories of runs with it.

    It looks in the folders of `root`, and in their folders. Settings named in `ignoring` may differ. It names files
    that are no configurations, and leaves them out.
    """
    found: dict[str, list[str]] = {text: [] for text in texts}
    folder = paths.resolve(root)
    forms = (f"*/{CONFIG}", f"*/*/{CONFIG}") if folder.exists() else ()
    for file in sorted(file for form in forms for file in folder.glob(form)):
        if (file.parent / environment.REHEARSAL).exists():  # of a small model with this configuration
            continue
        saved, why_not = configuration(str(file.parent))
        if saved is None:
            print(f"left out: {file.parent}: {why_not}", file=sys.stderr)
            continue
        for text, runs in found.items():
            if differences.is_same(saved, text, ignoring=ignoring):
                runs.append(str(file.parent))
    return found
