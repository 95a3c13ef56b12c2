"""`launch/run golden`: compiles experiment files for their slices, and records or checks memory, FLOPs and times."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from core import units
from core.errors import UserError
from launch import prediction
from launch.plan import golden
from parallel.compiled import OutOfHbmError

HELP = "compile every experiment file for its slice, and record or check what it costs (tests/golden)"
EXAMPLE = """launch/run golden                        list what is recorded and what is not; compiles nothing
  launch/run golden --check quickstart     compile and print what changed; exit code 1 if anything did
  launch/run golden --write                compile what is not recorded, one by one; run again to resume
  launch/run golden --write --again valkyrie_7b"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments, as `launch/run golden` lists them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compile and print how the records differ; writes nothing")
    what.add_argument("--write", action="store_true", help="compile and record experiments without a current record")
    parser.add_argument("--again", action="store_true", help="with --write: compile recorded experiments too")


def run(args: argparse.Namespace) -> int:
    """Lists, checks or writes records. Returns 1 if some are missing or different, or could not be compiled."""
    if args.again and not args.write:
        raise UserError("--again needs --write: it says what --write compiles")
    files = golden.files()
    if unknown := sorted(set(args.names) - set(files)):
        raise UserError(f"no experiment {', '.join(unknown)}: there are {', '.join(files)}")
    names = args.names or list(files)
    if args.check:
        return _check(names)
    return _write(names, again=args.again) if args.write else _list(names)


def _list(names: list[str]) -> int:
    missing = [name for name in names if not golden.is_current(name)]
    for name in names:
        record = prediction.read(name)
        outdated = "recorded for another configuration or compiler" if record else "not recorded"
        print(f"{name:<24} {outdated if name in missing else prediction.line(record)}")
    if missing:
        print("launch/run golden --write compiles and records what is missing")
    return int(bool(missing))


def _check(names: list[str]) -> int:
    different = []
    for number, name in enumerate(names, start=1):
        after = _compiled(name, f"{number}/{len(names)}")
        if diff := golden.difference(name, prediction.read(name) or {}, after):
            different.append(name)
            print(diff, end="")
    as_recorded = f"{units.counted(len(names), 'experiment')} as recorded"
    print(f"different: {', '.join(different)}" if different else as_recorded)
    return int(bool(different))


def _write(names: list[str], *, again: bool) -> int:
    due = [name for name in names if again or not golden.is_current(name)]
    print(f"{len(names) - len(due)} of {len(names)} already recorded", flush=True)
    code = 0
    for number, name in enumerate(due, start=1):
        try:
            record = _compiled(name, f"{number}/{len(due)}")
        except OutOfHbmError as error:
            code = 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        golden.write(name, record)
        golden.write_published()
        print(f"  {prediction.line(record)}", flush=True)
    return code


def _compiled(name: str, position: str) -> dict[str, Any]:
    file, start = golden.files()[name], time.perf_counter()
    print(f"[{position}] compiling {file} …", end="", flush=True)
    record = golden.compile_record(file)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    for warning in record["warnings"]:
        print(f"  compiler warning: {warning}", flush=True)
    return record
