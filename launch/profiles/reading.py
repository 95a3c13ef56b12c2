"""What the profile of one host says of its steps and operations, from its .xplane.pb.

A trace is planes of lines of events. On a TPU every chip has a plane, /device:TPU:0, whose line "Steps" has an event
for each step and "XLA Ops" one for each operation. CPU devices have no plane: their operations stand among the threads
of /host:CPU, recognised by the name of the operation that they carry, and their steps are those that the training loop
annotated. The one idea: both become the same rows, and each says which it was made from.

The names of a TPU's planes and lines are those that the profiler documents; no TPU was at hand to try them on.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from core import paths
from core.training import trainer

PROFILES = ("tensorboard", "plugins", "profile")
SUFFIX = ".xplane.pb"

_CHIP = re.compile(r"^/device:TPU:\d+$")
_CONTAINERS = ("while", "conditional", "call")  # their bodies' operations are events of their own
_COLLECTIVES = re.compile(r"^(all-|reduce-scatter|ragged-all-|collective-|async-collective|(send|recv)\b)")
_NAME = re.compile(r"%?([\w-]+)")


class Operation(NamedTuple):
    """All executions of operations of one name, on all chips of a host."""

    name: str
    seconds: float
    count: int
    is_collective: bool


class HostProfile(NamedTuple):
    """What one file says.

    Attributes:
      name: of the file, as `hostname-p2`.
      process: 2.
      chips: how many have a plane, or for CPU devices how many ran operations.
      from_chips: whether steps and operations were read from planes of chips.
      starts: when each step began, in seconds since 1970 by this host's clock, by its number.
      input_wait_seconds, hooks_seconds: per step, by the training loop's annotations.
      operations: by the time they took, most first.
      seconds: from the start of the first step to that of the last; of a single step, to its end.
    """

    name: str
    process: int
    chips: int
    from_chips: bool
    starts: Mapping[int, float]
    input_wait_seconds: float
    hooks_seconds: float
    operations: Sequence[Operation]
    seconds: float

    @property
    def step_seconds(self) -> float | None:
        """The mean from one start to the next, or of a single step its own; None of a trace without steps."""
        return self.seconds / max(len(self.starts) - 1, 1) if self.starts else None

    @property
    def collectives_share(self) -> float | None:
        """Of the time of all operations, that of collectives, waiting for other chips included."""
        whole = sum(operation.seconds for operation in self.operations)
        return sum(o.seconds for o in self.operations if o.is_collective) / whole if whole else None


def sessions(run_dir: str) -> list[str]:
    """The profiles there are, oldest step first.

    Raises:
      ValueError: none, with how to make one.
    """
    folder = paths.resolve(run_dir).joinpath(*PROFILES)
    names = [session.name for session in folder.iterdir() if session.is_dir()] if folder.exists() else []
    if not names:
        raise ValueError(
            f"{paths.resolve(run_dir)} has no profile: launch/pod.sh profile {run_dir} --seconds 5 makes one while the "
            "run is going, PROFILE_STEPS = (100,) one at step 100"
        )
    return sorted(names, key=lambda name: (_number(name), name))


def _number(session: str) -> int:
    """Of `step_100` 100, its first step; -1 of a name without a number."""
    return int(found[0]) if (found := re.findall(r"\d+", session)) else -1


def read_session(run_dir: str, session: str | None = None) -> tuple[str, list[HostProfile]]:
    """The name of a session, the last unless given, and its hosts in their order.

    Raises:
      ValueError: there is no such session, or it is empty.
    """
    names = sessions(run_dir)
    chosen = session or names[-1]
    if chosen not in names:
        raise ValueError(f"there is no profile {chosen!r}; there are {', '.join(names)}")
    folder = paths.resolve(run_dir).joinpath(*PROFILES, chosen)
    files = [file for file in folder.iterdir() if file.name.endswith(SUFFIX)]
    if not files:
        raise ValueError(f"{folder} has no file of a host (*{SUFFIX})")
    hosts = [read(file.read_bytes(), name=file.name.removesuffix(SUFFIX), first_step=_number(chosen)) for file in files]
    return chosen, sorted(hosts, key=lambda host: (host.process, host.name))


def read(serialized: bytes, *, name: str, first_step: int = -1) -> HostProfile:
    """What the file of one host says; `name` is the file's, `hostname-p2`.

    Of steps before `first_step` a chip may still have run the end when the trace began: they are left out.
    """
    planes = list(jax.profiler.ProfileData.from_serialized_xspace(serialized).planes)
    chips = [plane for plane in planes if _CHIP.match(plane.name)]
    hosts = [plane for plane in planes if plane.name == "/host:CPU"]
    began = _began(planes)
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
    process = re.search(r"-p(\d+)", name)
    return HostProfile(
        name=name,
        process=int(process[1]) if process else 0,
        chips=len(chips) or len({device for _, _, device in run}),
        from_chips=bool(chips),
        starts={step: began + start / 1e9 for step, start in sorted(starts.items())},
        input_wait_seconds=per_step(trainer.INPUT),
        hooks_seconds=per_step(trainer.HOOKS),
        operations=_summed(run),
        seconds=(last - first) / 1e9,
    )


def _began(planes: Sequence[Any]) -> float:
    """When the trace began, in seconds since 1970; 0 where it does not say."""
    stats = {key: value for plane in planes if plane.name == "Task Environment" for key, value in plane.stats}
    return stats.get("profile_start_time", 0) / 1e9


def _annotated(hosts: Sequence[Any]) -> Mapping[str, list[Any]]:
    """The training loop's own annotations, by their name."""
    found: dict[str, list[Any]] = collections.defaultdict(list)
    for plane in hosts:
        for line in plane.lines:
            for event in line.events:
                if event.name in (trainer.STEP, trainer.INPUT, trainer.WAITING, trainer.HOOKS):
                    found[event.name].append(event)
    return found


def _steps_of_chips(chips: Sequence[Any]) -> dict[int, tuple[float, float]]:
    """When each step began and ended on the chip, where it says."""
    lines = [line for plane in chips for line in plane.lines if line.name == "Steps"]
    events = [event for line in lines for event in line.events if event.name.isdigit()]
    return {int(event.name): (event.start_ns, event.start_ns + event.duration_ns) for event in events}


def _steps_of_the_loop(annotated: Mapping[str, list[Any]]) -> dict[int, tuple[float, float]]:
    """When each step was dispatched by the training loop, and when the loop had last waited for one."""
    ends = [event.start_ns + event.duration_ns for event in (*annotated[trainer.STEP], *annotated[trainer.WAITING])]
    return {int(dict(event.stats)["step_num"]): (event.start_ns, max(ends)) for event in annotated[trainer.STEP]}


def _run_by_chips(chips: Sequence[Any]) -> Iterator[tuple[str, float, str]]:
    for plane in chips:
        for line in plane.lines:
            if line.name == "XLA Ops":
                yield from ((event.name, event.duration_ns, plane.name) for event in line.events)


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
    """Operations by their name without number: `%all-gather.7 = …` and `all-gather.8` are both all-gather."""
    seconds: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for text, nanoseconds, _ in run:
        found = _NAME.match(text)
        name = found[1] if found else text
        if name not in _CONTAINERS:
            seconds[name] += nanoseconds / 1e9
            counts[name] += 1
    rows = [Operation(name, total, counts[name], bool(_COLLECTIVES.match(name))) for name, total in seconds.items()]
    return sorted(rows, key=lambda row: -row.seconds)
