"""Checks that all hosts of a run would do the same, and see the same run directory."""

from __future__ import annotations

import contextlib
import secrets
import time

from core import distributed, paths, units
from core.errors import UserError
from core.health import difference

_NONCE_FILE = ".shared"
_SHARED_FILE_SECONDS = 10.0  # network file systems may show a new file late


def require_same(what: str, text: str) -> None:
    """Raises UserError on all hosts, with the difference, if `text` differs between hosts."""
    if differing := difference.between_hosts(distributed.all_gather_text(what, text)):
        raise UserError(f"{what} differs between hosts (a minus is what the others have):\n{differing}")


def require_shared(run_dir: str, *, is_host_zero: bool) -> None:
    """Raises UserError on all hosts if host 0 cannot write into the run directory, or a host does not see the file."""
    directory = paths.resolve(run_dir)
    nonce = distributed.from_host_zero(secrets.token_hex(8))
    if refused := distributed.from_host_zero(_written(directory, nonce) if is_host_zero else ""):
        raise UserError(refused)
    answers = distributed.all_gather_text("run_dir/seen", "yes" if _sees(directory / _NONCE_FILE, nonce) else "no")
    blind = [str(i) for i, answer in enumerate(answers) if answer == "no"]
    if blind:
        raise UserError(
            f"the run directory {directory} is not shared: {units.counted(len(blind), 'host')} "
            f"({', '.join(blind)}) cannot see host 0's file there. "
            "Checkpoints need one place that all hosts see: set --run-dir (or RENGA_RUN_ROOT) to gs://BUCKET/…"
        )


def _written(directory, nonce: str) -> str:
    """Writes a file for the other hosts; returns the error, or nothing."""
    try:
        paths.require_writable(directory)
        paths.write_text_atomically(directory / _NONCE_FILE, nonce)
    except Exception as error:  # a bucket fails with its client's own types
        return str(error) if isinstance(error, UserError) else f"cannot write to {directory}: {error!r}"
    return ""


def _sees(file, nonce: str) -> bool:
    """Waits until `file` has the text that host 0 wrote; returns whether it does."""
    deadline = time.monotonic() + _SHARED_FILE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # whatever the error, this host cannot read the file
            if file.read_text() == nonce:
                return True
        time.sleep(0.2)
    return False
