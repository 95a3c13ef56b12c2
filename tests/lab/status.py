"""`tests/run.sh lab status`: generates STATUS.md, the table of capabilities and their tests, from the tests' markers.

A test marks the rows of the checklist (tests/capabilities.toml) that it covers; the markers are read from the tests'
source without running them. The column for accelerators is filled only from reports that were written on one: of
`launch/run check --level slice` (RUN/check.json) on a TPU, in tests/validated/, and of `tests/run.sh lab accelerator`,
in docs/results/accelerator/.
"""

import argparse
import ast
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError
from launch.environment import WORKSPACE
from tests.lab import accelerator_page

HELP = "print which capabilities the tests cover; --write updates STATUS.md"
EXAMPLE = "tests/run.sh lab status --write"
STATUS = WORKSPACE / "STATUS.md"
TESTS = WORKSPACE / "tests"
CAPABILITIES = TESTS / "capabilities.toml"
VALIDATED = TESTS / "validated"
VALIDATES = {  # rows of the checklist, by finding
    "all hosts": ("R01", "X01", "X03"),
    "attention": ("T08",),
    "speed": ("O03", "X06"),
    "data_parallel": ("M06",),
    "fsdp": ("M07",),
    "zero1": ("M08",),
    "tensor": ("M09",),
    "fsdp_tensor": ("M10", "M13"),
    "pipeline": ("M12",),
    "pipeline_fsdp": ("M13",),
    "pipeline_fsdp_tensor": ("M13",),
    "multislice": ("R11",),
}


class Marked(NamedTuple):
    """One test, with the arguments of its markers.

    Attributes:
      name: `tests/core/test_x.py::test_y`.
      covers: rows of the checklist that it covers.
      hosts: number of simulated hosts, 0 for none.
      slices: slices that it compiles for.
    """

    name: str
    covers: tuple[str, ...]
    hosts: int
    slices: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --write."""
    parser.add_argument("--write", action="store_true", help="update STATUS.md")


def run(args: argparse.Namespace) -> int:
    """Prints the page, or writes it."""
    page = render(capabilities(), list(marked_tests()), ran())
    if args.write:
        STATUS.write_text(page)
    else:
        print(page, end="")
    return 0


def capabilities(path: Path = CAPABILITIES) -> dict[str, str]:
    """Returns the names of the capabilities by row, in the order of the file."""
    groups = tomllib.loads(path.read_text())
    return {row: name for group in groups.values() for row, name in group.items()}


def covered_by(finding: str) -> tuple[str, ...]:
    """Returns the rows that a finding of a check at level slice (`launch.check.short_runs`) demonstrates."""
    is_strategy = finding.startswith("strategy ")
    return (*VALIDATES.get(finding.removeprefix("strategy "), ()), *(("C02", "C06") if is_strategy else ()))


def ran_on_tpu(folder: Path = VALIDATED) -> dict[str, str]:
    """Returns slice and date by row (`v4-32, 2026-05-01`) of the newest TPU report in which a finding for it is ok."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    ran = {}
    for report in sorted((r for r in reports if r["platform"] == "tpu"), key=lambda r: r["date"]):
        passed = [found for found in report["findings"] if found["ok"] and not found["is_note"]]
        ran |= {row: f"{report['slice']}, {report['date']}" for found in passed for row in covered_by(found["name"])}
    return ran


def ran() -> dict[str, str]:
    """Returns slice and date by row of the newest report of any accelerator."""
    return accelerator_page.ran() | ran_on_tpu()


def marked_tests(folder: Path = TESTS) -> Iterator[Marked]:
    """Yields every test below `folder` that covers a row, by its own markers or those of its class or module."""
    for path in sorted(folder.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        shared = _markers(_assigned(module, "pytestmark"))
        for names, markers in _tests(module, shared):
            covers = markers.get("covers", ())
            if covers:
                name = "::".join([path.relative_to(folder.parent).as_posix(), *names])
                yield Marked(name, covers, max(markers.get("simulated", (0,))), markers.get("compiled", ()))


Markers = Mapping[str, tuple]


def _tests(body: ast.Module | ast.ClassDef, inherited: Markers) -> Iterator[tuple[tuple[str, ...], Markers]]:
    for node in body.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield (node.name,), _joined(inherited, _markers(node.decorator_list))
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            markers = _joined(inherited, _markers(node.decorator_list))
            yield from (((node.name, *names), own) for names, own in _tests(node, markers))


def _assigned(module: ast.Module, name: str) -> list[ast.expr]:
    """Returns the expressions of a module-level `name = x` or `name = [x, …]`."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return []


def _markers(expressions: Iterable[ast.expr]) -> Markers:
    """Returns the constant arguments of every `pytest.mark.NAME(…)`, by name."""
    found: Markers = {}
    for call in expressions:
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("pytest.mark."):
            values = tuple(a.value for a in call.args if isinstance(a, ast.Constant))
            found = _joined(found, {call.func.attr: values})
    return found


def _joined(first: Markers, second: Markers) -> Markers:
    return {name: (*first.get(name, ()), *second.get(name, ())) for name in (*first, *second)}


def render(names: Mapping[str, str], tests: Iterable[Marked], ran: Mapping[str, str] | None = None) -> str:
    """Returns the page; `ran` gives by row where it ran on an accelerator.

    Raises:
      UserError: a test covers a row that is not in the checklist.
    """
    by_row: dict[str, list[Marked]] = {row: [] for row in names}
    for test in tests:
        for row in test.covers:
            if row not in names:
                raise UserError(f"{test.name} covers {row!r}, which tests/capabilities.toml does not have")
            by_row[row].append(test)
    shown = {row: found for row, found in by_row.items() if found}
    lines = [
        "# Status",
        "",
        "Generated from the tests' markers by `tests/run.sh lab status --write`; not written by hand.",
        "",
        _count(shown, total=len(names), ran=len((ran or {}).keys() & shown)),
        "",
        "| row | capability | unit | simulated on | compiled for | ran on an accelerator | shown by, in `tests/` |",
        "|---|---|---|---|---|---|---|",
        *(_line(row, names[row], found, (ran or {}).get(row, "never")) for row, found in shown.items()),
    ]
    if missing := [f"{row} {name}" for row, name in names.items() if row not in shown]:
        lines += ["", f"Not yet: {'; '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _count(shown: Mapping[str, list[Marked]], *, total: int, ran: int) -> str:
    simulated = sum(any(t.hosts for t in found) for found in shown.values())
    compiled = sum(any(t.slices for t in found) for found in shown.values())
    return (
        f"**{len(shown)} of {total} capabilities are shown by a test**, {simulated} of them on several simulated hosts "
        f"and {compiled} by the real TPU compiler. {ran} ran on an accelerator."
    )


def _line(row: str, name: str, found: list[Marked], ran: str) -> str:
    unit = "yes" if any(not t.hosts and not t.slices for t in found) else ""
    hosts = sorted({t.hosts for t in found if t.hosts})
    slices = list(dict.fromkeys(s for t in found for s in t.slices))
    simulated = f"{', '.join(map(str, hosts))} hosts" if hosts else ""
    files = list(dict.fromkeys(t.name.split("::")[0].removeprefix("tests/") for t in found))
    return f"| {row} | {name} | {unit} | {simulated} | {', '.join(slices)} | {ran} | {', '.join(files)} |"
