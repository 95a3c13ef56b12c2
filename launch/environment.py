"""Environment variables, and constants that modules of launch/ assign.

An empty value counts as unset. docs/reference/environment.md lists the variables.
"""

import ast
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import UserError
from core.hosts import rendezvous

if TYPE_CHECKING:
    from core.slices import Slice  # a host reads its environment before its packages are installed

WORKSPACE = Path(__file__).resolve().parent.parent
PACKAGE = __name__.removesuffix("launch.environment")  # prefix of our module names: "renga." in the wheel, else ""
COMMAND = (sys.executable, "-m", f"{PACKAGE}launch")  # what launch/run starts

NAMES = frozenset(
    """
    RENGA_PYTHON RENGA_NEWEST RENGA_RUN_ROOT RENGA_SIMULATE RENGA_STEP_FILE RENGA_JOIN_SECONDS RENGA_JOIN_SECRET
    RENGA_TRACEBACK RENGA_ALERT RENGA_NOTES TPU_NAME TPU_ZONE TPU_PROJECT TPU_MESH_CONFIG TPU_AXIS_NAMES
    JAX_COORDINATOR_ADDRESS JAX_PROCESS_INDEX JAX_PROCESS_COUNT SLURM_PROCID OMPI_COMM_WORLD_RANK
    JAX_PLATFORMS JAX_NUM_CPU_DEVICES
    JAX_COMPILATION_CACHE_DIR XDG_CACHE_HOME HF_TOKEN WANDB_API_KEY WANDB_MODE TPU_WORKER_ID TPU_WORKER_HOSTNAMES
    TPU_ACCELERATOR_TYPE MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID MEGASCALE_COORDINATOR_ADDRESS TPU_SKIP_MDS_QUERY
    ALLOW_MULTIPLE_LIBTPU_LOAD XLA_FLAGS LIBTPU_INIT_ARGS XLA_PYTHON_CLIENT_MEM_FRACTION
    XLA_PYTHON_CLIENT_PREALLOCATE CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NO_COLOR COLUMNS EPATH_USE_TF
    WANDB_BASE_URL WANDB_IDENTITY_TOKEN_FILE NETRC
    TOKENIZERS_PARALLELISM GLIBC_TUNABLES STORAGE_EMULATOR_HOST GOOGLE_CLOUD_UNIVERSE_DOMAIN
    """.split()  # noqa: SIM905 (a list has a line for each)
)
COMPILED_BY = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # besides the configuration, these change a compiled program
# Set for processes that train on CPUs, unless the user sets it. XLA maps its temporary buffers anew in every step; with
# large pages the kernel clears and maps them in fewer parts. The C library reads it when a process starts.
ON_CPUS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
JOIN_SECONDS = 300
# Passed from a workstation to the hosts, as text and in files. Lists of launch/hosts/on_host.sh repeat both.
SENT = ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES", "RENGA_JOIN_SECONDS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "WANDB_MODE")
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "RENGA_ALERT")
# Beginnings of flags in XLA_FLAGS that change no program for TPUs. Among them are those with which tests run.
NOT_FOR_TPUS = ("--xla_cpu_", "--xla_gpu_", "--xla_backend_optimization_level", "--xla_force_host_")
# Suffixes of the names of run directories, by the level of a check.
OF_CHECKS: dict[str | None, str] = {"smoke": "-smoke", "slice": "-check"}
REHEARSAL = "rehearsal"  # a file in the directory of a smoke run, whose config.gin is of the whole experiment
MESH_AXES = ("data", "fsdp", "tensor")  # mesh axes of strategies.mesh3d


@functools.cache
def declared(constant: str) -> Mapping[str, Any]:
    """Returns the values that modules in folders of launch/ assign to a constant, by full module name.

    The assignment is a literal on one line. No module is imported.
    """
    line, found = re.compile(rf"(?m)^{constant} = (.+)$"), {}
    for file in sorted(Path(__file__).parent.glob("*/*.py")):
        if match := line.search(file.read_text()):
            found[f"{PACKAGE}launch.{file.parent.name}.{file.stem}"] = ast.literal_eval(match[1])
    return MappingProxyType(found)


@dataclass(frozen=True)
class ProcessLayout:
    """The values of JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX and JAX_PROCESS_COUNT; None if unset."""

    coordinator: str | None
    index: int | None
    count: int | None


def read(name: str, *, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the value of a variable in NAMES; None if it is unset or empty.

    If `environ` is None, it reads the variables of this process.
    """
    assert name in NAMES, f"{name} is not in launch/environment.py"
    return (os.environ if environ is None else environ).get(name) or None


def process_layout(*, environ: Mapping[str, str] | None = None) -> ProcessLayout:
    """Reads the variables of `ProcessLayout`.

    Raises:
      UserError: a value is wrong, or only some of them are set.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_INDEX", "JAX_PROCESS_COUNT")
    if not _are_set(names, "all three, or none (on a TPU, JAX finds the hosts)", environ):
        return ProcessLayout(None, None, None)
    coordinator = read("JAX_COORDINATOR_ADDRESS", environ=environ) or ""
    index = _integer("JAX_PROCESS_INDEX", minimum=0, environ=environ)
    count = _integer("JAX_PROCESS_COUNT", minimum=1, environ=environ)
    assert index is not None
    assert count is not None
    if index >= count:
        raise UserError(f"JAX_PROCESS_INDEX={index} but JAX_PROCESS_COUNT={count}: expected 0 to {count - 1}")
    try:
        rendezvous.split(coordinator)
    except UserError as error:
        expected = "expected HOST:PORT, such as 10.0.0.2:8476 or [fd00::2]:8476"
        raise UserError(f"JAX_COORDINATOR_ADDRESS={coordinator!r}: {expected}") from error
    return ProcessLayout(coordinator, index, count)


def worker_addresses() -> tuple[str, ...]:
    """Returns the hosts' addresses (TPU_WORKER_HOSTNAMES); () if unset or with several slices."""
    names = (read("TPU_WORKER_HOSTNAMES") or "").split(",")
    slices_ = read("MEGASCALE_NUM_SLICES") or "1"
    return tuple(name.strip() for name in names if name.strip()) if slices_ == "1" else ()


def join_secret() -> str:
    """Returns the text by which the hosts of one start recognize one another.

    It is RENGA_JOIN_SECRET or, if that is unset, the joined `worker_addresses`.
    """
    return read("RENGA_JOIN_SECRET") or ",".join(worker_addresses())


def mesh_bindings(*, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Returns gin bindings for the mesh of TPU_MESH_CONFIG and TPU_AXIS_NAMES; () if unset.

    Axes of MESH_AXES that are not named get degree 1.

    Raises:
      UserError: one is set without the other, or a value is wrong.
    """
    example = "TPU_MESH_CONFIG=4,2,2 TPU_AXIS_NAMES=data,fsdp,tensor"
    if not _are_set(("TPU_MESH_CONFIG", "TPU_AXIS_NAMES"), f"both, such as {example}, or neither", environ):
        return ()
    config, axes = (read(name, environ=environ) or "" for name in ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES"))
    degrees, names = ([part.strip() for part in text.split(",")] for text in (config, axes))
    problems = _mesh_problems(degrees, names)
    if problems:
        raise UserError(f"TPU_MESH_CONFIG={config} TPU_AXIS_NAMES={axes}:\n  " + "\n  ".join(problems))
    by_axis = dict.fromkeys(MESH_AXES, "1") | dict(zip(names, degrees, strict=True))
    return ("STRATEGY = @strategies.mesh3d()", *(f"strategies.mesh3d.{axis} = {n}" for axis, n in by_axis.items()))


def _mesh_problems(degrees: list[str], names: list[str]) -> list[str]:
    problems = []
    if len(degrees) != len(names):
        problems.append(f"{len(degrees)} degrees for {len(names)} axes: expected one for each")
    for name in names:
        if name in ("model", "mp"):
            problems.append(f"axis {name!r}: call it tensor")
        elif name not in MESH_AXES:
            wider = "; to use another one, bind STRATEGY in gin"
            problems.append(f"axis {name!r}: expected one of {', '.join(MESH_AXES)}{wider}")
    problems += [f"axis {name!r} is named {names.count(name)} times" for name in set(names) if names.count(name) > 1]
    for degree in degrees:
        if degree != "-1" and not (degree.isdecimal() and int(degree) >= 1):
            problems.append(f"degree {degree!r}: expected a whole number from 1 up, or -1 for the remaining chips")
    if degrees.count("-1") > 1:
        problems.append("more than one -1: only one axis can take the remaining chips")
    return problems


def import_root() -> Path:
    """Returns the folder from which our modules are imported."""
    return WORKSPACE.parent if PACKAGE else WORKSPACE


def run_root(*, environ: Mapping[str, str] | None = None) -> str:
    """Returns the folder of run directories: RENGA_RUN_ROOT, or `runs` in the working directory."""
    return (read("RENGA_RUN_ROOT", environ=environ) or "runs").rstrip("/")


def run_directory(
    experiment: str | Path, slice_name: str, *, level: str | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """Returns the default run directory of an experiment, such as `runs/quickstart-v4-16`.

    If the experiment file is not directly in the workspace's `gin/`, the name of its folder comes first:
    `runs/trm/sudoku4-v4-8`.

    Args:
      experiment: the experiment file.
      slice_name: the slice.
      level: the level of a check, which may add a suffix; None: a normal run.
      environ: environment variables; None: those of this process.
    """
    file = _found(experiment)
    group = "" if file.parent == WORKSPACE / "gin" else file.parent.name
    name = f"{file.stem}-{slice_name.replace(':', '-')}{OF_CHECKS.get(level, '')}"
    return "/".join(filter(None, (run_root(environ=environ), group, name)))


def former_run_directory(experiment: str | Path, *, environ: Mapping[str, str] | None = None) -> str:
    """Returns the default run directory of earlier versions, such as `runs/gin/quickstart`."""
    file = _found(experiment)
    is_ours = "://" in str(experiment) or file.is_relative_to(WORKSPACE)
    folder = (Path.cwd() if PACKAGE else WORKSPACE) if is_ours else file.parent
    root = read("RENGA_RUN_ROOT", environ=environ) or str(folder / "runs")
    return f"{root.rstrip('/')}/{file.parent.name}/{file.stem}"


def may_be_file(path: Path) -> bool:
    """Returns whether a path is a file, or is in a folder that this user may not enter: reading it says so."""
    try:
        return path.is_file()
    except PermissionError:
        return True


def _found(experiment: str | Path) -> Path:
    if "://" in str(experiment):
        return Path(experiment)
    places = (folder / experiment for folder in (Path.cwd(), WORKSPACE))
    return next((place for place in places if may_be_file(place)), Path(experiment)).resolve()


def require_named(run_dir: str | None, slice_: "Slice") -> None:
    """Requires a run directory for several hosts; simulated slices are exempt. Raises UserError if none is named."""
    if slice_.hosts > 1 and not (run_dir or read("RENGA_RUN_ROOT") or read("RENGA_SIMULATE")):
        raise UserError(
            f"{slice_.name} has {slice_.hosts} hosts, and no place for the run was named. Set RENGA_RUN_ROOT to "
            "gs://BUCKET/…, in which each run has a folder of its default name, or give --run-dir"
        )


def join_seconds(*, environ: Mapping[str, str] | None = None) -> int:
    """Returns how many seconds hosts wait for one another at the start."""
    return _integer("RENGA_JOIN_SECONDS", minimum=1, environ=environ) or JOIN_SECONDS


class Sent(NamedTuple):
    """The variables that a workstation sends to the hosts of TPUs, and the flags of XLA_FLAGS that it does not send."""

    variables: Mapping[str, str]
    left_out: Sequence[str]


def sent() -> Sent:
    """Returns the variables of SENT that are set, without flags in XLA_FLAGS that are not for TPUs.

    Raises UserError if a value would fail on the hosts.
    """
    join_seconds()
    variables = {name: value for name in SENT if (value := read(name))}
    flags = variables.pop("XLA_FLAGS", "").split()
    if flags and not flags[0].startswith("-"):
        raise UserError(f"XLA_FLAGS={flags[0]!r} is a file, which the hosts do not have: set XLA_FLAGS to its flags")
    left_out = [flag for flag in flags if flag.startswith(NOT_FOR_TPUS)]
    if kept := [flag for flag in flags if flag not in left_out]:
        variables["XLA_FLAGS"] = " ".join(kept)
    return Sent(variables, left_out)


def _are_set(names: Sequence[str], which: str, environ: Mapping[str, str] | None) -> bool:
    present = [name for name in names if read(name, environ=environ) is not None]
    missing = [name for name in names if name not in present]
    if present and missing:
        parts = [f"{' and '.join(some)} {'is' if len(some) == 1 else 'are'}" for some in (present, missing)]
        raise UserError(f"{parts[0]} set and {parts[1]} not: set {which}")
    return bool(present)


def _integer(name: str, *, minimum: int, environ: Mapping[str, str] | None) -> int | None:
    text = read(name, environ=environ)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < minimum:
        raise UserError(f"{name}={text!r}: expected a whole number from {minimum} up")
    return int(text)
