"""`launch/run agreement`: measures that strategies change no number, on this machine's CPU."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

HELP = "measure how far every strategy's numbers are from one device's"
EXAMPLE = """launch/run agreement
  launch/run agreement --only fsdp zero1 --steps 20
  launch/run agreement --processes 2 4
  launch/run agreement --model trm
  launch/run agreement --model mine:build --strategy mine:tensor_only@v4-8"""

PARTS = ("gradients", "losses", "params", "opt_state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is compared."""
    parser.add_argument("--steps", type=int, default=3, help="AdamW steps (default 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the shipped strategies")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="transformer (default) or trm, or MODULE:FUNCTION, a function of no arguments that returns your model",
    )
    parser.add_argument(
        "--strategy", metavar="MODULE:FUNCTION@SLICE", action="append", default=[], help="one of yours; repeatable"
    )
    parser.add_argument("--float32-only", action="store_true", help="leave the bfloat16 column out")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="also with the chips of each slice shared among N processes, a column for each N",
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # as one of those processes


def run(args: argparse.Namespace) -> int:
    """Prints one row per strategy; 0 whatever they are: the tests hold the tolerances."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.into is None:
        os.environ["JAX_NUM_CPU_DEVICES"] = "16"
    sys.path.append(str(Path.cwd()))
    from launch import agreement

    examples = _examples(args, agreement)
    model = agreement.MODELS.get(args.model or "transformer") or _load(args.model)()
    if args.into:
        agreement.record(model, examples, steps=args.steps, into=args.into)
        return 0
    _check(args, examples)
    rows = agreement.measure(model, examples, steps=args.steps, bfloat16=not args.float32_only)
    for processes in args.processes:
        command = [sys.executable, "-m", "launch", "agreement", *_passed_on(args)]
        held = {row.name: examples[row.name] for row in rows if not row.refused}
        found = agreement.measure_played(model, held, steps=args.steps, processes=processes, command=command)
        rows = [row if row.refused else row._replace(played={**row.played, processes: found[row.name]}) for row in rows]
    console = Console(width=170)
    console.print(_table([row for row in rows if not row.refused], args))
    for row in rows:
        if row.refused:
            console.print(f"{row.name} on {row.slice} is refused: {row.refused}", markup=False, highlight=False)
    return 0


def _check(args: argparse.Namespace, examples: dict[str, Any]) -> None:
    from core import slices

    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: expected at least 1")
    for processes in args.processes:
        odd = {e.slice for e in examples.values() if processes < 1 or slices.get(e.slice).chips % processes}
        if odd:
            raise ValueError(f"--processes {processes}: cannot share the chips of {', '.join(sorted(odd))} evenly")


def _passed_on(args: argparse.Namespace) -> list[str]:
    """What a process must be told, but for which examples it runs."""
    model = ["--model", args.model] if args.model else []
    return ["--steps", str(args.steps), *model, *(a for text in args.strategy for a in ("--strategy", text))]


def _examples(args: argparse.Namespace, agreement: Any) -> dict[str, Any]:
    """By name: those asked for with --only, of ours and the user's; else the user's, or where there are none, ours."""
    mine = dict(_own(text, agreement) for text in args.strategy)
    known = {**agreement.EXAMPLES, **mine}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise ValueError(f"no strategy {', '.join(unknown)}; expected some of {', '.join(known)}")
    if args.into:
        return {name: known[name] for name in args.only}
    return {**({k: known[k] for k in args.only} if args.only else {}), **mine} or known


def _own(text: str, agreement: Any) -> tuple[str, Any]:
    function, at, slice_name = text.rpartition("@")
    if not at:
        raise ValueError(f"--strategy {text!r}: expected MODULE:FUNCTION@SLICE, such as mine:tensor_only@v4-8")
    made = _load(function)()
    return made.name, agreement.Example(slice_name, made)


def _load(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r}: expected MODULE:FUNCTION, such as mine:build")
    return getattr(importlib.import_module(module), attribute)


def _table(rows: Any, args: argparse.Namespace) -> Table:
    title = f"largest difference from one device after {args.steps} steps, absolute (ulp of the leaf)"
    table = Table(title=title, box=box.MARKDOWN)
    headings = ["strategy", "slice", *PARTS, *(f"params, {n} processes" for n in args.processes)]
    for heading in (*headings, *([] if args.float32_only else ["bfloat16 losses"])):
        table.add_column(heading)
    for row in rows:
        cells = [_cell(row.float32[part]) for part in PARTS] + [_cell(apart["params"]) for apart in row.played.values()]
        narrow = f"{row.bfloat16['losses'].absolute:.1e}" if row.bfloat16 else "–"
        table.add_row(row.name, row.slice, *cells, *([] if args.float32_only else [narrow]))
    return table


def _cell(apart: Any) -> str:
    return f"{apart.absolute:.1e} ({apart.ulp:.0f})"
