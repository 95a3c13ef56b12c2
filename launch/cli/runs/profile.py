"""`launch/run profile`: prints a summary of a profile without TensorBoard."""

from __future__ import annotations

import argparse

from launch.cli import flags

HELP = "print a profile: step time by host, skew, input wait, top operations, share of collectives"
EXAMPLE = "launch/run profile runs/gin/quickstart --session step_100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run directory, the session and the number of operations."""
    flags.add(parser, "RUN")
    parser.add_argument("--session", metavar="NAME", help="such as step_100 (default: the latest)")
    parser.add_argument("--top", metavar="N", type=int, default=12, help="number of operations to list (default: 12)")


def run(args: argparse.Namespace) -> int:
    """Reads the profiles of all hosts and prints them."""
    from core.training import profile_reader
    from launch.profile import report

    session, hosts = profile_reader.read_session(args.run_dir, args.session)
    report.show(session, hosts, top=args.top)
    return 0
