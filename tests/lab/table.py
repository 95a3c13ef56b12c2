"""Writes the results of injected failures as a table, between two marks of docs/results/failures.md."""

from collections.abc import Sequence
from pathlib import Path

from core.errors import UserError
from launch.environment import WORKSPACE
from tests.lab.flips import Flips
from tests.lab.harness import Outcome

README = WORKSPACE / "docs" / "results" / "failures.md"
BEGIN, END = "<!-- failures: written by tests/run.sh lab failures --write -->", "<!-- end of failures -->"
CAPTION = (
    "Hosts were CPU processes that communicate by gloo. Hangs of TPU links, lost VMs and real cloud permissions were "
    "not tested"
)
_LONGEST = 110


def markdown(outcomes: Sequence[Outcome], flips: Flips | None) -> str:
    """Returns the table, with a caption above it."""
    rows = [
        "| injected fault | ends after, s | exit code | message | steps lost | resumes after, s | same end |",
        "|---|---|---|---|---|---|---|",
        *map(_row, outcomes),
    ]
    if flips is not None:
        rows.append(_of_flips(flips))
    return f"{CAPTION}.\n\n" + "\n".join(rows) + "\n"


def _row(outcome: Outcome) -> str:
    said = outcome.said if len(outcome.said) <= _LONGEST else outcome.said[: _LONGEST - 1] + "…"
    cells = (
        outcome.name,
        _seconds(outcome.ended_seconds),
        ", ".join(map(str, outcome.codes)),
        said.replace("|", "/"),
        str(outcome.lost_steps),
        _seconds(outcome.recovered_seconds),
        _yes(not outcome.difference),
    )
    return f"| {' | '.join(cells)} |"


def _of_flips(flips: Flips) -> str:
    count = flips.refused + flips.harmless + len(flips.wrong)
    said = f"{flips.refused} refused, {flips.harmless} without effect, {len(flips.wrong)} neither"
    return (
        f"| one bit flipped in a checkpoint's files, {count} times | – | – | {said} | – | – | {_yes(not flips.wrong)} |"
    )


def _yes(whether: bool) -> str:
    return "yes" if whether else "no"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"


def keep(table: str, *, whole: bool, readme: Path = README) -> None:
    """Writes the table into the README: all of it if `whole`, otherwise only the rows that it has, by name.

    Raises:
      UserError: the README has no marks.
    """
    text = readme.read_text()
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise UserError(f"{readme} has no {BEGIN} … {END} to write the table between")
    before, _, rest = text.partition(BEGIN)
    kept, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{table if whole else _merged(kept, table)}\n{END}{after}")


def _merged(kept: str, table: str) -> str:
    old, new = ({line.split(" | ")[0]: line for line in _rows(text)} for text in (kept, table))
    head = [line for line in table.splitlines() if line not in new.values()]
    return "\n".join([*head, *(old | new).values()]) + "\n"


def _rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("| ")][1:]
