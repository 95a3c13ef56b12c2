"""A profile in the terminal: step time by host, who was late, what waits for data, which operations took the time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from core import units
from launch import terminal
from launch.profiles.reading import HostProfile, Operation

ABOUT_CPU = (
    "The devices are of the CPU: they have no trace of their own. Steps are those of the training loop, operations "
    "those of the threads that play the chips; a collective's time is mostly waiting for others that share the cores."
)


def show(session: str, hosts: Sequence[HostProfile], *, top: int) -> None:
    """Prints everything."""
    console = terminal.console(120)
    console.print(f"[bold]{session}[/bold]: {_steps(hosts)} on {units.counted(len(hosts), 'host')}")
    console.print(_by_host(hosts))
    for line in (_skew(hosts), _missing(hosts)):
        if line:
            console.print(line)
    console.print(_operations(hosts, top=top))
    if not all(host.from_chips for host in hosts):
        console.print(ABOUT_CPU)


def skew_seconds(hosts: Sequence[HostProfile]) -> tuple[float, HostProfile] | None:
    """How far behind the first host the last one began a step, on average, and which one it mostly was.

    None where fewer than two hosts have a step in common. Hosts are compared by their own clocks.
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


def merged(hosts: Sequence[HostProfile]) -> list[Operation]:
    """The operations of all hosts, most time first."""
    by_name: dict[str, Operation] = {}
    for host in hosts:
        for row in host.operations:
            seen = by_name.get(row.name, Operation(row.name, 0.0, 0, row.is_collective))
            by_name[row.name] = seen._replace(seconds=seen.seconds + row.seconds, count=seen.count + row.count)
    return sorted(by_name.values(), key=lambda row: -row.seconds)


def _steps(hosts: Sequence[HostProfile]) -> str:
    numbers = sorted({step for host in hosts for step in host.starts})
    return f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no step"


def _by_host(hosts: Sequence[HostProfile]) -> Table:
    table = Table("host", "chips", "steps", "s per step", "waits for data", "hooks", "collectives", box=None)
    for host in hosts:
        share = host.collectives_share
        table.add_row(
            host.name,
            str(host.chips),
            f"{min(host.starts)}-{max(host.starts)}" if host.starts else "none",
            "?" if host.step_seconds is None else f"{host.step_seconds:.4g}",
            _seconds(host, host.input_wait_seconds),
            _seconds(host, host.hooks_seconds),
            "?" if share is None else f"{share:.0%} of op time",
        )
    return table


def _seconds(host: HostProfile, seconds: float) -> str:
    if host.step_seconds is None:
        return "?"
    return f"{seconds:.4g} s ({seconds / host.step_seconds:.0%})"


def _skew(hosts: Sequence[HostProfile]) -> str:
    found = skew_seconds(hosts)
    if found is None:
        return ""
    seconds, last = found
    return f"skew: the last host begins a step {seconds * 1e3:.3g} ms behind the first, mostly {last.name} (own clocks)"


def _missing(hosts: Sequence[HostProfile]) -> str:
    here = {host.process for host in hosts}
    missing = [str(process) for process in range(max(here)) if process not in here]
    return f"missing: host {', '.join(missing)} wrote no file" if missing else ""


def _operations(hosts: Sequence[HostProfile], *, top: int) -> Table:
    rows = merged(hosts)
    whole = sum(row.seconds for row in rows) or 1.0
    table = Table("operation", "share", "s, all chips", "times", "", box=None)
    for row in rows[:top]:
        kind = "collective" if row.is_collective else ""
        table.add_row(row.name, f"{row.seconds / whole:.1%}", f"{row.seconds:.4g}", f"{row.count:,}", kind)
    return table
