"""What a doctor writes down: one row for each thing looked at, and how the rows of all hosts become one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from launch import terminal
from launch.check.preflight_inputs import Finding


class Row(NamedTuple):
    """One thing looked at.

    Attributes:
      name: what.
      ok: whether a run could start as far as this goes.
      detail: what was found.
      fix: what to do about it, where it is not in `detail`.
      is_note: it could not be judged, or is only worth knowing.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    is_note: bool = False


def of_findings(findings: Iterable[Finding]) -> list[Row]:
    """What a check without a device found."""
    return [Row(f.name, f.ok, f.detail, "", f.is_note) for f in findings]


def merge(by_host: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of all hosts as one table: what all say alike once, else with the hosts that say it."""
    names = list(dict.fromkeys(row.name for rows in by_host for row in rows))
    merged = []
    for name in names:
        said: dict[Row, list[int]] = {}
        for host, rows in enumerate(by_host):
            for row in rows:
                if row.name == name:
                    said.setdefault(row, []).append(host)
        for row, hosts in said.items():
            whose = "" if len(hosts) == len(by_host) else f"host {', '.join(map(str, hosts))}: "
            merged.append(row._replace(detail=whose + row.detail))
    return merged


def is_ready(rows: Iterable[Row]) -> bool:
    """Whether nothing failed."""
    return all(row.ok for row in rows)


def table(rows: Sequence[Row]) -> str:
    """The table, with the verdict as its last line."""
    width = max((len(row.name) for row in rows), default=0)
    indent = "\n" + " " * (width + 8)
    lines = []
    for row in rows:
        verdict = "FAIL" if not row.ok else "note" if row.is_note else "ok"
        text = row.detail + (f"\nfix: {row.fix}" if row.fix and (not row.ok or row.is_note) else "")
        text = terminal.wrapped(text, margin=width + 8)
        lines.append(f"{verdict:<5} {row.name:<{width}}  {text}".replace("\n", indent))
    failed = sum(not row.ok for row in rows)
    lines.append("READY" if not failed else f"NOT READY: {failed} of {len(rows)} rows failed")
    return "\n".join(lines)


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """As JSON."""
    return [row._asdict() for row in rows]


def from_text(text: str) -> list[Row]:
    """What `json.dumps(to_json(rows))` was made of."""
    return [Row(**row) for row in json.loads(text)]
