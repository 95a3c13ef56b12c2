"""`tests/run.sh lab seqio_tasks`: checks of seqio tasks that are too slow for tests, or need other packages.

Apache Beam needs an environment of its own (docs/how-to/tokenize.md). Without --beam, only the first start is timed.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from core.errors import UserError
from core.hosts import exit_codes
from launch import environment, flags

HELP = (
    "time the first start of a task of this workspace, and compare token caches of Apache Beam with those of a machine"
)
EXAMPLE = "tests/run.sh lab seqio_tasks --beam beam/bin/python"
_FIRST = """
import sys
from core.types import DataLayout
from tasks import text

own = {"length": 128, "num_streams": 8}
task = text.seqio(name="renga.python_source", **own) if sys.argv[1] == "seqio" else text.python_source(**own)
assert not [*task.problems(), *task.example_problems()]
task.prepare(sys.argv[2], is_host_zero=True)
next(task.train(DataLayout(32, tuple(range(32)), tuple(range(32))), seed=0))
assert not {"seqio", "tensorflow"} & set(sys.modules)
"""
_MODULE = """
import os, signal
import seqio, tensorflow as tf

FOLDER = os.environ["BEAM_TEXTS"]

@seqio.map_over_dataset
def line(text):
    return {"targets": text}

@seqio.map_over_dataset
def question(text):
    return {"inputs": tf.strings.substr(text, 0, 9), "targets": text}

@seqio.map_over_dataset(num_seeds=1)
def masked(example, seed):
    kept = tf.random.stateless_uniform(tf.shape(example["targets"]), seed) > 0.3
    return {"targets": tf.where(kept, example["targets"], 2)}

def ended(text):
    if b"line 1300" in text and not os.path.exists(f"{FOLDER}/ended"):
        open(f"{FOLDER}/ended", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return text

@seqio.map_over_dataset
def ends_once(example):
    return {"targets": tf.ensure_shape(tf.numpy_function(ended, [example["targets"]], tf.string), [])}

def add(name, preprocessors, *features):
    seqio.TaskRegistry.add(
        name,
        source=seqio.TextLineDataSource({"train": f"{FOLDER}/part-*.txt", "validation": f"{FOLDER}/part-0.txt"}),
        preprocessors=preprocessors,
        output_features={f: seqio.Feature(seqio.ByteVocabulary(), add_eos=f == "targets") for f in features},
    )

IDS = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
add("lines", [line, *IDS], "targets")
add("asked", [question, *IDS], "inputs", "targets")
add("random", [line, *IDS, masked], "targets")
add("ended", [line, ends_once, *IDS], "targets")
seqio.MixtureRegistry.add("mixed", [("lines", 1.0), ("random", 0.5)])
"""
_CASES = {  # of each task or mixture, its flags
    "asked": ("--inputs-length", "12"),
    "mixed": ("--epochs", "2"),
    "lines": ("--deduplicate", "--exclude-words", "7", "--exclude", "SET"),
    "ended": (),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the environment, the number of workers and the turns."""
    parser.add_argument("--beam", metavar="PYTHON", help="of an environment with Apache Beam")
    parser.add_argument("--workers", metavar="N", type=flags.at_least(1), default=2, help="of Beam (default: 2)")
    parser.add_argument("--turns", metavar="N", type=flags.at_least(1), default=7, help="of each spelling (default: 7)")


def run(args: argparse.Namespace) -> int:
    """Prints a line of JSON for each check. Exits with 1 if a cache of Beam differs."""
    problems = 0
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_first_starts(folder, args.turns)), flush=True)
        _write_sources(Path(folder))
        for name, own in (_CASES if args.beam else {}).items():
            found = _compare(Path(folder), name, own, args)
            problems += not found["same_bytes"]
            print(json.dumps(found), flush=True)
    return exit_codes.FAILED if problems else exit_codes.DONE


def _first_starts(folder: str, turns: int) -> dict[str, list[float]]:
    """Makes the first batch by `text.seqio` and `text.python_source`, in turns, each in a new process without a cache.

    Returns:
      The medians of CPU seconds and of seconds of both, and their ratios.
    """
    times: dict[str, list[tuple[float, float]]] = {"seqio": [], "constructor": []}
    for turn in range(turns):
        for how, found in times.items():
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run([sys.executable, "-c", _FIRST, how, f"{folder}/{how}{turn}"], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found.append((cpu, time.monotonic() - start))
    medians = {how: [statistics.median(each) for each in zip(*found, strict=True)] for how, found in times.items()}
    ratios = [ours / theirs for ours, theirs in zip(*medians.values(), strict=True)]
    return {name: [round(value, 3) for value in values] for name, values in {**medians, "ratio": ratios}.items()}


def _write_sources(folder: Path) -> None:
    (folder / "texts").mkdir()
    for part in range(4):
        lines = [f"part {part} line {number} with some text" for number in range(1500 + 7 * part)]
        lines[1::4] = [f"these words come again in line {number % 60}" for number in range(len(lines[1::4]))]
        (folder / "texts" / f"part-{part}.txt").write_text("\n".join(lines) + "\n")
    (folder / "set.txt").write_text("from part 1 line 7 with some text")
    (folder / "beam_tasks.py").write_text(_MODULE)


def _compare(folder: Path, name: str, own: tuple[str, ...], args: argparse.Namespace) -> dict[str, object]:
    """Writes the cache of a task on this machine and with Beam; returns figures of both."""
    marker = folder / "texts" / "ended"
    own = tuple(str(folder / "set.txt") if each == "SET" else each for each in own)
    marker.touch()  # no process is killed
    here, _, _ = _tokenize(folder, sys.executable, name, f"{name}-here", *own, "--processes", str(args.workers))
    marker.unlink()
    beam = (*own, "--processes", str(args.workers), "--runner", "DirectRunner")
    theirs, code, said = _tokenize(folder, args.beam, name, f"{name}-beam", *beam)
    found: dict[str, object] = {"task": name, "seconds_here": here, "seconds_beam": theirs, "first_exit_code": code}
    if name == "ended":
        found["error"] = next((line for line in said.splitlines() if line.startswith("error:")), said[-400:])
        found["parts_kept"] = len(list(folder.glob(f"{name}-beam/parts-*/*.npz")))
        found["seconds_again"], code, said = _tokenize(folder, args.beam, name, f"{name}-beam", *beam)
    if code:
        raise UserError(f"{name} with Beam ends with exit code {code}: {said[-2000:]}")
    one, two = (_content(folder / f"{name}-{how}") for how in ("here", "beam"))
    return (
        found
        | {"files": len(one), "bytes": sum(map(len, one.values())), "same_bytes": one == two}
        | {"left_out": re.findall(r"left out: (.*)", said)}
    )


def _tokenize(folder: Path, python: str, name: str, out: str, *own: str) -> tuple[float, int, str]:
    """Runs the command; returns its seconds, its exit code and what it said."""
    command = [python, *environment.COMMAND[1:], "tokenize", "--task", name, "--module", "beam_tasks"]
    command += ["--length", "48", "--out", str(folder / out), *own]
    path = os.pathsep.join([str(folder), str(environment.WORKSPACE)])
    variables = os.environ | {"PYTHONPATH": path, "BEAM_TEXTS": str(folder / "texts")}
    start = time.monotonic()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1800)
    return round(time.monotonic() - start, 1), done.returncode, done.stdout + done.stderr


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
