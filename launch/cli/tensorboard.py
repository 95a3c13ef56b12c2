"""`launch/run tensorboard`: TensorBoard with the profile plugin, reachable from this machine only."""

import argparse
import signal
import subprocess
import sys

from core import library_noise
from core.health import exit_codes
from launch import flags

HELP = "open TensorBoard (scalars, config, profiles of every host) on a run directory"
EXAMPLE = "launch/run tensorboard runs/quickstart-v4-16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "RUN", help="a run directory, or a folder that contains several")
    parser.add_argument("--port", type=int, default=6006, help="on 127.0.0.1 (default: 6006)")


def run(args: argparse.Namespace) -> int:
    """Runs TensorBoard until it is stopped; its messages are printed without the known noise of TensorFlow."""
    command = ["--logdir", args.run_dir, "--host", "127.0.0.1", "--port", str(args.port)]
    print(f"TensorBoard on http://127.0.0.1:{args.port}/ (Ctrl-C stops it)", flush=True)
    running = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *command], stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches both processes
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: running.send_signal(number))
    for line in running.stderr:
        sys.stderr.buffer.write(library_noise.without(line))
        sys.stderr.buffer.flush()
    return exit_codes.of_process(running.wait())
