"""`launch/run environment`: lists the environment variables that Renga reads, with their values on this machine.

The table of launch/README.md is made from the same source, by --write.
"""

from __future__ import annotations

import argparse

from launch import environment

HELP = "print every environment variable that Renga reads, with its value here"
EXAMPLE = "launch/run environment"
README = environment.WORKSPACE / "launch" / "README.md"
BEGIN, END = "<!-- environment: begin (launch/run environment --write) -->\n", "<!-- environment: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="bring the table of launch/README.md up to date")


def run(args: argparse.Namespace) -> int:
    """Prints the table, or writes it."""
    if args.write:
        README.write_text(updated(README.read_text()))
        return 0
    for variable in environment.VARIABLES:
        value = environment.read(variable.name)
        shown = "(set)" if value and variable.secret else value or f"unset: {variable.default}"
        print(f"{variable.name:<28} {shown}\n{'':<28}   {variable.meaning} [{variable.readers}]")
    return 0


def updated(text: str) -> str:
    """Returns the text of the README with its table updated."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + environment.markdown_table() + END + rest.partition(END)[2]
