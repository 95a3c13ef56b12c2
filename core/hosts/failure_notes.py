"""Notes that the processes of a run leave in a folder when it fails: an exception, or the verdict of the hosts."""

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import library_errors
from core.files import foreign_json
from core.hosts import activity, exit_codes, heartbeat

_NOTE: Mapping[str, foreign_json.Kind] = {
    "kind": str,
    "host": (int, type(None)),
    "message": str,
    "step": int,
    "out_of_memory": bool,
    "time": float,
}
_LONGEST = 2000


@contextlib.contextmanager
def noting(folder: Path, host: int | None, *, silent: Collection[int] = ()) -> Iterator[None]:
    """Context that writes a note of an exception inside it, or of the hosts' verdict.

    Args:
      host: index of this process's host; None if unknown.
      silent: exit codes of exceptions that are not noted.
    """

    def write(kind: str, about: int | None, message: str, *, step: int | None, out_of_memory: bool = False) -> None:
        note = {"kind": kind, "host": about, "message": message, "time": time.time(), "out_of_memory": out_of_memory}
        note["step"] = activity.place().step if step is None else step
        part = folder / f".{kind}_{host}"
        with contextlib.suppress(OSError):  # the process that would read it has ended
            part.write_text(json.dumps(note))
            part.replace(folder / f"{kind}_{host}.json")

    heartbeat.on_verdict(lambda found: write("verdict", min(found.hosts), found.says, step=found.step))
    try:
        yield
    except Exception as error:
        if getattr(error, "exit_code", exit_codes.RAISED) not in silent:
            said, out_of_memory = f"{type(error).__name__}: {error}"[:_LONGEST], library_errors.is_out_of_memory(error)
            write("raised", host, said, step=getattr(error, "step", None), out_of_memory=out_of_memory)
        raise


def collect(folder: Path) -> list[dict[str, Any]]:
    """Reads and deletes the notes of a folder; returns the well-formed ones, oldest first."""
    notes = []
    for file in folder.glob("*.json"):
        with contextlib.suppress(foreign_json.MalformedError):
            notes.append(foreign_json.load_object(file.read_bytes(), _NOTE))
        file.unlink()
    return sorted(notes, key=lambda note: note["time"])


def cause(notes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the note that names the cause of a failure; without notes, an empty one.

    It is the exception of the host that the verdict names, else the verdict, else the first exception.
    """
    verdicts = [note for note in notes if note["kind"] == "verdict"]
    raised = [note for note in notes if note["kind"] == "raised"]
    named = [note for note in raised if verdicts and note["host"] == verdicts[0]["host"]]
    return next(iter([*named, *verdicts, *raised]), {"host": None, "message": "", "step": 0, "out_of_memory": False})
