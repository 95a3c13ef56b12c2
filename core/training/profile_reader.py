"""Reads the profile of each host (.xplane.pb): step times, waiting for data, and time by operation.

A trace consists of planes, which hold lines of events. A TPU's plane has the lines "Steps" and "XLA Ops". A GPU's plane
has a line for each stream, whose kernels carry an `hlo_op`. Operations of CPU devices are events of threads in
/host:CPU. Steps on GPUs and CPUs are the training loop's own annotations.

No profile of a TPU or GPU was read; the names come from the profiler's documentation.
"""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from core.errors import UserError
from core.files import paths
from core.training import trainer
from core.training.profiling import PROFILES, SUFFIX

_CHIP = re.compile(r"^/device:(TPU|GPU):\d+$")
CONTAINERS = ("while", "conditional", "call")  # the operations inside them have their own events
COLLECTIVES = re.compile(r"^(all-|reduce-scatter|ragged-all-|collective-|async-collective|(send|recv)\b)")
_NAME = re.compile(r"%?([\w-]+)")
_PROCESS = re.compile(r"-p(\d+)(?:of(\d+))?(?:-\d+)?$")  # the end of a file's name, without suffix


class Operation(NamedTuple):
    """All executions of the operations with one name, on one host or on several.

    Attributes:
      name: without its number, such as `all-gather`.
      seconds: their durations, added.
      is_collective: whether they communicate between chips.
    """

    name: str
    seconds: float
    count: int  # type: ignore[assignment]  # hides tuple.count
    is_collective: bool


class HostProfile(NamedTuple):
    """The profile of one host.

    Attributes:
      name: name of the file, such as `hostname-p2of4`.
      process: index of the process, here 2; 0 if the name has none.
      processes: how many processes the run had, here 4; 0 if the name has none.
      chips: number of chips, or of CPU devices that ran operations.
      from_chips: whether operations come from planes of chips.
      starts: when each step began, in seconds since 1970.
      input_wait_seconds, hooks_seconds: time per step for waiting for data, and for hooks.
      seconds: from the start of the first step to that of the last; for a single step, to its end.
    """

    name: str
    process: int
    processes: int
    chips: int
    from_chips: bool
    starts: Mapping[int, float]
    input_wait_seconds: float
    hooks_seconds: float
    operations: Sequence[Operation]
    seconds: float

    @property
    def step_seconds(self) -> float | None:
        """Mean time from one step's start to the next; for a single step, its duration; None if there are no steps."""
        return self.seconds / max(len(self.starts) - 1, 1) if self.starts else None

    @property
    def collectives_share(self) -> float | None:
        """Share of the operations' time in collectives, waiting included; None if there are no operations."""
        whole = sum(operation.seconds for operation in self.operations)
        return sum(o.seconds for o in self.operations if o.is_collective) / whole if whole else None


def sessions(run_dir: str) -> list[str]:
    """Returns the names of a run's profiles, in order of their steps. Raises UserError if there are none."""
    folder = paths.resolve(run_dir).joinpath(*PROFILES)
    names = [session.name for session in folder.iterdir() if session.is_dir()] if folder.exists() else []
    if not names:
        raise UserError(
            f"{paths.resolve(run_dir)} has no profile: while the run is training, launch/pod.sh profile {run_dir} "
            "--seconds 5 makes one; PROFILE_STEPS = (100,) makes one at step 100"
        )
    return sorted(names, key=lambda name: (_number(name), name))


def _number(session: str) -> int:
    return int(found[0]) if (found := re.findall(r"\d+", session)) else -1


def read_session(run_dir: str, session: str | None = None) -> tuple[str, list[HostProfile]]:
    """Returns a session's name and its hosts' profiles.

    If `session` is None, it is the one with the latest steps. Raises UserError if there is no such profile, or it is
    empty.
    """
    names = sessions(run_dir)
    chosen = session or names[-1]
    if chosen not in names:
        raise UserError(f"there is no profile {chosen!r}; existing profiles: {', '.join(names)}")
    folder = paths.resolve(run_dir).joinpath(*PROFILES, chosen)
    files = [file for file in folder.iterdir() if file.name.endswith(SUFFIX)]
    if not files:
        raise UserError(f"{folder} contains no host's profile (*{SUFFIX})")
    hosts = [read(file.read_bytes(), name=file.name.removesuffix(SUFFIX), first_step=_number(chosen)) for file in files]
    return chosen, sorted(hosts, key=lambda host: (host.process, host.name))


def read(serialized: bytes, *, name: str, first_step: int = -1) -> HostProfile:
    """Parses the file of one host; `name` is the file's name without suffix.

    Steps before `first_step` are left out: the trace may have begun in one.
    """
    planes = list(jax.profiler.ProfileData.from_serialized_xspace(serialized).planes)
    chips = [plane for plane in planes if _CHIP.match(plane.name)]
    hosts = [plane for plane in planes if plane.name == "/host:CPU"]
    trace_began = began(planes)
    annotated = _annotated(hosts)
    found = _steps_of_chips(chips[:1]) or _steps_of_the_loop(annotated)
    spans = {step: span for step, span in found.items() if step >= first_step}
    starts = {step: start for step, (start, _) in spans.items()}
    first, last = min(starts.values(), default=0.0), max(starts.values(), default=0.0)
    if len(spans) == 1:
        last = max(end for _, end in spans.values())
    steps = max(len(starts) - 1, 1)

    def per_step(kind: str) -> float:
        inside = (event.duration_ns for event in annotated[kind] if first <= event.start_ns < last)
        return sum(inside) / 1e9 / steps

    run = list(_run_by_chips(chips) if chips else _run_by_cpu_devices(hosts))
    process = _PROCESS.search(name)
    return HostProfile(
        name=name,
        process=int(process[1]) if process else 0,
        processes=int(process[2] or 0) if process else 0,
        chips=len(chips) or len({device for _, _, device in run}),
        from_chips=bool(chips),
        starts={step: trace_began + start / 1e9 for step, start in sorted(starts.items())},
        input_wait_seconds=per_step(trainer.INPUT),
        hooks_seconds=per_step(trainer.HOOKS),
        operations=_summed(run),
        seconds=(last - first) / 1e9,
    )


def skew_seconds(hosts: Sequence[HostProfile]) -> tuple[float, HostProfile] | None:
    """Returns the mean skew between hosts, and the host that starts steps latest on average.

    The skew of a step is the time between the first and the last host's start, by the hosts' own clocks. The result is
    None for fewer than two hosts, or if they have no common step.
    """
    common = set.intersection(*(set(host.starts) for host in hosts)) if len(hosts) > 1 else set()
    if not common:
        return None
    late = {host.name: 0.0 for host in hosts}
    spread = 0.0
    for step in common:
        first = min(host.starts[step] for host in hosts)
        spread += max(host.starts[step] for host in hosts) - first
        for host in hosts:
            late[host.name] += host.starts[step] - first
    return spread / len(common), max(hosts, key=lambda host: late[host.name])


def merged_operations(hosts: Sequence[HostProfile]) -> list[Operation]:
    """Returns the operations of all hosts, added by name, in descending order of time."""
    by_name: dict[str, Operation] = {}
    for host in hosts:
        for row in host.operations:
            seen = by_name.get(row.name, Operation(row.name, 0.0, 0, row.is_collective))
            by_name[row.name] = seen._replace(seconds=seen.seconds + row.seconds, count=seen.count + row.count)
    return sorted(by_name.values(), key=lambda row: -row.seconds)


def began(planes: Sequence[Any]) -> float:
    """Returns when the trace began, in seconds since 1970; 0 if not recorded."""
    stats = {key: value for plane in planes if plane.name == "Task Environment" for key, value in plane.stats}
    return stats.get("profile_start_time", 0) / 1e9


def base_name(text: str) -> str:
    """Returns an operation's name without its number: `all-gather` for `%all-gather.7 = …`."""
    found = _NAME.match(text)
    return found[1] if found else text


def _annotated(hosts: Sequence[Any]) -> Mapping[str, list[Any]]:
    found: dict[str, list[Any]] = collections.defaultdict(list)
    for plane in hosts:
        for line in plane.lines:
            for event in line.events:
                if event.name in (trainer.STEP, trainer.INPUT, trainer.WAITING, trainer.HOOKS):
                    found[event.name].append(event)
    return found


def _steps_of_chips(chips: Sequence[Any]) -> dict[int, tuple[float, float]]:
    """Returns (start, end) by step, in ns; empty if steps were not recorded."""
    lines = [line for plane in chips for line in plane.lines if line.name == "Steps"]
    events = [event for line in lines for event in line.events if event.name.isdigit()]
    return {int(event.name): (event.start_ns, event.start_ns + event.duration_ns) for event in events}


def _steps_of_the_loop(annotated: Mapping[str, list[Any]]) -> dict[int, tuple[float, float]]:
    """Returns (start, end) by step, in ns; the end is when the loop finished the last step."""
    ends = [event.start_ns + event.duration_ns for event in (*annotated[trainer.STEP], *annotated[trainer.WAITING])]
    return {int(dict(event.stats)["step_num"]): (event.start_ns, max(ends)) for event in annotated[trainer.STEP]}


def _run_by_chips(chips: Sequence[Any]) -> Iterator[tuple[str, float, str]]:
    for plane in chips:
        lines = list(plane.lines)
        operations = [line for line in lines if line.name == "XLA Ops"]
        for line in operations:
            yield from ((event.name, event.duration_ns, plane.name) for event in line.events)
        for line in () if operations else lines:
            for event in line.events:
                if "hlo_op" in (stats := dict(event.stats)):
                    yield str(stats["hlo_op"]), event.duration_ns, plane.name


def _run_by_cpu_devices(hosts: Sequence[Any]) -> Iterator[tuple[str, float, str]]:
    for plane in hosts:
        for line in plane.lines:
            if not line.name.startswith("tf_XLA"):
                continue
            for event in line.events:
                stats = dict(event.stats) if event.duration_ns else {}
                if "hlo_op" in stats:
                    yield event.name, event.duration_ns, str(stats.get("device_ordinal"))


def _summed(run: Sequence[tuple[str, float, str]]) -> list[Operation]:
    seconds: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for text, nanoseconds, _ in run:
        name = base_name(text)
        if name not in CONTAINERS:
            seconds[name] += nanoseconds / 1e9
            counts[name] += 1
    rows = [Operation(name, total, counts[name], bool(COLLECTIVES.match(name))) for name, total in seconds.items()]
    return sorted(rows, key=lambda row: -row.seconds)
