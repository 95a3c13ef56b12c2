"""`launch/run agreement`: measures that strategies change no number, on this machine's CPU."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HELP = "measure how far every strategy's numbers are from one device's"
EXAMPLE = """launch/run agreement
  launch/run agreement --only fsdp zero1 --steps 20
  launch/run agreement --model mine:build --strategy mine:tensor_only@v4-8"""

PARTS = ("gradients", "losses", "params", "opt_state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is compared."""
    parser.add_argument("--steps", type=int, default=3, help="AdamW steps (default 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the shipped strategies")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="a function of no arguments that returns your model")
    parser.add_argument(
        "--strategy", metavar="MODULE:FUNCTION@SLICE", action="append", default=[], help="one of yours; repeatable"
    )
    parser.add_argument("--float32-only", action="store_true", help="leave the bfloat16 column out")


def run(args: argparse.Namespace) -> int:
    """Prints one row per strategy; 0 whatever they are: the tests hold the tolerances."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "16"
    sys.path.append(str(Path.cwd()))
    from launch import agreement

    examples = _examples(args, agreement)
    model = _load(args.model)() if args.model else agreement.MODEL
    columns = agreement.measure(model, examples, steps=args.steps, bfloat16=not args.float32_only)
    Console(width=120).print(_table(columns, args.steps))
    return 0


def _examples(args: argparse.Namespace, agreement: Any) -> dict[str, Any]:
    unknown = [name for name in args.only or () if name not in agreement.EXAMPLES]
    if unknown:
        raise ValueError(f"no strategy {', '.join(unknown)}; expected some of {', '.join(agreement.EXAMPLES)}")
    if args.only is None and args.strategy:
        chosen = {}
    else:
        chosen = {k: v for k, v in agreement.EXAMPLES.items() if args.only is None or k in args.only}
    for text in args.strategy:
        function, at, slice_name = text.rpartition("@")
        if not at:
            raise ValueError(f"--strategy {text!r}: expected MODULE:FUNCTION@SLICE, such as mine:tensor_only@v4-8")
        made = _load(function)()
        chosen[made.name] = agreement.Example(slice_name, made)
    return chosen


def _load(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r}: expected MODULE:FUNCTION, such as mine:build")
    return getattr(importlib.import_module(module), attribute)


def _table(rows: Any, steps: int) -> Table:
    table = Table(title=f"largest difference from one device after {steps} steps, absolute (ulp of the leaf)", box=None)
    for heading in ("strategy", "slice", *PARTS, "bfloat16 losses"):
        table.add_column(heading)
    for row in rows:
        cells = [f"{row.float32[p].absolute:.1e} ({row.float32[p].ulp:.0f})" for p in PARTS]
        narrow = f"{row.bfloat16['losses'].absolute:.1e}" if row.bfloat16 else "-"
        table.add_row(row.name, row.slice, *cells, narrow)
    return table
