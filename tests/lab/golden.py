"""Records the compiler's results for every experiment file: tests/golden/NAME.json.

A record holds bytes, FLOPs, cycles, traffic by mesh axis and the predicted seconds, so that a change of code,
configuration or compiler is a diff of a few lines. It holds no times of this machine, and predictions are rounded:
equal programs have equal records.
"""

import argparse
import dataclasses
import difflib
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core import slices, units, versions
from core.errors import UserError
from launch import environment, program_identity
from launch.config import loader
from parallel import prediction as measured
from parallel.compiled import analysis, compiling
from parallel.compiled.compiling import OutOfHbmError
from parallel.planning import cost, records
from parallel.prediction import Prediction
from tests.lab import recorded_predictions

FOLDER = environment.WORKSPACE / "tests" / "golden"
_GIN = environment.WORKSPACE / "gin"

# Experiments of gin/ponder that are recorded for v4-64, too, and the bindings they need there for a row on every chip.
_ALSO_FOR_V4_64: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("base", "quick"), ("BATCH_SIZE = 32",)),
    **dict.fromkeys(("smollm2_135m", "gpt2", "gpt2_xl", "gemma3_1b", "gemma3_4b"), ()),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """The experiment that a record describes.

    Attributes:
      file: the experiment file, relative to the workspace.
      slice_name: in place of the file's own slice; None: that one.
      bindings: further gin bindings.
    """

    file: str
    slice_name: str | None = None
    bindings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The first words of the line of the file's header that has the prediction."""
        words = ["Predicted", *([f"for {self.slice_name}"] if self.slice_name else [])]
        return " ".join([*words, *(f"with {binding}" for binding in self.bindings)])

    def load(self) -> loader.LoadedConfig:
        """Returns the configuration."""
        return loader.load(self.file, bindings=self.bindings, slice_name=self.slice_name)


def files() -> dict[str, Source]:
    """Returns what is recorded, by the name of its record."""
    found = [*sorted(_GIN.glob("*.gin")), _GIN / "trm" / "suite.gin"]
    found += [*sorted((_GIN / "arrcoc").glob("v5p_*.gin")), *sorted((_GIN / "long").glob("*.gin"))]
    incomplete = [_GIN / "defaults.gin", *_GIN.glob("finetune*.gin")]  # the latter need the user's folder
    sources = {_name(path): Source(_file(path)) for path in found if path not in incomplete}
    for path in sorted((_GIN / "ponder").glob("*.gin")):
        if "\n# Run: " in path.read_text():  # the others are included by experiments
            sources[_name(path)] = Source(_file(path))
        if (needed := _ALSO_FOR_V4_64.get(path.stem)) is not None:
            sources[f"{_name(path)}_v4_64"] = Source(_file(path), "v4-64", needed)
    return sources


def _file(path: Path) -> str:
    return f"gin/{path.relative_to(_GIN)}"


def _name(path: Path) -> str:
    return "-".join(path.relative_to(_GIN).with_suffix("").parts)


def path(name: str) -> Path:
    """Returns the file of a record."""
    return FOLDER / f"{name}.json"


def read(name: str) -> dict[str, Any] | None:
    """Returns a record; None if there is none."""
    return json.loads(path(name).read_text()) if path(name).is_file() else None


def write(name: str, record: Prediction) -> None:
    """Writes a record, and the predictions that the product has of all records."""
    records.write(path(name), record)
    recorded_predictions.write(json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json")))


def difference(name: str, before: Prediction, after: Prediction) -> str:
    """Returns the changes as a unified diff; empty if there are none."""
    texts = [records.text_of(record).splitlines(keepends=True) for record in (before, after)]
    return "".join(difflib.unified_diff(*texts, f"{name}.json recorded", f"{name}.json now", n=1))


def is_current(name: str) -> bool:
    """Returns whether an experiment's record was made from its current configuration with the current compiler."""
    record = read(name)
    if record is None or record["versions"] != versions.installed(versions.COMPILER):
        return False
    config = files()[name].load()
    return record["fingerprint"] == program_identity.fingerprint(config.build(), config)


def compile_record(source: Source) -> dict[str, Any]:
    """Compiles an experiment for its slice and returns its record.

    Raises:
      OutOfHbmError: it does not fit.
      UserError: an MFU above 100 %: the model of time or the count of FLOPs is wrong.
    """
    config = source.load()
    experiment = config.build()
    slice_ = slices.get(experiment.slice)
    program = experiment.bind(compiling.devices_of(slice_))
    found = analysis.analyze(program)
    time, flops = cost.step_time(found, program), experiment.flops_per_step
    if flops:
        slice_.mfu(flops, seconds=time.hidden)
    figures = analysis.as_json(program, found)
    del figures["findings"]  # sentences of the report, not figures
    return figures | {
        "experiment": source.file,
        "fingerprint": program_identity.fingerprint(experiment, config),
        "program": compiling.trace_digest(program),
        "versions": versions.installed(versions.COMPILER),
        "tokens_per_step": experiment.tokens_per_step,
        "flops_per_step": flops,
        "predicted": cost.predicted(time, slice_, flops),
    }


def traced(source: Source) -> dict[str, str]:
    """Returns what a record says of an experiment's training step before it is compiled: its identity and digest."""
    config = source.load()
    experiment = config.build()
    program = experiment.bind(compiling.devices_of(slices.get(experiment.slice)))
    fingerprint = program_identity.fingerprint(experiment, config)
    return {"fingerprint": fingerprint, "program": compiling.trace_digest(program)}


def write_headers() -> None:
    """Updates the lines `# Predicted: …` of experiment files that have them."""
    for name, source in files().items():
        where, record = environment.WORKSPACE / source.file, read(name)
        if record is None:
            continue
        if (changed := with_header(where.read_text(), record, source.title)) != where.read_text():
            where.write_text(changed)


def with_header(text: str, record: Prediction, title: str = "Predicted") -> str:
    """Returns a gin text with the prediction in its header: a line `# Predicted:` and an indented one after it."""
    usable = units.size(record["memory"]["usable_bytes"], digits=4)
    unit = slices.get(record["slice"]).chip.unit
    lines = f"# {title}: {measured.figures(record)} of {usable} a {unit}; not run on a TPU\n"
    lines += f"#   ({measured.label(record)}).\n"
    return re.sub(rf"(?m)^# {re.escape(title)}:.*\n(#   .*\n)*", lambda _: lines, text, count=1)


HELP = "compile every experiment file for its slice, and record or check its memory and time (tests/golden)"
EXAMPLE = """tests/run.sh lab golden                        list what is recorded and what is not; compiles nothing
  tests/run.sh lab golden --check quickstart     compile and print the changes; exit code 1 if there are any
  tests/run.sh lab golden --trace                trace every step and compare its digest; compiles nothing
  tests/run.sh lab golden --write                compile what is not recorded, one by one; run again to resume
  tests/run.sh lab golden --write --again valkyrie_7b"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `lab golden`."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments, as `tests/run.sh lab golden` lists them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compile and print how the records differ; writes nothing")
    what.add_argument("--trace", action="store_true", help="trace each step and compare its digest with the record's")
    what.add_argument("--write", action="store_true", help="compile and record experiments without a current record")
    parser.add_argument("--again", action="store_true", help="with --write: compile recorded experiments too")


def run(args: argparse.Namespace) -> int:
    """Lists, checks or writes records. Returns 1 if some are missing or different, or could not be compiled."""
    if args.again and not args.write:
        raise UserError("--again is only valid together with --write")
    every = list(files())
    if unknown := sorted(set(args.names) - set(every)):
        raise UserError(f"no experiment {', '.join(unknown)}: there are {', '.join(every)}")
    names = args.names or every
    if args.check:
        return _check(names)
    if args.trace:
        return _trace(names)
    return _write(names, again=args.again) if args.write else _list(names)


def _list(names: list[str]) -> int:
    missing = [name for name in names if not is_current(name)]
    for name in names:
        record = read(name)
        outdated = "recorded for another configuration or compiler" if record else "not recorded"
        print(f"{name:<24} {outdated if name in missing else measured.line(record)}")
    if missing:
        print("tests/run.sh lab golden --write compiles and records the missing ones")
    return int(bool(missing))


def _check(names: list[str]) -> int:
    different = []
    for number, name in enumerate(names, start=1):
        after = _compiled(name, f"{number}/{len(names)}")
        if diff := difference(name, read(name) or {}, after):
            different.append(name)
            print(diff, end="")
    as_recorded = f"{units.counted(len(names), 'experiment')} as recorded"
    print(f"different: {', '.join(different)}" if different else as_recorded)
    return int(bool(different))


def _trace(names: list[str]) -> int:
    """Returns 1 if a step that is traced now is another program than the recorded one, or its identity is another."""
    different = []
    for name in names:
        record, found = read(name) or {}, traced(files()[name])
        changed = [key for key, value in found.items() if record.get(key) != value]
        different += [name] if changed else []
        print(f"{name:<24} {'another ' + ' and '.join(changed) if changed else 'as recorded'}", flush=True)
    return int(bool(different))


def _write(names: list[str], *, again: bool) -> int:
    due = [name for name in names if again or not is_current(name)]
    print(f"{len(names) - len(due)} of {len(names)} already recorded", flush=True)
    code = 0
    for number, name in enumerate(due, start=1):
        try:
            record = _compiled(name, f"{number}/{len(due)}")
        except OutOfHbmError as error:
            code = 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        write(name, record)
        write_headers()
        print(f"  {measured.line(record)}", flush=True)
    return code


def _compiled(name: str, position: str) -> dict[str, Any]:
    source, start = files()[name], time.perf_counter()
    print(f"[{position}] compiling {source.file} …", end="", flush=True)
    record = compile_record(source)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    for warning in record["warnings"]:
        print(f"  compiler warning: {warning}", flush=True)
    return record
