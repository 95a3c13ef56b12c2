"""Detects whether this machine is a host of a TPU slice, and which processes hold its chips."""

import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from core import slices, units
from core.errors import Problem, UserError
from launch import environment
from launch.findings import Finding

DEVICES = Path("/dev")
METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/instance"
METADATA_TIMEOUT_SECONDS = 0.5
METADATA_RETRY_SECONDS = (2.0, 2.0, 2.0)  # further tries if chips are present: one slow answer does not decide
_CHIPS = re.compile(r"/dev/(accel\d+|vfio/\d+)$")
_LOCK = "/tmp/libtpu_lockfile"


class Place(NamedTuple):
    """What `look` found out about the machine of this process."""

    on_tpu_host: bool  # whether it is a host of a TPU slice
    accelerator_type: str | None  # Google Cloud's name of the slice (`v4-32`); None if unknown
    looked_at: tuple[str, ...]  # a line for each source of evidence, with its answer


def look() -> Place:
    """Finds out whether this machine is a host of a TPU slice, and of which one.

    It asks the metadata server only if environment variables or files in DEVICES suggest a TPU.
    """
    names = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
    values = {name: environment.read(name) for name in names}
    looked_at = [f"environment: {name} {'is ' + value if value else 'is not set'}" for name, value in values.items()]
    accelerator_type, worker, hosts = values.values()
    by_environment = bool(accelerator_type or (worker and hosts))
    there = chips()
    looked_at.append(f"{DEVICES}: {len(there)} TPU-like devices" + (f" ({', '.join(there)})" if there else ""))
    if accelerator_type is None and (by_environment or there):
        accelerator_type, found = _metadata("attributes/accelerator-type", patient=bool(there))
        looked_at.append(f"metadata server: {found}")
    on_tpu_host = by_environment or (bool(there) and accelerator_type is not None)
    return Place(on_tpu_host, accelerator_type, tuple(looked_at))


def own_index(slice_: slices.Slice | None = None) -> int | None:
    """Returns the JAX process index that this host will have; None if unknown.

    `slice_` None: hosts of earlier slices are not counted.
    """
    is_job = slice_ is not None and not slice_.is_tpu and slice_.hosts > 1
    launcher = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if is_job else ()
    given = next(filter(None, map(environment.read, ("JAX_PROCESS_INDEX", *launcher))), None)
    worker = given or environment.read("TPU_WORKER_ID")
    if worker is None and chips():
        worker, _ = _metadata("attributes/agent-worker-number")
    if worker is None or not worker.isdigit():
        return None
    before = environment.read("MEGASCALE_SLICE_ID")
    if before is None and not given and slice_ is not None and slice_.num_slices > 1:
        variables, _ = _metadata("attributes/tpu-env")
        found = re.search(r"^\s*MEGASCALE_SLICE_ID\s*:\s*'?(\d+)", variables or "", re.MULTILINE)
        before = found and found[1]
    before = before or "0"
    if given or slice_ is None or not before.isdigit():
        return int(worker)
    return int(worker) + int(before) * slice_.single.hosts


def require_slice(slice_: slices.Slice, *, accelerator_type: str | None, where: str) -> None:
    """Raises UserError if a TPU is not of the slice that was asked for.

    `accelerator_type` None: unknown, and nothing is checked.
    """
    if accelerator_type is None:
        return
    try:
        actual = slices.get(accelerator_type)
    except UserError as error:
        raise UserError(f"{where} is a {accelerator_type}, which the slice table does not have: {error}") from error
    if actual != slice_.single:
        told, asked = (
            f"{s.name} ({units.counted(s.devices, 'device')} on {units.counted(s.hosts, 'host')})"
            for s in (actual, slice_)
        )
        raise UserError(
            f"{where} is a {told}, but SLICE is {asked}. "
            f"Give {f'{slice_.num_slices}x' * (slice_.num_slices > 1)}{actual.name} as the SLICE, or use another TPU."
        )


def require_here(slice_: slices.Slice) -> None:
    """Raises UserError if this machine does not seem to be a host of `slice_`."""
    place = look()
    if not place.on_tpu_host:
        examined = "\n  ".join(place.looked_at)
        raise UserError(
            "this machine is not a host of a TPU slice: run the same command on every host of one, or add --simulate:\n"
            f"  {examined}"
        )
    require_slice(slice_, accelerator_type=place.accelerator_type, where="this host's TPU")


def chip_holders(is_chip: re.Pattern = _CHIPS) -> Finding:
    """Checks whether processes, except this one and its parent, are seen to hold a chip of this host."""
    holders, unseen = {}, 0
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in (os.getpid(), os.getppid()):
            continue
        try:
            opened = [os.readlink(file) for file in (process / "fd").iterdir()]  # noqa: PTH115 (a socket is no path)
            if held := sorted({name for name in opened if is_chip.search(name) or name == _LOCK}):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                holders[process.name] = f"process {process.name} holds {', '.join(held)}: {command[:120]}"
        except PermissionError:
            unseen += 1
        except OSError:  # the process ended meanwhile
            continue
    if holders:
        fix = f"end it (kill {' '.join(sorted(holders, key=int))}), or wait for its run to end"
        return Finding("chips", False, Problem("; ".join(holders.values()), fix=fix))
    note = f"; {units.counted(unseen, 'process', 'processes')} of other users could not be inspected" if unseen else ""
    return Finding("chips", True, f"held by no other process{note}")


def chips() -> list[str]:
    """Returns the files in DEVICES that may be TPU chips: `accel0`, … or `vfio/0`, …."""
    found = [p for p in DEVICES.glob("accel[0-9]*") if not p.is_dir()] + list(DEVICES.glob("vfio/[0-9]*"))
    return sorted(str(p.relative_to(DEVICES)) for p in found)


def _metadata(path: str, *, patient: bool = False) -> tuple[str | None, str]:
    """Returns the metadata server's value at `path`, or None, and a line that says what it answered."""
    if environment.read("TPU_SKIP_MDS_QUERY"):
        return None, "not asked (TPU_SKIP_MDS_QUERY is set)"
    request = urllib.request.Request(f"{METADATA_URL}/{path}", headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: the server is local
    key, timeouts = path.rpartition("/")[2], (METADATA_TIMEOUT_SECONDS, *(METADATA_RETRY_SECONDS if patient else ()))
    for timeout in timeouts:
        try:
            with opener.open(request, timeout=timeout) as reply:
                value = reply.read().decode().strip() or None
                return value, f"{key} is {value or 'empty'}"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return None, f"{key} is not there"
        except (OSError, http.client.HTTPException):  # URLError and timeouts are OSErrors
            continue
    return None, f"no answer to {units.counted(len(timeouts), 'question')}"
