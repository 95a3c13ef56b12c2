"""`launch/run tensorboard`: TensorBoard with the profile plugin over a run, on this machine only."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "open TensorBoard (scalars, config, profiles of every host) on a run directory"
EXAMPLE = "launch/run tensorboard runs/gin/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a run directory and a port."""
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, or a folder of them")
    parser.add_argument("--port", type=int, default=6006)


def run(args: argparse.Namespace) -> int:
    """Becomes TensorBoard."""
    command = ["--logdir", args.run_dir, "--host", "127.0.0.1", "--port", str(args.port)]
    print(f"TensorBoard on http://127.0.0.1:{args.port}/ (Ctrl-C ends it)", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *command])
    return 0
