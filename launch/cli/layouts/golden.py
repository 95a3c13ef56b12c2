"""`launch/run golden`: compiles experiment files for their slices, and records or checks what they cost."""

from __future__ import annotations

import argparse
import os
import sys
import time

from core.errors import UserError

HELP = "compile every experiment file for its slice, and record or check what it costs (tests/golden)"
EXAMPLE = """launch/run golden                        list what is recorded and what is not; compiles nothing
  launch/run golden --check quickstart     compile and print what changed; exit code 1 if anything did
  launch/run golden --write                compile what is not recorded, one by one; run again to resume
  launch/run golden --write --again valkyrie_7b"""

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments, as `launch/run golden` lists them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compile and print how the records differ; writes nothing")
    what.add_argument("--write", action="store_true", help="compile and record experiments without a current record")
    parser.add_argument("--again", action="store_true", help="with --write: compile recorded experiments too")


def run(args: argparse.Namespace) -> int:
    """Lists, checks or writes records."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.again and not args.write:
        raise UserError("--again needs --write: it says what --write compiles")
    from launch.plan import golden
    from parallel.hlo import messages

    os.environ.update(messages.AUDIBLE_WARNINGS)
    files = golden.files()
    if unknown := sorted(set(args.names) - set(files)):
        raise UserError(f"no experiment {', '.join(unknown)}: there are {', '.join(files)}")
    names = args.names or list(files)
    if args.check:
        return _check(names)
    if args.write:
        return _write(names, again=args.again)
    return _list(names)


def _list(names: list[str]) -> int:
    from launch import prediction
    from launch.plan import golden

    missing = False
    for name in names:
        record, current = prediction.read(name), golden.is_current(name)
        missing |= not current
        state = (
            prediction.line(record)
            if current
            else "not recorded"
            if record is None
            else "recorded for another configuration or compiler"
        )
        print(f"{name:<24} {state}")
    if missing:
        print("launch/run golden --write compiles and records what is missing")
    return DIFFERENT if missing else 0


def _check(names: list[str]) -> int:
    from core import units
    from launch import prediction
    from launch.plan import golden

    different = []
    for number, name in enumerate(names, start=1):
        before = prediction.read(name)
        after = _compiled(name, f"{number}/{len(names)}")
        if diff := golden.difference(name, before or {}, after):
            different.append(name)
            print(diff, end="")
    print(
        f"different: {', '.join(different)}" if different else f"{units.counted(len(names), 'experiment')} as recorded"
    )
    return DIFFERENT if different else 0


def _write(names: list[str], *, again: bool) -> int:
    from launch import prediction
    from launch.plan import golden
    from parallel.compiled import OutOfHbmError

    due = [name for name in names if again or not golden.is_current(name)]
    print(f"{len(names) - len(due)} of {len(names)} already recorded", flush=True)
    failed = 0
    for number, name in enumerate(due, start=1):
        try:
            record = _compiled(name, f"{number}/{len(due)}")
        except OutOfHbmError as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        golden.write(name, record)
        golden.write_published()
        print(f"  {prediction.line(record)}", flush=True)
    return DIFFERENT if failed else 0


def _compiled(name: str, position: str) -> dict:
    from launch.plan import golden

    file, start = golden.files()[name], time.perf_counter()
    print(f"[{position}] compiling {file} …", end="", flush=True)
    record = golden.compile_record(file)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    for warning in record["warnings"]:
        print(f"  compiler warning: {warning}", flush=True)
    return record
