"""`launch/run tensorboard`: TensorBoard with the profile plugin, served on 127.0.0.1 only."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from core import extras
from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes, log_filters
from core.training import metrics
from launch import flags

COMMAND = ("runs", "tensorboard")
HELP = "open TensorBoard (scalars, config, profiles of every host) on a run directory"
EXAMPLE = "launch/run tensorboard runs/quickstart-v4-16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "RUN", help="a run directory, or a folder that contains several")
    parser.add_argument("--port", type=int, default=6006, help="on 127.0.0.1 (default: 6006)")


def run(args: argparse.Namespace) -> int:
    """Runs TensorBoard until it is stopped, and returns its exit code."""
    extras.require("tensorboard", extra="tensorboard", what="launch/run tensorboard")
    run_dir = paths.resolve(args.run_dir)
    _require_events(run_dir)
    with _labeled(run_dir) as folder:
        return _serve(os.fspath(folder), args.port)


def _require_events(folder: paths.Path) -> None:
    if not folder.exists():
        raise UserError(f"there is no folder {folder}: name a run directory, or a folder that contains several")
    found = paths.sizes(folder) if paths.is_remote(folder) else (path.name for path in Path(folder).rglob("*"))
    if not any("events.out.tfevents." in name or name.endswith(".xplane.pb") for name in found):
        raise UserError(
            f"{folder} contains no event files (events.out.tfevents.…), so TensorBoard would be empty. A run writes "
            "them from its start on; name its directory, or a folder that contains several"
        )


@contextlib.contextmanager
def _labeled(run_dir: paths.Path) -> Iterator[paths.Path | Path]:
    """Yields the folder to show; a link with the run's name gives TensorBoard its label."""
    events = run_dir / metrics.TENSORBOARD_NAME
    if paths.is_remote(run_dir) or not events.is_dir():
        yield run_dir
        return
    with tempfile.TemporaryDirectory(prefix="renga-tensorboard-") as folder:
        (Path(folder) / run_dir.name).symlink_to(events)
        (Path(folder) / "plugins").symlink_to(events / "plugins")  # the profile plugin follows no other link
        yield Path(folder)


def _serve(folder: str, port: int) -> int:
    command = ["--logdir", folder, "--host", "127.0.0.1", "--port", str(port)]
    print(f"TensorBoard on http://127.0.0.1:{port}/ (Ctrl-C stops it)", flush=True)
    running = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *command], stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C also reaches the child
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: running.send_signal(number))
    assert running.stderr is not None
    for line in running.stderr:
        sys.stderr.buffer.write(log_filters.without(line))
        sys.stderr.buffer.flush()
    return exit_codes.of_process(running.wait())
