"""`launch/run slices`: prints the table of TPU slices."""

import argparse

from rich.table import Table

from core import slices, units
from core.slices import GIB
from launch import terminal

COMMAND = ("layouts", "slices")
HELP = "print the table of TPU slices: chips, hosts, topology, peak FLOP/s, memory"
EXAMPLE = "launch/run slices v4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="a generation or a slice, such as v5p or v4-32")


def run(args: argparse.Namespace) -> int:
    """Prints one slice, or those whose generation begins with the given text."""
    generations = [s for s in slices.SLICES.values() if s.generation.startswith(args.name)]
    chosen = generations or [slices.get(args.name)]
    table = Table("slice", "chips", "JAX devices", "hosts", "topology", "wraparound", "bf16 peak", "HBM", box=None)
    for s in chosen:
        wrap = ", ".join(axis for axis, w in zip("xyz", s.wraparound, strict=False) if w) or "no"
        memory = s.hbm_bytes / GIB
        hbm = f"{units.significant(memory / 1024)} TiB" if memory >= 1024 else f"{memory:.3g} GiB"
        counts = map(str, (s.chips, s.devices, s.hosts))
        table.add_row(s.name, *counts, s.topology_name, wrap, f"{units.significant(s.peak_flops / 1e15)} PF", hbm)
    terminal.console(100).print(table)
    return 0
