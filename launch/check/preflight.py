"""Preflight, the level `config` of a check: the checks that need no device of the slice.

The layout is checked on the compiler's description of the slice.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from core import slices, units
from core.batches import batch_size
from core.checkpoints import published_files, reading, steps
from core.errors import Problem, UnreachableError, UserError
from core.files import paths
from core.slices import GIB, Slice
from core.training import metrics, run_lock
from core.types import HasVocabulary, NamesFiles, TriesExamples, can
from launch import environment, terminal
from launch.check import chip_memory
from launch.config import LoadedConfig, loader
from launch.experiment import Experiment, Span, padding
from launch.findings import LAYOUT, Finding, is_ready
from launch.hosts import workstation
from launch.runs import continuation, prepared_run, smoke, warm_start
from parallel import mesh, strategy
from parallel.compiled import host_memory
from parallel.partitioner import Program
from tasks.text.ids import ReadsFile

if TYPE_CHECKING:
    from parallel.planning.arithmetic import Estimate

# Where the hosts will be. "here": this machine, or unknown; "simulated": processes of this machine; "shipped to": a TPU
# that gcloud reaches from this workstation; "dry run": the same, without using the network.
Hosts = Literal["here", "simulated", "shipped to", "dry run"]
_AWAY = ("shipped to", "dry run")
CONFIGURATION = "configuration"  # names of findings
_INITIAL = "initial parameters"
_CUSTOMARY_SPARE_IDS = 256
_T = TypeVar("_T")


class Checked(NamedTuple):
    """The findings of the preflight, with the experiment and the program that it built."""

    findings: tuple[Finding, ...]  # findings of all checks
    config: LoadedConfig | None  # the configuration; None if it is not valid
    experiment: Experiment | None  # the built experiment; None if the configuration is not valid
    program: Program | None  # of the first phase, bound to a description of the slice; None if it does not fit

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return is_ready(self.findings)


def check(
    path: str,
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    run_dir: str,
    smoked: bool = False,
    tuned: bool = False,
    hosts: Hosts = "here",
) -> Checked:
    """Checks configuration, layout, data, run directory and memory.

    Args:
      path: the gin file of the experiment.
      bindings: gin bindings that override it.
      slice_name: the slice; None: the one in the experiment's file.
      run_dir: the run directory.
      smoked: whether the run is a smoke run: smallest sizes, and data may be replaced.
      tuned: whether settings are tuned, in a folder of its own.
      hosts: where the hosts will be: "here", on this machine or unknown; "simulated" on this machine; "shipped to" a
        TPU to which the workspace is copied; or "dry run", the same without using the network.
    """
    findings: list[Finding] = []
    bound = None
    if hosts not in _AWAY:
        published_files.use_copies(run_dir)
    built = _attempt(CONFIGURATION, lambda: _build(path, bindings, slice_name), findings)
    config, experiment = built or (None, None)
    if experiment is not None:
        if project := experiment.logging.wandb_project:
            allowed = _passed(f"and in {project}", metrics.require_wandb, project, run_dir=run_dir)
            _attempt("metrics", allowed, findings)
        first, *later = experiment.spans()
        bound = _phase(first, findings, smoked=smoked, hosts=hosts)
        if later or experiment.is_one_phase:
            _attempt("phases", _passed(f"{len(later) + 1}", experiment.require_trainable), findings)
        for span in later:
            _phase(span, findings, smoked=smoked, hosts=hosts)
        if (place := experiment.checkpointing.checkpoint_mirror) and not smoked and hosts not in _AWAY:
            _attempt("copies", _passed(place, _check_copies, run_dir, place, experiment), findings)
    if hosts in _AWAY:
        _attempt("files", lambda: _shipment(config.files if config else ()), findings)
    findings += run_directory(run_dir, slices.get(experiment.slice) if experiment else None, hosts)
    if bound is not None:
        assert config is not None
        assert experiment is not None
        meant, program = bound
        if not (smoked or tuned) and _sees_run(run_dir, hosts):
            findings.append(_checkpoint(path, config, experiment, program, run_dir, hosts))
        place = _tuning_folder(run_dir) if tuned else run_dir
        initial, left_out = (None, ()) if smoked else _initial_parameters(meant, program, place, hosts)
        if not smoked and (hosts == "simulated" or (hosts == "here" and not slices.get(experiment.slice).is_tpu)):
            own = reading.by_name(program.abstract_state).keys() & set(left_out)  # a checkpoint may be of another model
            enough = _passed("enough", continuation.require_space, run_dir, program, without=own)
            _attempt("disk", enough, findings)
        if initial:
            findings.append(initial)
    return Checked(tuple(findings), config, experiment, bound and bound[1])


def _tuning_folder(run_dir: str) -> str:
    from launch.runs import tuning

    return f"{run_dir}/{tuning.FOLDER}"


def _shipment(needed: Sequence[Path]) -> tuple[workstation.Shipment, str]:
    if left := workstation.not_shipped(needed, workspace=environment.WORKSPACE):
        raise UserError("\n".join(left))
    shipment = workstation.require_small(environment.WORKSPACE)
    return shipment, str(shipment)


def _check_copies(run_dir: str, place: str, experiment: Experiment) -> None:
    from core.checkpoints import copying  # most runs have none

    copying.check_place(run_dir, place, hosts=slices.get(experiment.slice).hosts)


def _phase(span: Span, findings: list[Finding], *, smoked: bool, hosts: Hosts) -> tuple[Experiment, Program] | None:
    """Adds the findings of a phase; returns its experiment and program, or None if the layout does not fit."""
    found: list[Finding] = []
    if bound := _attempt(LAYOUT, lambda: _bind(span.experiment, smoked=smoked), found):
        found += _row_coupling(span.experiment)
        found += _memories(*bound, hosts, with_activations=not smoked and hosts != "simulated")
    read = data(span.experiment, smoked=smoked, hosts=hosts)
    found += read
    if is_ready(read) and not smoked and hosts not in _AWAY:
        found += [Finding("data", False, problem) for problem in span.repeats()]
    phase = span.number if span.number > 1 else None
    findings += [finding._replace(phase=phase) for finding in found]
    return bound


def require(path: str, **options: Any) -> Checked:
    """Returns the result of `check`; raises UserError if a check failed."""
    checked = check(path, **options)
    if not checked.ok:
        raise UserError("\n".join(f"{f.title}: {f.detail}" for f in checked.findings if not f.ok))
    return checked


def _attempt(name: str, look: Callable[[], tuple[_T, str]], findings: list[Finding]) -> _T | None:
    """Calls `look() -> (result, detail)` and adds the finding; returns None after a user error."""
    try:
        result, detail = look()
    except UserError as error:
        terminal.print_traceback(error)
        findings.append(Finding.failed(name, error))
        return None
    findings.append(Finding(name, True, detail))
    return result


def _passed(
    detail: str, require: Callable[..., object], *arguments: Any, **options: Any
) -> Callable[[], tuple[object, str]]:
    return lambda: (require(*arguments, **options), detail)


def _build(path: str, bindings: Sequence[str], slice_name: str | None) -> tuple[tuple[LoadedConfig, Experiment], str]:
    config = loader.load(path, bindings=bindings, slice_name=slice_name)
    return (config, config.build()), "\n".join((path, *config.notes))


def _bind(experiment: Experiment, *, smoked: bool) -> tuple[tuple[Experiment, Program], str]:
    experiment = smoke.shrink(experiment) if smoked else experiment
    program = experiment.bind(mesh.devices_of(slices.get(experiment.slice)))
    where = f"{program.partitioner.strategy.name} on {program.partitioner.slice.name}"
    rows = units.counted(batch_size(program.spec), "row")
    shape = strategy.mesh_text(program.partitioner.shape)
    return (experiment, program), f"{where}: {shape}; {rows}{padding(program)}"


def _sees_run(run_dir: str, hosts: Hosts) -> bool:
    return hosts != "dry run" and (paths.is_remote(run_dir) or hosts not in _AWAY)


def _checkpoint(
    path: str, config: LoadedConfig, experiment: Experiment, program: Program, run_dir: str, hosts: Hosts
) -> Finding:
    name = "checkpoint"
    is_away = hosts in _AWAY
    try:
        found = continuation.newest(run_dir)
    except UserError as error:  # the hosts may reach it
        return Finding(name, is_away, str(error), is_note=is_away)
    if found is None:
        try:
            continuation.require_not_moved(run_dir, path, config.slice)
        except UserError as error:
            return Finding.failed(name, error)
        if there := steps.complete(paths.resolve(run_dir) / steps.FOLDER):
            fix = "launch/run checkpoints verify RUN lists what is damaged"
            return Finding(name, False, Problem(f"none of {len(there)} is intact", fix=fix))
        return Finding(name, True, "none: a fresh start")
    changed = continuation.changes(found.described.meta, config)
    what = continuation.described_changes(found.step, changed) if changed else ""
    evaluates = found.step == experiment.total_steps and not continuation.is_evaluated(run_dir, experiment, found.step)
    if found.step >= experiment.total_steps and not evaluates:
        said = f"step {found.step:,} of {experiment.total_steps:,}: nothing is left to train"
        detail = Problem(f"{said}\n{what}", fix=continuation.FIX) if changed else said
        return Finding(name, not changed, detail, is_note=True)
    span = (continuation.phase_of if evaluates else continuation.phase_after)(experiment.spans(), found.step)
    try:
        if is_away:  # the data are not here
            now = {**found.described.meta, continuation.ORDER: continuation.settings(span)}
        else:
            span.experiment.task.prepare(run_dir, is_host_zero=False)  # reads what host 0 made at the first start
            now = prepared_run.metadata(span, config=config, revision="")
    except (UserError, OSError) as error:
        return Finding.failed(name, error)
    if problems := continuation.problems(found, now, span=span, abstract_state=program.abstract_state):
        said = "\n  ".join([f"the run cannot continue from step {found.step} with this configuration:", *problems])
        return Finding(name, False, Problem(said, fix=continuation.FIX))
    does = "evaluates" if evaluates else "continues from"
    return Finding(name, True, f"a start {does} step {found.step}{what and '; '}{what}", is_note=bool(what))


def _row_coupling(experiment: Experiment) -> list[Finding]:
    name, found = "microbatches", list[Finding]()
    try:
        _attempt(name, lambda: ((said := smoke.require_divisible_rows(experiment)), said), found)
    except Exception as error:  # of the user's model or task, which may need a TPU, or data
        said = f"it could not be tried on this machine's CPU whether rows divide: {type(error).__name__}: {error}"
        found.append(Finding(name, True, said, is_note=True))
    return [finding for finding in found if finding.detail]


def _initial_parameters(
    experiment: Experiment, program: Program, run_dir: str, hosts: Hosts
) -> tuple[Finding | None, Collection[str]]:
    """Returns the finding, if there is one, and the names of the arrays that checkpoints leave out."""
    is_away, text = hosts in _AWAY, experiment.initialization.init_from
    with contextlib.chdir(environment.WORKSPACE) if is_away else contextlib.nullcontext():
        try:
            if _sees_run(run_dir, hosts) and (newest := continuation.newest(run_dir)):
                left_out = newest.described.left_out
                return _read_on_resume(experiment, program, *newest, hosts), left_out.arrays if left_out else ()
            return _read_by_fresh_start(experiment, program, hosts) if text else (None, ())
        except UnreachableError as error:  # the hosts may reach it
            found = Finding(_INITIAL, is_away, str(error), is_note=is_away)
        except UserError as error:
            found = Finding.failed(_INITIAL, error)
        except Exception as error:  # a bucket fails with its client's own types
            is_remote = any(map(paths.is_remote, (text, run_dir)))
            if not is_remote and not isinstance(error, OSError):
                raise
            unread = f"cannot read {text or run_dir} from here: {type(error).__name__}: {error}"
            found = Finding(_INITIAL, is_away and is_remote, unread, is_note=is_away and is_remote)
    return found, _frozen(program)


def _frozen(program: Program) -> list[str]:
    """Returns the names of frozen parameters, which checkpoints leave out if they came from a published model."""
    return [name for name, spec in reading.by_name({"params": program.param_specs}).items() if not spec.trainable]


def _read_on_resume(
    experiment: Experiment, program: Program, step: int, described: steps.Description, hosts: Hosts
) -> Finding | None:
    if not (left_out := described.left_out):
        detail = f"not read: the run resumes from step {step:,}"
        return Finding(_INITIAL, True, detail) if experiment.initialization.init_from else None
    place = warm_start.place_again(experiment, left_out)
    if not _is_visible(place, hosts):
        return Finding(_INITIAL, True, f"not checked: {place}", is_note=True)
    source = warm_start.find_again(experiment, program, described).describe()
    read = f"reads {units.counted(len(left_out.arrays), 'frozen parameter')} from {source}"
    return Finding(_INITIAL, True, f"the run resumes from step {step:,} and {read}")


def _read_by_fresh_start(experiment: Experiment, program: Program, hosts: Hosts) -> tuple[Finding, Collection[str]]:
    text = experiment.initialization.init_from
    if not _is_visible(text, hosts):
        return Finding(_INITIAL, True, f"not checked: {text}", is_note=True), _frozen(program)
    initial = warm_start.find(experiment, program, is_visible=lambda place: _is_visible(place, hosts))
    assert initial is not None, text
    found = "\n".join(filter(None, (initial.source.describe(), initial.notes)))
    shipped = [] if paths.is_remote(text) or hosts not in _AWAY else [steps.split(text)[0]]
    left = workstation.left_behind(shipped, workspace=environment.WORKSPACE)
    finding = Finding(_INITIAL, not left, left[0] if left else found, is_note=bool(initial.notes))
    return finding, initial.left_out.arrays if initial.left_out else ()


def _is_visible(place: str, hosts: Hosts) -> bool:
    return not place.startswith("hf://") and not _is_unseen(place, hosts, is_vocabulary=True)


def _memories(experiment: Experiment, program: Program, hosts: Hosts, *, with_activations: bool) -> list[Finding]:
    wanted = with_activations and program.partitioner.slice.is_tpu
    estimate, why_not = chip_memory.estimate(program) if wanted else (None, "")
    return [chip_memory.check(program, estimate, why_not), _host_memory(experiment, program, hosts, estimate)]


def _host_memory(experiment: Experiment, program: Program, hosts: Hosts, estimate: "Estimate | None") -> Finding:
    slice_, task = program.partitioner.slice, experiment.task
    evaluated = {"eval_batches": experiment.evaluation.eval_batches}
    without = ""
    if hosts == "simulated" or slice_.generation == "cpu":
        need, have = host_memory.simulated(program, task, **evaluated), host_memory.available_bytes()
        whose = "this machine"
    else:
        saved_bytes = 0.0 if estimate is None else estimate.host_bytes
        without = "; activations saved on the host not counted" if estimate is None else ""
        need = host_memory.per_host(program, task, **evaluated, saved_bytes=saved_bytes)
        have, whose = slice_.host_memory_bytes, f"a host of {slice_.name}"
    problem = host_memory.problem(need, program, task, **evaluated, have_bytes=have, whose=whose)
    said = f"{sum(need.values()) / GIB:.3g} GiB at least of {have / GIB:.4g} of {whose}{without}"
    return Finding("host memory", not problem, problem or said)


def data(experiment: Experiment, *, smoked: bool, hosts: Hosts, name: str = "data") -> list[Finding]:
    """Checks the data of an experiment.

    Args:
      experiment: the experiment.
      smoked: whether random tokens may replace missing data.
      hosts: where the hosts will be, as in `check`; files that only they can see are not checked.
      name: name of the finding.
    """
    task = experiment.task
    named = tuple(task.named_files()) if can(task, NamesFiles) else ()
    vocabulary = task.vocabulary.path if can(task.vocabulary, ReadsFile) else ""
    unseen = [file for file in named if _is_unseen(file, hosts, is_vocabulary=file == vocabulary)]

    def seen(problems: Sequence[str]) -> list[str]:
        return [one for one in problems if not (isinstance(one, Problem) and one.file in unseen)]

    with contextlib.chdir(environment.WORKSPACE) if hosts in _AWAY else contextlib.nullcontext():  # where hosts start
        problems = seen(task.problems())
        if problems and smoked:
            return [Finding(name, True, f"random tokens in its place ({problems[0]})")]
        if hosts in _AWAY:
            shipped = [file for file in named if file not in unseen and not paths.is_remote(file)]
            problems += workstation.left_behind(shipped, workspace=environment.WORKSPACE)
        is_here = hosts not in _AWAY or (named and not unseen)  # what is not named here may exist on the hosts alone
        if is_here and not problems and can(task, TriesExamples):
            problems = task.example_problems()
        notes = [Finding(name, True, f"not checked: {', '.join(unseen)}", is_note=True)] if unseen else []
        if vocabulary not in unseen and not problems:
            try:
                problems = seen(experiment.data_problems(prepared=False))
            except Exception as error:  # a bucket fails with its client's own types
                if not paths.is_remote(vocabulary) and not isinstance(error, OSError):
                    raise
                unread = f"cannot read {vocabulary or 'the data'} from here: {type(error).__name__}: {error}"
                unproven = hosts in _AWAY and paths.is_remote(vocabulary)  # shipped files are read from here
                return [Finding(name, unproven, unread, is_note=unproven), *notes]
        if problems:
            return [*(Finding(name, False, problem) for problem in problems), *notes]
        if vocabulary in unseen:
            return [Finding(name, True, ", ".join(named)), *notes]
        return [Finding(name, True, task.describe()), *_unused_ids(experiment), *notes]


def _is_unseen(file: str, hosts: Hosts, *, is_vocabulary: bool) -> bool:
    if paths.is_remote(file):
        return hosts == "dry run" or not is_vocabulary
    return hosts in _AWAY and file.startswith(("/", "~"))


def _unused_ids(experiment: Experiment) -> list[Finding]:
    vocabulary, model = experiment.task.vocabulary, experiment.model
    rows = model.vocab_size if can(model, HasVocabulary) else 0
    if vocabulary is None or rows <= vocabulary.size + _CUSTOMARY_SPARE_IDS:
        return []
    said = (
        f"the model has vocab_size {rows:,}, but {vocabulary.describe()} has {vocabulary.size:,} ids: "
        f"{rows - vocabulary.size:,} rows are never trained. Set VOCAB_SIZE = {vocabulary.size}, or VOCABULARY to the "
        "vocabulary that is meant"
    )
    return [Finding("vocabulary", True, said, is_note=True)]


def run_directory(run_dir: str, slice_: Slice | None, hosts: Hosts) -> list[Finding]:
    """Checks whether the hosts can share and write the run directory, and whether it is in use.

    If `slice_` is None, sharing is not checked. `hosts`: as in `check`.
    """
    name, remote = "run directory", paths.is_remote(run_dir)
    not_shared = ""
    if slice_ is not None and slice_.hosts > 1 and not remote:
        not_shared = (
            f"all {slice_.hosts} hosts of {slice_.name} must see one run directory, and this is on a disk: "
            "give --run-dir gs://BUCKET/… or set RENGA_RUN_ROOT to gs://BUCKET/…"
        )
    try:
        resolved = paths.resolve(run_dir)
        if not_shared and hosts in _AWAY:
            return [Finding(name, False, f"{run_dir}: {not_shared}")]
        if hosts == "dry run" or (hosts == "shipped to" and not remote):
            return [Finding(name, True, f"{run_dir}: not checked", is_note=True)]
        found = [Finding(name, True, str(paths.check_writable(resolved)))]
        if not remote and (owner := run_lock.holder(run_dir)):
            return [Finding(name, False, run_lock.in_use(run_dir, owner))]
    except UserError as error:
        # The hosts write as the TPU's service account, not as this user. What does not exist is missing for both.
        is_absent = isinstance(error.__cause__, FileNotFoundError | None) and not isinstance(error, UnreachableError)
        unproven = hosts == "shipped to" and not is_absent
        return [Finding(name, unproven, str(error), is_note=unproven)]
    if not_shared and hosts == "here":
        said = f"unless this is a simulation (--simulate), {not_shared}"
        found.append(Finding(name, True, said, is_note=True))
    return found
