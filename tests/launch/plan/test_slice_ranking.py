"""Several slices are ranked by the best layout of each."""

import dataclasses
import json

import pytest

from core import slices
from core.errors import UserError
from core.hosts import exit_codes
from launch import __main__ as cli
from launch.plan import search, session

pytestmark = pytest.mark.usefixtures("considered_once")
EXPERIMENT = "gin/quickstart.gin"
QUICKLY = ("--arithmetic", "--only", "fsdp")  # one strategy, because all of them take 10 s a slice


def run(names, *given):
    return session.run(cli.parser(session, "launch/run plan").parse_args([names, EXPERIMENT, *given]))


def test_slices_are_ranked_by_hours_and_priced(cache, tmp_path, capsys):
    path = tmp_path / "ranked.json"
    assert run("v4-8,v4-16,v5e-4", *QUICKLY, "--price", "3,2.5,1", "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert {row["slice"] for row in found} == {"v4-8", "v4-16", "v5e-4"}
    assert [sum(row["hours"]) for row in found] == sorted(sum(row["hours"]) for row in found)
    for row, price in zip(sorted(found, key=lambda row: row["slice"]), (2.5, 3, 1), strict=True):
        chips = slices.get(row["slice"]).chips
        assert row["dollars"] == pytest.approx([hours * chips * price for hours in row["hours"]])
    printed = capsys.readouterr().out
    cheapest = min(found, key=lambda row: sum(row["dollars"]))
    assert (f"cheapest: {cheapest['slice']}" in printed) == (cheapest is not found[0])
    assert "arithmetic" in printed


def test_the_layout_of_a_slice_is_the_best_of_its_own_plan_and_one_price_is_of_all_slices(cache, tmp_path):
    path, alone = tmp_path / "ranked.json", tmp_path / "alone.json"
    run("v4-8,v4-16", *QUICKLY, "--price", "2", "--json", str(path))
    run("v4-16", *QUICKLY, "--json", str(alone))
    rows = {row["slice"]: row for row in json.loads(path.read_text())}
    best = json.loads(alone.read_text())[0]
    assert {name: rows["v4-16"][name] for name in best} == best
    for name, row in rows.items():
        assert row["dollars"] == pytest.approx([2 * slices.get(name).chips * hours for hours in row["hours"]])


def test_compiled_layouts_are_looked_up(cache, keep, options, compiled_as, tmp_path, capsys):
    one = next(one for one in options if not one.reason and one.name.startswith("fsdp:"))
    keep(one.text, compiled_as(one, 1.25))
    path = tmp_path / "ranked.json"
    assert run("v4-8,v4-16", "--cached", "--only", "fsdp", "--json", str(path)) == 0
    (row,) = json.loads(path.read_text())  # nothing was compiled for v4-16
    assert (row["slice"], row["name"]) == ("v4-8", one.name)
    assert row["scheduled_seconds"] == compiled_as(one, 1.25).time.scheduled
    assert "v4-16: nothing was compiled" in capsys.readouterr().out


def test_a_strategy_without_a_layout_on_a_slice(cache, capsys):
    assert run("v4-8,2xv4-8", "--arithmetic", "--only", "multislice") == 0
    assert "v4-8: it has no layout of these strategies" in capsys.readouterr().out


def test_an_interrupted_plan_keeps_the_slices_so_far(cache, monkeypatch, capsys):
    asked = search.options

    def interrupted(question, *, only=()):
        if question.slice.name == "v4-16":
            raise KeyboardInterrupt
        return asked(question, only=only)

    monkeypatch.setattr(search, "options", interrupted)
    assert run("v4-8,v4-16,v4-32", *QUICKLY) == exit_codes.INTERRUPTED
    printed = capsys.readouterr().out
    assert "| v4-8 " in printed
    assert "v4-16: interrupted" in printed
    assert "v4-32: not planned" in printed


def test_an_error_of_one_slice_leaves_the_others(cache, monkeypatch, capsys):
    asked = search.options

    def broken(question, *, only=()):
        if question.slice.name == "v4-16":
            raise UserError("these rows do not divide")
        return asked(question, only=only)

    monkeypatch.setattr(search, "options", broken)
    assert run("v4-8,v4-16", *QUICKLY) == 0
    assert "v4-16: these rows do not divide" in capsys.readouterr().out


def test_a_slice_on_which_nothing_fits_is_named_with_the_reason(cache, monkeypatch, capsys):
    asked = search.options

    def refused(question, *, only=()):
        found = asked(question, only=only)
        why = {"kind": "too much HBM", "reason": "needs 40 GiB"} if question.slice.name == "v4-16" else {}
        return [dataclasses.replace(one, **why) for one in found if not one.reason]

    monkeypatch.setattr(search, "options", refused)
    assert run("v4-8,v4-16", *QUICKLY) == 0
    assert "v4-16: no layout fits; most often too much HBM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ("v4-8,v4-8", (), "names v4-8 twice"),
        ("v5e-16,v5litepod-16", (), "names v5e-16 twice"),
        ("v4-8,", (), "a name is empty"),
        ("v4-8,v4-7", (), "v4-7"),
        ("v4-8,v4-16", ("--price", "1,2,3"), "--price has 3 prices"),
        ("v4-8", ("--price", "1,2"), "is one slice: give one price"),
        ("v4-8,v4-16", ("--rejected",), "--rejected needs one slice"),
        ("v4-8,v4-16", ("--explain", "gin/strategies/fsdp.gin"), "--explain needs one slice"),
    ],
)
def test_wrong_input_is_refused_before_a_model_is_traced(monkeypatch, names, given, words):
    monkeypatch.setattr(search, "options", None)
    with pytest.raises(UserError) as error:
        run(names, *given)
    assert words in str(error.value)


def test_phases_are_compared_one_at_a_time():
    arguments = ["v4-8,v4-16", "gin/quickstart_phases.gin", "--arithmetic"]
    with pytest.raises(UserError, match='add --gin "PHASE = N"'):
        session.run(cli.parser(session, "launch/run plan").parse_args(arguments))
