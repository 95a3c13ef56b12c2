"""Every environment variable that Renga reads, in one table; `launch/README.md` is generated from it.

A malformed value is an error that names the variable. An empty value counts as unset.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError

WORKSPACE = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str  # name of the variable
    meaning: str  # a short description
    default: str  # a description of the behaviour if it is unset; `read` returns None then
    readers: str  # the parts of Renga that read it
    secret: bool = False  # whether its value must never be printed, logged or put on a command line


VARIABLES: tuple[Variable, ...] = (
    Variable("RENGA_PYTHON", "the Python 3.11-3.13 that creates .venv", "the first one found", "launch/setup.sh"),
    Variable(
        "RENGA_RUN_ROOT",
        "root of run directories, local or gs://; a run goes to {group}/{experiment} in it",
        "runs; beside an experiment file outside the workspace",
        "launch",
    ),
    Variable("RENGA_SIMULATE", "the slice this process simulates a host of; set by --simulate", "unset", "launch"),
    Variable(
        "RENGA_STEP_FILE", "file in which this process notes its step for its log; set by pod.sh", "unset", "launch"
    ),
    Variable("RENGA_JOIN_SECONDS", "how long hosts wait for one another at the start", "300", "launch"),
    Variable("RENGA_TRACEBACK", "1: user errors are printed with a traceback", "unset", "launch"),
    Variable("RENGA_ALERT", "where alerts go: a shell command or https://…", "no alerts", "launch", secret=True),
    Variable("RENGA_NOTES", "folder for notes on failures, for alerts; set with RENGA_ALERT", "unset", "launch"),
    Variable("TPU_NAME", "as --tpu: the TPU to use, or A,B with one per slice", "unset", "launch/pod.sh"),
    Variable("TPU_ZONE", "as --zone", "unset", "launch/pod.sh"),
    Variable("TPU_PROJECT", "as --project", "gcloud's default", "launch/pod.sh"),
    Variable("TPU_MESH_CONFIG", "degrees of strategies.mesh3d, such as 4,2,2", "the experiment's STRATEGY", "launch"),
    Variable("TPU_AXIS_NAMES", "their axes, such as data,fsdp,tensor; with TPU_MESH_CONFIG", "unset", "launch"),
    Variable(
        "JAX_COORDINATOR_ADDRESS", "HOST:PORT of process 0; with the next two", "detected on a TPU", "launch, JAX"
    ),
    Variable("JAX_PROCESS_INDEX", "index of this process", "detected on a TPU", "launch"),
    Variable("JAX_PROCESS_COUNT", "number of processes", "detected on a TPU", "launch"),
    Variable("JAX_PLATFORMS", "platforms JAX may use, such as cpu", "all that JAX finds", "launch, JAX"),
    Variable("JAX_NUM_CPU_DEVICES", "CPU devices of one process", "1; a host's chips with --simulate", "JAX"),
    Variable("JAX_COMPILATION_CACHE_DIR", "folder for compiled programs, local or gs://", "RUN/compiled", "launch"),
    Variable("XDG_CACHE_HOME", "programs compiled for plans are kept in renga/plans in it", "~/.cache", "launch"),
    Variable("HF_TOKEN", "gives access to gated Hugging Face data", "unset", "tasks, launch/pod.sh", secret=True),
    Variable("WANDB_API_KEY", "account for Weights & Biases; read on host 0", "wandb's login", "wandb", secret=True),
    Variable("WANDB_MODE", "offline: Weights & Biases logs only to RUN/wandb", "online", "wandb"),
    Variable("TPU_WORKER_ID", "index of this host in its slice", "from the metadata server", "launch, libtpu"),
    Variable(
        "TPU_WORKER_HOSTNAMES", "hosts of this slice, comma-separated", "from the metadata server", "launch, libtpu"
    ),
    Variable("TPU_ACCELERATOR_TYPE", "slice of this host, such as v4-32", "from the metadata server", "launch, libtpu"),
    Variable("MEGASCALE_NUM_SLICES", "number of slices; set by --tpu A,B", "from the metadata server", "JAX, libtpu"),
    Variable("MEGASCALE_SLICE_ID", "index of this host's slice", "from the metadata server", "JAX, libtpu"),
    Variable(
        "MEGASCALE_COORDINATOR_ADDRESS", "address of host 0 of slice 0", "from the metadata server", "JAX, libtpu"
    ),
    Variable("TPU_SKIP_MDS_QUERY", "1: the metadata server is not queried", "unset", "launch, JAX, libtpu"),
    Variable("ALLOW_MULTIPLE_LIBTPU_LOAD", "1: several processes may load libtpu, to compile", "unset", "libtpu"),
    Variable("XLA_FLAGS", "flags of XLA; must be equal on all hosts", "unset", "launch, XLA"),
    Variable("LIBTPU_INIT_ARGS", "flags of libtpu; must be equal on all hosts", "unset", "launch, libtpu"),
    Variable("NO_COLOR", "any value: output has no escape codes", "colours on a terminal", "launch"),
    Variable("COLUMNS", "width of tables and errors", "the terminal's; errors at most 120", "launch"),
    Variable("EPATH_USE_TF", "0: gs:// without TensorFlow", "0, set by core/paths.py", "etils"),
)
COMPILED_BY = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # change a compiled program, besides the configuration
JOIN_SECONDS = 300
SENT = ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES")  # passed from a workstation to the hosts
MESH_AXES = ("data", "fsdp", "tensor")  # of strategies.mesh3d
_NAMES = {variable.name for variable in VARIABLES}


class ProcessLayout(NamedTuple):
    """The values of JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX and JAX_PROCESS_COUNT; None if unset."""

    coordinator: str | None
    index: int | None
    count: int | None


def read(name: str, *, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the value of a variable in VARIABLES, or None if it is unset or empty."""
    assert name in _NAMES, f"{name} is not in launch/environment.py"
    return (os.environ if environ is None else environ).get(name) or None


def process_layout(*, environ: Mapping[str, str] | None = None) -> ProcessLayout:
    """Reads JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX and JAX_PROCESS_COUNT (JAX itself ignores the last two).

    Raises:
      UserError: a value is malformed or out of range, or only some of the three are set.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_INDEX", "JAX_PROCESS_COUNT")
    if not _are_set(names, "all three, or none (on a TPU, JAX finds the hosts)", environ):
        return ProcessLayout(None, None, None)
    coordinator = read("JAX_COORDINATOR_ADDRESS", environ=environ)
    index = _integer("JAX_PROCESS_INDEX", minimum=0, environ=environ)
    count = _integer("JAX_PROCESS_COUNT", minimum=1, environ=environ)
    if index >= count:
        raise UserError(f"JAX_PROCESS_INDEX={index} but JAX_PROCESS_COUNT={count}: expected 0 to {count - 1}")
    if not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"JAX_COORDINATOR_ADDRESS={coordinator!r}: expected HOST:PORT, such as 10.0.0.2:8476")
    return ProcessLayout(coordinator, index, count)


def worker_addresses(*, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Returns the addresses of all hosts in order (TPU_WORKER_HOSTNAMES); empty if unset, or with several slices."""
    names = (read("TPU_WORKER_HOSTNAMES", environ=environ) or "").split(",")
    slices_ = read("MEGASCALE_NUM_SLICES", environ=environ) or "1"
    return tuple(name.strip() for name in names if name.strip()) if slices_ == "1" else ()


def mesh_bindings(*, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Returns TPU_MESH_CONFIG and TPU_AXIS_NAMES as gin bindings; none if unset. An unnamed axis has degree 1.

    Raises:
      UserError: one is set without the other, or their values are wrong; lists all problems.
    """
    example = "TPU_MESH_CONFIG=4,2,2 TPU_AXIS_NAMES=data,fsdp,tensor"
    if not _are_set(("TPU_MESH_CONFIG", "TPU_AXIS_NAMES"), f"both, such as {example}, or neither", environ):
        return ()
    config, axes = read("TPU_MESH_CONFIG", environ=environ), read("TPU_AXIS_NAMES", environ=environ)
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


def run_directory(experiment: str | Path, *, smoke: bool = False, environ: Mapping[str, str] | None = None) -> str:
    """Returns the default run directory of `experiment`: `$RENGA_RUN_ROOT/{group}/{experiment}`.

    The group is the folder of the experiment file. A smoke run has its own directory. If RENGA_RUN_ROOT is unset, it is
    `runs` in the workspace for the workspace's experiments, and otherwise `runs` beside the experiment file.
    """
    path = Path(experiment).resolve()
    is_ours = path.is_relative_to(WORKSPACE) or "://" in str(experiment)
    root = read("RENGA_RUN_ROOT", environ=environ) or str((WORKSPACE if is_ours else path.parent) / "runs")
    return f"{root.rstrip('/')}/{path.parent.name}/{path.stem}{'-smoke' if smoke else ''}"


def markdown_table() -> str:
    """Returns the table of environment variables in launch/README.md, as Markdown."""
    rows = ["| variable | meaning | when unset | read by |", "|---|---|---|---|"]
    for variable in VARIABLES:
        meaning = variable.meaning + (" (secret: never printed)" if variable.secret else "")
        rows.append(f"| `{variable.name}` | {meaning} | {variable.default} | {variable.readers} |")
    return "\n".join(rows) + "\n"


def join_seconds(*, environ: Mapping[str, str] | None = None) -> int:
    """Returns how long hosts wait for one another at the start (RENGA_JOIN_SECONDS). Raises UserError if malformed."""
    return _integer("RENGA_JOIN_SECONDS", minimum=1, environ=environ) or JOIN_SECONDS


def _are_set(names: Sequence[str], which: str, environ: Mapping[str, str] | None) -> bool:
    """Returns whether variables are set. Raises UserError, which says what to set, if only some are."""
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


HELP = "print all environment variables that Renga reads, with their values on this machine"
EXAMPLE = "launch/run environment"
README = WORKSPACE / "launch" / "README.md"
BEGIN, END = "<!-- environment: begin (launch/run environment --write) -->\n", "<!-- environment: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--write", action="store_true", help="update the table in launch/README.md")


def run(args: argparse.Namespace) -> int:
    """Prints the table, or writes it."""
    if args.write:
        README.write_text(updated(README.read_text()))
        return 0
    for variable in VARIABLES:
        value = read(variable.name)
        shown = "(set)" if value and variable.secret else value or f"unset: {variable.default}"
        print(f"{variable.name:<28} {shown}\n{'':<28}   {variable.meaning} [{variable.readers}]")
    return 0


def updated(text: str) -> str:
    """Returns the text of the README with its table updated."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + markdown_table() + END + rest.partition(END)[2]
