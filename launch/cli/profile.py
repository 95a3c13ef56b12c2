"""`launch/run profile`: prints a summary of a profile without TensorBoard."""

import argparse
from collections.abc import Sequence

from rich.table import Table

from core import units
from core.training import profile_reader
from core.training.profile_reader import HostProfile
from launch import flags, terminal

COMMAND = ("runs", "profile")
HELP = "print a summary of a profile: step time by host, skew, input wait, top operations, share of collectives"
EXAMPLE = "launch/run profile runs/quickstart-v4-16 --session step_100"
ABOUT_CPU = (
    "This run used CPU devices, which have no trace of their own: steps are those of the training loop, operations "
    "those of the threads that simulate chips. Collectives mostly wait for other threads on the same cores."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "RUN")
    parser.add_argument("--session", metavar="NAME", help="such as step_100 (default: the latest)")
    parser.add_argument(
        "--top", metavar="N", type=flags.at_least(1), default=12, help="number of operations to list (default: 12)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints a summary of the profiles of all hosts."""
    session, hosts = profile_reader.read_session(args.run_dir, args.session)
    console = terminal.console(120)
    console.print(f"[bold]{session}[/bold]: {_steps(hosts)} on {units.counted(len(hosts), 'host')}")
    console.print(_by_host(hosts))
    for line in (_skew(hosts), _missing(hosts)):
        if line:
            console.print(line)
    console.print(_operations(hosts, top=args.top))
    if not all(host.from_chips for host in hosts):
        console.print(ABOUT_CPU)
    return 0


def _steps(hosts: Sequence[HostProfile]) -> str:
    numbers = sorted({step for host in hosts for step in host.starts})
    return f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no steps"


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
    found = profile_reader.skew_seconds(hosts)
    if found is None:
        return ""
    seconds, last = found
    return f"skew: the last host starts a step {seconds * 1e3:.3g} ms after the first, mostly {last.name} (own clocks)"


def _missing(hosts: Sequence[HostProfile]) -> str:
    here = {host.process for host in hosts}
    count = max(max(host.processes for host in hosts), max(here) + 1)
    missing = [str(process) for process in range(count) if process not in here]
    return f"no profile from {'host' if len(missing) == 1 else 'hosts'} {', '.join(missing)}" if missing else ""


def _operations(hosts: Sequence[HostProfile], *, top: int) -> Table:
    rows = profile_reader.merged_operations(hosts)
    whole = sum(row.seconds for row in rows) or 1.0
    table = Table("operation", "share", "s, all chips", "count", "", box=None)
    for row in rows[:top]:
        kind = "collective" if row.is_collective else ""
        table.add_row(row.name, f"{row.seconds / whole:.1%}", f"{row.seconds:.4g}", f"{row.count:,}", kind)
    return table
