"""Findings of the checks of a run: one for each thing checked, merged over hosts and printed as one table."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launch import terminal

LAYOUT = "layout"  # the name of the finding on whether model, batch and strategy fit the slice


class Finding(NamedTuple):
    """The result of one check."""

    name: str  # name of the check
    ok: bool  # False if a run could not start because of it
    detail: str  # the result of the check
    fix: str = ""  # how to fix it, unless `detail` says so
    is_note: bool = False  # whether it is information only, or could not be checked

    @property
    def verdict(self) -> str:
        """The verdict as text: `FAIL`, `note` or `ok`."""
        return "FAIL" if not self.ok else "note" if self.is_note else "ok"


def merge(by_host: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merges the findings of all hosts: a finding that not all hosts share is prefixed with the hosts that have it."""
    names = list(dict.fromkeys(finding.name for findings in by_host for finding in findings))
    merged = []
    for name in names:
        said: dict[Finding, list[int]] = {}
        for host, findings in enumerate(by_host):
            for finding in findings:
                if finding.name == name:
                    said.setdefault(finding, []).append(host)
        for finding, hosts in said.items():
            whose = "" if len(hosts) == len(by_host) else f"host {', '.join(map(str, hosts))}: "
            merged.append(finding._replace(detail=whose + finding.detail))
    return merged


def is_ready(findings: Iterable[Finding]) -> bool:
    """Returns whether no check failed."""
    return all(finding.ok for finding in findings)


def table(findings: Sequence[Finding]) -> str:
    """Formats findings as a table; the last line is READY or NOT READY."""
    width = max((len(finding.name) for finding in findings), default=0)
    indent = "\n" + " " * (width + 8)
    lines = []
    for finding in findings:
        text = finding.detail + (f"\nfix: {finding.fix}" if finding.fix and (not finding.ok or finding.is_note) else "")
        text = terminal.wrapped(text, margin=width + 8)
        lines.append(f"{finding.verdict:<5} {finding.name:<{width}}  {text}".replace("\n", indent))
    failed = sum(not finding.ok for finding in findings)
    lines.append("READY" if not failed else f"NOT READY: {failed} of {len(findings)} checks failed")
    return "\n".join(lines)


def to_json(findings: Iterable[Finding]) -> str:
    """Returns the findings as JSON text, which `from_json` reads."""
    return json.dumps([finding._asdict() for finding in findings], indent=1)


def from_json(text: str) -> list[Finding]:
    """Parses the text that `to_json` returned."""
    return [Finding(**fields) for fields in json.loads(text)]
