"""`tests/run.sh lab surroundings`: trains in unusual surroundings, and compares each run with one in the usual ones.

Each run stops half-way, resumes in the same surroundings, and must end with the losses and the last checkpoint of the
usual run, bit for bit. `16 hosts` has a usual run of its own number of hosts.
"""

import argparse
import contextlib
import dataclasses
import locale
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from core.errors import UserError

HELP = "train with umask 077, other locales, one CPU, dead proxies, no HOME, a jumping clock, and on 16 hosts"
EXAMPLE = """tests/run.sh lab surroundings
  tests/run.sh lab surroundings --only umask "16 hosts" --out /tmp/surroundings"""
SLICE, LARGE = "v4-16", "v4-128"  # of 2 and 16 hosts
STOPPED_AT = 8
_OK, _BAD, _NOT_TRIED = "ok", "BAD", "not tried"
_LIMIT_SECONDS = 1800
_LOCALES = ("de_DE.UTF-8", "fr_FR.UTF-8", "es_ES.UTF-8", "it_IT.UTF-8", "nl_NL.UTF-8", "pt_BR.UTF-8", "ru_RU.UTF-8")
_JUMPS = """
import time

now, now_ns = time.time, time.time_ns


def ahead():  # a day behind, right, and a day ahead, three seconds each
    return (int(time.monotonic() / 3) % 3 - 1) * 24 * 3600


time.time = lambda: now() + ahead()
time.time_ns = lambda: now_ns() + ahead() * 10**9
"""
_SET_LOCALE = "import locale\nlocale.setlocale(locale.LC_ALL, '')\n"


class Unavailable(Exception):
    """This machine lacks what the surroundings need."""


@contextlib.contextmanager
def usual(folder: Path) -> Iterator[Mapping[str, str]]:
    """Changes nothing."""
    del folder
    yield {}


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Surroundings of a run.

    Attributes:
      name: row of the output.
      around: context in which its processes are started; gets a folder of its own and yields environment variables.
      without: environment variables that the processes lack.
      slice_name: the simulated slice.
      in_one_process: whether one process plays all hosts; otherwise the launcher starts one for each.
      bindings: additional gin bindings, also of the usual run.
    """

    name: str
    around: Callable[[Path], contextlib.AbstractContextManager[Mapping[str, str]]] = usual
    without: tuple[str, ...] = ()
    slice_name: str = SLICE
    in_one_process: bool = False
    bindings: tuple[str, ...] = ()

    @property
    def usual(self) -> "Surroundings":
        """The usual surroundings of the same command."""
        name = f"usual run on {self.slice_name}" + (" in one process" if self.in_one_process else "")
        return dataclasses.replace(self, name=name, around=usual, without=())

    def run_dir(self, folder: Path) -> Path:
        """Returns the run directory in the folder of all runs."""
        return folder / re.sub(r"\W+", "_", self.name)


def _variables(**more: str) -> Callable[[Path], contextlib.AbstractContextManager[Mapping[str, str]]]:
    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Mapping[str, str]]:
        del folder
        yield more

    return around


@contextlib.contextmanager
def _private_files(folder: Path) -> Iterator[Mapping[str, str]]:
    del folder
    before = os.umask(0o077)
    try:
        yield {}
    finally:
        os.umask(before)


@contextlib.contextmanager
def _one_cpu(folder: Path) -> Iterator[Mapping[str, str]]:
    del folder
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield {}
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _few_files(folder: Path) -> Iterator[Mapping[str, str]]:
    del folder
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        yield {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _customized(folder: Path, program: str) -> dict[str, str]:
    """Returns environment variables with which every Python process first runs a program."""
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def _has_decimal_comma(name: str) -> bool:
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        locale.setlocale(locale.LC_NUMERIC, name)
        return locale.localeconv()["decimal_point"] == ","
    except locale.Error:  # it is not installed
        return False
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)


@contextlib.contextmanager
def _decimal_comma(folder: Path) -> Iterator[Mapping[str, str]]:
    """A locale with a decimal comma, which every process also sets for the C library, as programs around ours may."""
    found = next(filter(_has_decimal_comma, _LOCALES), None)
    if found is None:
        raise Unavailable("no locale with a decimal comma: install one, or name its folder in LOCPATH")
    yield {"LC_ALL": found, "LANG": found, **_customized(folder, _SET_LOCALE)}


@contextlib.contextmanager
def _jumping_clock(folder: Path) -> Iterator[Mapping[str, str]]:
    """In Python's functions, the time of day jumps by a day, forth and back, every few seconds.

    libfaketime would also shift the deadlines of waits, which real jumps of a clock do not.
    """
    yield _customized(folder, _JUMPS)


_DEAD = "http://127.0.0.1:9"  # discard: nobody listens
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GRPC_PROXY")
ALL = (
    Surroundings("umask 077", _private_files),
    Surroundings("LANG=C", _variables(LANG="C", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")),
    Surroundings("a locale with a decimal comma", _decimal_comma),
    Surroundings("one CPU", _one_cpu),
    Surroundings("dead proxies", _variables(**{n: _DEAD for name in _PROXIES for n in (name, name.lower())})),
    Surroundings("no HOME", without=("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME"), in_one_process=True),
    Surroundings(
        "a HOME that does not exist", _variables(HOME="/nonexistent/home", XDG_CACHE_HOME=""), in_one_process=True
    ),
    Surroundings("256 open files", _few_files),
    Surroundings("a clock that jumps by a day", _jumping_clock),
    Surroundings("16 hosts", slice_name=LARGE, bindings=("BATCH_SIZE = 64", "NUM_STREAMS = 64")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the selection and the folder."""
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only those whose name contains one of these")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the runs there; default: a temporary folder")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each; returns 1 if a run did not end as in the usual surroundings, otherwise 0."""
    wanted = [one for one in ALL if not args.only or any(text in one.name for text in args.only)]
    if not wanted:
        names = "\n  ".join(one.name for one in ALL)
        raise UserError(f"--only {' '.join(args.only)}: no surroundings have such a name; there are:\n  {names}")
    if args.out is not None:
        return _try_all(wanted, args.out.resolve())
    with tempfile.TemporaryDirectory(prefix="renga-surroundings-") as folder:
        return _try_all(wanted, Path(folder))


def _try_all(wanted: list[Surroundings], folder: Path) -> int:
    ended: dict[str, str] = {}
    for one in wanted:
        usual_name = one.usual.name
        if usual_name not in ended:
            ended[usual_name] = _tried(one.usual, folder)
        if ended[usual_name] == _OK:
            ended[one.name] = _tried(one, folder)
        else:
            ended[one.name] = _say(_NOT_TRIED, one.name, f"{usual_name} failed")
    return int(_BAD in ended.values())


def _tried(one: Surroundings, folder: Path) -> str:
    """Trains, compares with the usual run if it is another one, and prints and returns how it ended."""
    from tests.lab import evidence

    try:
        seconds = _train(one, one.run_dir(folder))
        problem = "" if one == one.usual else evidence.difference(one.run_dir(folder), one.usual.run_dir(folder))
    except Unavailable as error:
        return _say(_NOT_TRIED, one.name, str(error))
    except Exception as error:  # the others are tried all the same
        return _say(_BAD, one.name, str(error) if isinstance(error, RuntimeError) else repr(error))
    return _say(_BAD, one.name, problem) if problem else _say(_OK, one.name, f"{seconds:.0f} s")


def _say(how: str, name: str, more: str) -> str:
    print(f"{how:<9} {name}: {more}", flush=True)
    return how


def _train(one: Surroundings, run_dir: Path) -> float:
    """Trains in two parts; returns the seconds of both. Raises RuntimeError if one fails or hangs."""
    from tests.lab import harness

    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="renga-around-") as around, one.around(Path(around)) as more:
        for steps in (STOPPED_AT, harness.TOTAL_STEPS):
            words = _words(one, run_dir, steps, (*harness.SMALL, f"TOTAL_STEPS = {harness.TOTAL_STEPS}"))
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "compiled"), **more}
            environment |= {"RENGA_SIMULATE": one.slice_name} if one.in_one_process else {}
            for name in one.without:
                environment.pop(name, None)
            with (run_dir / "output.log").open("ab") as log:
                try:
                    subprocess.run(words, env=environment, stdout=log, stderr=log, timeout=_LIMIT_SECONDS, check=True)
                except subprocess.CalledProcessError as error:
                    raise RuntimeError(f"exit code {error.returncode}: see {log.name}") from error
                except subprocess.TimeoutExpired as error:
                    raise RuntimeError(f"it did not end within {_LIMIT_SECONDS} s: see {log.name}") from error
    return time.monotonic() - began


def _words(one: Surroundings, run_dir: Path, steps: int, bindings: tuple[str, ...]) -> list[str]:
    from tests.lab import harness

    how = ["train"] if one.in_one_process else ["pod", one.slice_name]
    words = [sys.executable, "-m", "launch", *how, harness.EXPERIMENT, "--run-dir", str(run_dir), "--steps", str(steps)]
    words += [] if one.in_one_process else ["--simulate"]
    for binding in (*bindings, *one.bindings):
        words += ["--gin", binding]
    return words
