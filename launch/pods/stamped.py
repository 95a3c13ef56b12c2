"""`python -m launch.pods.stamped LOG HOSTNAME COMMAND …`: runs a command; what it says goes to LOG, every line stamped.

What `pods/on_host.sh` starts a host's process with. The one idea: it outlives the command, whatever ends that, because
the last lines are those that matter; a signal to the process group is the command's to act on. Standard library only.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.pods import host_output, stamps


def run(log_path: Path, name: str, command: Sequence[str]) -> int:
    """Runs `command` to its end on the host of this name; returns its exit code, 128 + N where signal N ended it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    with tempfile.TemporaryDirectory(prefix="renga-step-") as folder:
        step_file = Path(folder) / "step"
        output = host_output.HostOutput(log_path, to_terminal=False, stamp=stamps.Stamp(name, step_file=step_file))
        process = subprocess.Popen(
            command,
            env={**os.environ, "RENGA_STEP_FILE": str(step_file)},
            stdin=subprocess.DEVNULL,
            stdout=output.child_end,
            stderr=output.child_end,
        )
        output.follow(title=f"--- {name}: {shlex.join(command)}")
        returncode = process.wait()
        output.finish()
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
