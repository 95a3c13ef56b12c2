"""Results of a run's checks, merged over hosts and printed as a table."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from core.errors import Problem
from launch import terminal

LAYOUT = "layout"  # name of the finding that says whether model, batch and strategy fit the slice


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      name: name of the check.
      ok: whether it passed.
      detail: the result, as text or as a `Problem`.
      is_note: whether it is only information, or could not be checked.
      phase: number of the phase that was checked; None if the name is enough.
    """

    name: str
    ok: bool
    detail: str | Problem
    is_note: bool = False
    phase: int | None = None

    @classmethod
    def failed(cls, name: str, error: Exception) -> Self:
        """Returns the finding of a check that raised an error."""
        detail = error.args[0] if error.args and isinstance(error.args[0], Problem) else str(error)
        return cls(name, False, detail)

    @property
    def is_layout(self) -> bool:
        """Whether it is the check of the layout, in any phase."""
        return self.name == LAYOUT

    @property
    def title(self) -> str:
        """The name, with the phase if there is one."""
        return self.name if self.phase is None else f"{self.name} of phase {self.phase}"

    @property
    def verdict(self) -> str:
        """The verdict: `FAIL`, `note` or `ok`."""
        return "FAIL" if not self.ok else "note" if self.is_note else "ok"


def merge(by_host: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merges the findings of all hosts, given in their order; equal findings become one.

    If only some hosts have a finding, its detail begins with their numbers.
    """
    titles = list(dict.fromkeys(finding.title for findings in by_host for finding in findings))
    merged = []
    for title in titles:
        said: dict[Finding, list[int]] = {}
        for host, findings in enumerate(by_host):
            for finding in findings:
                if finding.title == title:
                    said.setdefault(finding, []).append(host)
        for finding, hosts in said.items():
            whose = "" if len(hosts) == len(by_host) else f"host {', '.join(map(str, hosts))}: "
            merged.append(finding._replace(detail=_prefixed(whose, finding.detail)))
    return merged


def _prefixed(whose: str, detail: str | Problem) -> str | Problem:
    if isinstance(detail, Problem):
        return Problem(**{**vars(detail), "found": whose + detail.found})
    return whose + detail


def is_ready(findings: Iterable[Finding]) -> bool:
    """Returns whether no check failed."""
    return all(finding.ok for finding in findings)


def table(findings: Sequence[Finding]) -> str:
    """Formats findings as a table that ends with READY or NOT READY."""
    width = max((len(finding.title) for finding in findings), default=0)
    indent = "\n" + " " * (width + 8)
    lines = []
    for finding in findings:
        text = finding.detail
        if isinstance(text, Problem) and text.fix:
            text = f"{text.without_fix}\nfix: {text.fix}"
        text = terminal.wrapped(text, margin=width + 8)
        lines.append(f"{finding.verdict:<5} {finding.title:<{width}}  {text}".replace("\n", indent))
    failed = sum(not finding.ok for finding in findings)
    lines.append("READY" if not failed else f"NOT READY: {failed} of {len(findings)} checks failed")
    return "\n".join(lines)


def to_json(findings: Iterable[Finding]) -> str:
    """Returns the findings as JSON text, which `from_json` reads."""
    rows = [f._asdict() | ({"problem": vars(f.detail)} if isinstance(f.detail, Problem) else {}) for f in findings]
    return json.dumps(rows, indent=1)


def from_json(text: str) -> list[Finding]:
    """Parses the text that `to_json` returned."""
    rows = json.loads(text)
    problems = [row.pop("problem", None) for row in rows]
    return [
        Finding(**{**row, "detail": Problem(**facts)} if facts else row)
        for row, facts in zip(rows, problems, strict=True)
    ]
