"""`launch/run profile`: what a profile says, without TensorBoard."""

from __future__ import annotations

import argparse

HELP = "print a profile: step time by host, skew, input wait, top operations, share of collectives"
EXAMPLE = "launch/run profile runs/gin/quickstart --session step_100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a run directory, which session, and how much to print."""
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, local or gs://")
    parser.add_argument("--session", metavar="NAME", help="such as step_100; default: that of the last step")
    parser.add_argument("--top", metavar="N", type=int, default=12, help="operations to list (default: 12)")


def run(args: argparse.Namespace) -> int:
    """Reads the files of all hosts and prints."""
    from launch.profiles import page, reading

    session, hosts = reading.read_session(args.run_dir, args.session)
    page.show(session, hosts, top=args.top)
    return 0
