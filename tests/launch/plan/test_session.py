"""The command `plan` from arguments to exit code, with records instead of a compiler."""

import dataclasses
import datetime
import itertools
import json
import math
import re
import sys

import pytest

from core.errors import UserError
from launch import __main__ as cli
from launch.config import loader
from launch.plan import compiling, ranking, search, session
from parallel.planning import calibration, records, selection
from parallel.planning.cost import AxisTime, StepTime

pytestmark = pytest.mark.usefixtures("considered_once")


@pytest.fixture
def arguments():

    def parse(*given):
        return cli.parser(session, "launch/run plan").parse_args(["v4-8", "gin/quickstart.gin", *given])

    return parse


@pytest.fixture
def filled(cache, keep, options, compiled_as):
    """A cache that has the first candidates; the second does not fit."""
    ordered = list(selection.order(options, wanted=3, usable_bytes=math.inf))[:5]
    for number, one in enumerate(ordered):
        record = compiled_as(one, 1 + number / 10)
        if number == 1:
            record = records.Record(records.TOO_MUCH, reason="needs 31.2GiB of 30.75GiB", needed_bytes=31.2 * 2**30)
        keep(one.text, record)
    return ordered


@pytest.mark.parametrize("flag", ["--write", "--json", "--record"])
def test_a_folder_in_the_place_of_a_file_is_refused(arguments, tmp_path, flag):
    with pytest.raises(ValueError, match=f"{flag}: {tmp_path}: this is a folder; name a file"):
        arguments(flag, str(tmp_path), "--overwrite")


def test_a_cache_that_cannot_be_written_is_found_before_anything_is_compiled(arguments, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(compiling, "compile_all", None)
    with pytest.raises(ValueError, match=r"the cache of plans: cannot write to .*file/renga/plans: NotADirectoryError"):
        session.run(arguments("--compile", "1", "--fresh"))


def test_a_file_for_another_batch_size_trains_on_as_many_tokens(
    arguments, question, keep, compiled_as, capsys, tmp_path
):
    asked = search.ask(question.path, slice_name=question.slice.name, batch_sizes=[64])
    for one in list(selection.order(search.options(asked), wanted=2, usable_bytes=math.inf))[:2]:
        keep(one.text, compiled_as(one))
    file = tmp_path / "winner.gin"
    assert session.run(arguments("--batch-size", "64", "--compile", "2", "--write", str(file))) == 0
    assert "(50 steps of 64 rows)" in capsys.readouterr().out
    built = loader.load(question.path, bindings=[f"include '{file}'"], slice_name="v4-8").build()
    assert (built.total_steps, built.batch_size) == (50, 64)


@pytest.mark.covers("L12", "O03")
def test_a_plan_from_the_cache(arguments, filled, cache, capsys, tmp_path):
    file = tmp_path / "winner.gin"
    given = ("--compile", "3", "--price", "2", "--write", str(file))
    assert session.run(arguments(*given)) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if re.match(r"\|\s+\d+ \|", line)]
    assert len(rows) == 3
    assert "too much HBM: " in said
    assert "needs 31.2GiB of 30.75GiB (by arithmetic" in said
    assert "rejected, layers do not divide into stages: " in said
    assert calibration.label() in said.replace("\n", " ")
    assert re.search(r"chip-hours; started now it ends \d{4}-", said)
    assert "at 2 USD per chip-hour" in said
    built = loader.load("gin/quickstart.gin", bindings=[f"include '{file}'"], slice_name="v4-8").build()
    (best, _), *_ = search.ranked([(one, cache.find(one.text)) for one in (filled[0], *filled[2:4])])
    assert (built.strategy, built.model.remat) == (best.candidate.layout.strategy(), best.candidate.remat or "none")
    assert "published steps" in " ".join(file.read_text().split("from __gin__")[0].replace("#", "").split())


def test_every_rejected_candidate_is_printed_when_asked(arguments, filled, options, capsys):
    session.run(arguments("--cached", "--rejected"))
    said = capsys.readouterr().out
    out = [one for one in options if one.reason]
    assert all(f"  {one.name}, {one.candidate.batch_size} rows: {one.reason}" in said for one in out)


def test_ctrl_c_prints_the_results_so_far(arguments, filled, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(compiling, "compile_all", interrupted)
    assert session.run(arguments("--compile", "9")) == 130
    printed = capsys.readouterr()
    assert "on v4-8, so far" in printed.out
    assert "run the same command to resume" in printed.err


def test_an_interrupted_plan_does_not_take_the_place_of_a_record(arguments, filled, capsys, monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(compiling, "compile_all", interrupted)
    file = tmp_path / "committed.json"
    file.write_text("as it was")
    assert session.run(arguments("--compile", "9", "--record", str(file))) == 130
    assert file.read_text() == "as it was"
    assert f"not written: {file}; a record is of a whole plan" in capsys.readouterr().out


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_a_program_written_in_two_ways_is_compiled_once(arguments, cache, options, compiled_as, monkeypatch, fresh):
    """Also while the first of them is still compiling."""
    first = next(one for one in options if one.is_as_written)
    twin = dataclasses.replace(first, name="written otherwise", is_as_written=False)
    monkeypatch.setattr(search, "options", lambda question, *, only=(): [first, twin])
    compiled = []

    def fake(jobs, *, wanted, on_start):
        started = list(jobs)  # as many workers as jobs
        for job in started:
            on_start(job)
            compiled.append(job.name)
            yield job, compiled_as(first)

    monkeypatch.setattr(compiling, "compile_all", fake)
    assert session.run(arguments("--compile", "2", *fresh)) == 0
    assert compiled == [first.name]


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_records_are_written_to_be_committed(arguments, filled, options, compiled_as, monkeypatch, tmp_path, fresh):
    """Those that were known and those that were compiled, also of what does not fit."""

    def fake(jobs, *, wanted, on_start):
        for number, job in enumerate(itertools.takewhile(lambda _: wanted(), jobs)):
            on_start(job)
            too_much = records.Record(records.TOO_MUCH, reason="needs 31.2GiB of 30.75GiB", needed_bytes=31.2 * 2**30)
            yield job, too_much if number == 1 else compiled_as(next(t for t in options if t.name == job.name))

    monkeypatch.setattr(compiling, "compile_all", fake)
    file = tmp_path / "x.json"
    assert session.run(arguments("--compile", "6", "--record", str(file), *fresh)) == 0
    kept = [record["status"] for record in json.loads(file.read_text())["records"].values()]
    assert kept.count(records.COMPILED) == 6
    assert kept.count(records.TOO_MUCH) == (1 if fresh else 2)


def test_rows_are_sorted_by_the_displayed_values(arguments, filled, capsys):
    session.run(arguments("--compile", "4", "--wide"))
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    column = next(line.index("predicted") for line in lines if "predicted" in line)
    rows = [line for line in lines if len(line) > column and line[1].isdecimal()]
    shown, steps = [float(line[column]) for line in rows], [line[column - 1].split("–") for line in rows]
    assert shown == sorted(shown)
    assert len(shown) == 4
    assert all(float(pair[0]) <= value <= float(pair[-1]) for pair, value in zip(steps, shown, strict=True))


def test_missing_candidates_are_compiled_until_enough_fit(arguments, filled, options, compiled_as, capsys, monkeypatch):
    started = []

    def fake(jobs, *, wanted, on_start):
        for job in jobs:
            if wanted() <= 0:
                return
            on_start(job)
            started.append(job)
            one = next(t for t in options if t.name == job.name)
            record = compiled_as(one) if len(started) > 1 else records.Record(records.FAILED, reason="no luck")
            yield job, record

    monkeypatch.setattr(compiling, "compile_all", fake)
    assert session.run(arguments("--compile", "6")) == 0
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if re.match(r"\|\s+\d+ \|", line)]) == 6
    assert "failed: " in said
    assert len(started) > 1
    assert not {job.name for job in started} & {one.name for one in filled}
    assert all(job.candidate for job in started)


def test_a_layout_that_was_found_not_to_fit_is_not_compared_with_the_winner(
    arguments, cache, options, keep, compiled_as, capsys
):
    possible = [one for one in options if one.estimate and not one.reason]
    best = next(one for one in possible if not one.estimate.bubble)
    first, second = [one for one in possible if one.estimate.bubble][:2]
    keep(best.text, compiled_as(best))
    assert session.run(arguments("--cached")) == 0
    assert f"fastest with a pipeline, by arithmetic: {first.name}," in capsys.readouterr().out
    too_much = records.Record(records.TOO_MUCH, reason="needs 31.2GiB of 30.75GiB", needed_bytes=31.2 * 2**30)
    keep(first.text, too_much)
    assert session.run(arguments("--cached")) == 0
    assert f"fastest with a pipeline, by arithmetic: {second.name}," in capsys.readouterr().out


def test_a_peak_that_is_a_bound_is_shown_as_one(arguments, cache, options, keep, compiled_as, capsys, tmp_path):
    """As where a step keeps arrays on the host."""
    first = next(one for one in selection.order(options, wanted=1, usable_bytes=math.inf))
    keep(first.text, dataclasses.replace(compiled_as(first), needed_bytes=12.5 * 2**30, needed_is_bound=True))
    assert session.run(arguments("--cached", "--wide", "--write", str(tmp_path / "best.gin"))) == 0
    said = capsys.readouterr().out
    assert re.search(r"\| +≤ 12\.50 +\| +≥ 18\.25 \|", said)
    assert "≤ 12.5 of 30.8 GiB a chip" in said
    assert "≤ 12.50 GiB of 30.75 per chip" in (tmp_path / "best.gin").read_text()


def test_a_plan_without_records_and_without_compiling(arguments, cache, capsys):
    assert session.run(arguments("--cached")) == 1
    assert "nothing was compiled for v4-8" in capsys.readouterr().out


def test_earlier_results_are_shown_wherever_they_are_in_the_order(arguments, options, keep, compiled_as, capsys):
    texts = {one.text: one for one in selection.order(options, wanted=session.DEFAULT, usable_bytes=math.inf)}
    last = list(texts.values())[session.DEFAULT + 2]  # more than are wanted come before it
    keep(last.text, compiled_as(last))
    assert session.run(arguments("--cached")) == 0
    assert last.name in capsys.readouterr().out


@pytest.mark.covers("X13")
def test_nothing_fits(arguments, cache, capsys, tmp_path):
    files = [tmp_path / name for name in ("a.gin", "a.json")]
    wanted = ("--write", str(files[0]), "--json", str(files[1]))
    assert session.run(arguments("--arithmetic", "--batch-size", "33", "--only", "fsdp", *wanted)) == 1
    said = capsys.readouterr().out
    assert "rejected, rows do not divide: " in said
    assert "no candidate fits v4-8: most often: rows do not divide; the reasons above say which numbers do" in said
    for file in files:
        assert f"not written, because no layout was found to fit: {file}" in said
        assert not file.exists()


def test_a_plan_without_a_fitting_candidate_ends(arguments, cache, capsys, monkeypatch, tmp_path):
    """After eight tries for each layout that was wanted, not after all of some hundred."""
    compiled = []

    def too_large(jobs, *, wanted, on_start):
        for job in itertools.takewhile(lambda _: wanted(), jobs):
            on_start(job)
            compiled.append(job.name)
            yield job, records.Record(records.TOO_MUCH, reason="needs 40GiB of 31GiB", needed_bytes=40 * 2**30)

    monkeypatch.setattr(compiling, "compile_all", too_large)
    assert session.run(arguments("--compile", "2", "--record", str(tmp_path / "r.json"))) == 1
    assert len(compiled) == len(set(compiled)) == 16
    said = capsys.readouterr().out
    assert "nothing that was compiled fits" in said
    assert f"not written, because no layout was found to fit: {tmp_path / 'r.json'}" in said


def test_estimates_are_labeled_as_arithmetic(arguments, cache, capsys):
    assert session.run(arguments("--arithmetic")) == 0
    said = capsys.readouterr().out
    assert "arithmetic, not compiled" in said
    assert "of compiled steps: compiled by libtpu" in said
    assert "published steps" in " ".join(said.split())
    assert "compiled in s" not in said
    assert "| predicted" not in said


def test_compiled_layouts_that_did_not_fit_are_not_proposed(arguments, filled, capsys):
    assert session.run(arguments("--arithmetic", "--rejected")) == 0
    said = capsys.readouterr().out
    assert f"{filled[1].name}" in said.split("too much HBM as compiled")[1]
    assert "compiled, does not fit: needs 31.2GiB of 30.75GiB" in said


def test_layouts_that_compiled_with_too_much_memory_are_not_proposed(arguments, options, keep, compiled_as, capsys):
    """The compiler accepts more than a chip has on some slices."""
    first = next(one for one in options if not one.reason)
    keep(first.text, dataclasses.replace(compiled_as(first), needed_bytes=31 * 2**30))
    assert session.run(arguments("--arithmetic", "--rejected")) == 0
    said = capsys.readouterr().out
    assert f"{first.name}" in said.split("too much HBM as compiled")[1]
    assert "compiled, does not fit: needs 31.00GiB of 30.75GiB, though it compiled" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--explain", "fsdp"), "--explain fsdp: expected a gin file, such as gin/strategies/fsdp.gin, or bindings"),
        (
            ("--explain", "a.gin", "--wide", "--price", "3"),
            "--price, --wide: only for a plan; --explain takes no option but --gin",
        ),
        (
            ("--generate", "--wide", "--batch-size", "8"),
            "--wide: only for a plan; --generate takes no option but --gin",
        ),
        (("--arithmetic", "--record", "x.json"), "--record keeps what was compiled"),
        (("--cached", "--fresh"), "--fresh compiles everything again, and --cached compiles nothing"),
        (("--arithmetic", "--fresh"), "--fresh compiles everything again, and --arithmetic compiles nothing"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(arguments, given, message):
    with pytest.raises(ValueError, match=message):
        session.run(arguments(*given))


def test_rows_from_committed_records_name_their_revision(
    arguments, options, compiled_as, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ordered = list(selection.order(options, wanted=2, usable_bytes=math.inf))[:2]
    records.commit(tmp_path / "here" / "x.json", iter([(one.text, compiled_as(one)) for one in ordered]))
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "here")
    assert session.run(arguments("--compile", "2")) == 0
    assert "2 of 2 rows were compiled before, at 0123456789+ (2); + means" in capsys.readouterr().out
    monkeypatch.setattr(records, "sources_digest", lambda: "edited")
    session.run(arguments("--compile", "2"))
    assert "have changed since: --fresh compiles again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--price", "cheap"], "--price: cheap: expected a number above 0"),
        (["--price=-1"], "--price: -1: expected"),
        (["--batch-size", "0"], "--batch-size: 0: expected a whole number, at least 1"),
        (["--batch-size", "6400"], "--batch-size 6400, 1 steps for as many tokens: 1 mistake in the configuration"),
        (["--only", "fsdb"], "did you mean fsdp"),
        (["--only", "multislice"], "v4-8 has no layout of these strategies (--only, and what --gin binds)"),
        (["--explain", "fsdp.gin"], "--explain fsdp.gin: no such file"),
        (["--write", "no/such/folder/x.gin"], "no/such/folder; create it first"),
        (["--gin", "BATCH_SIZ = 3"], "did you mean 'BATCH_SIZE'"),
    ],
)
def test_wrong_input_is_refused(arguments, cache, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        session.run(arguments(*given))


def test_an_unknown_slice_is_refused(cache):
    with pytest.raises(ValueError, match="unknown TPU slice 'v4-33'"):
        search.ask("gin/quickstart.gin", slice_name="v4-33")


def test_cost_of_training(question, options, compiled_as):
    one = next(t for t in options if not t.reason)
    row = search.metrics(question, one, compiled_as(one))
    tokens = 200 * 16 * 128
    assert row.hours[0] == pytest.approx(row.step_seconds[0] * 200 / 3600)
    assert row.tokens_per_second[1] == pytest.approx(16 * 128 / row.step_seconds[1])
    assert row.step_seconds[0] <= row.scheduled_seconds <= row.step_seconds[1]
    assert row.mfu[0] == pytest.approx(
        question.experiment.flops_per_step / row.step_seconds[0] / question.slice.peak_flops
    )
    now = datetime.datetime(2030, 1, 1)
    seconds = 20 * 3600 / 200
    time = StepTime(seconds, 0.0, (AxisTime(("fsdp",), "ICI", seconds, 0.0, 1),), ())
    said = ranking.outlook(question, dataclasses.replace(row, time=time, compile_seconds=None), price=3.0, now=now)
    assert "80 – 160 chip-hours" in said[0]
    assert "2030-01-01 20:00 – 2030-01-02 16:00" in said[0]
    assert said[1].endswith("240 – 480 USD")
    assert f"{tokens / 1e9:,.3g}B tokens (200 steps of 16 rows)" in said[0]


def test_a_prediction_may_be_faster_than_the_bfloat16_peak(question, options, compiled_as):
    """Products in int8 and FP8 have a higher one."""
    one = next(t for t in options if not t.reason)
    row = search.metrics(question, one, compiled_as(one))
    seconds = row.flops / (1.25 * question.slice.peak_flops)
    row = dataclasses.replace(row, time=StepTime(seconds, 0.0, (), ()), compile_seconds=None)
    assert row.mfu == pytest.approx((1.25, 1.25))
    assert "125.0" in ranking.cells(row)


@pytest.mark.parametrize(
    ("number", "said"), [(0.25, "0.25"), (9.944, "9.94"), (99.94, "99.9"), (1017.6, "1,018"), (1258.3, "1,258")]
)
def test_large_numbers_are_printed_in_full(question, options, compiled_as, number, said):
    one = next(t for t in options if not t.reason)
    row = search.metrics(question, one, compiled_as(one))
    row = dataclasses.replace(row, time=StepTime(number * 3600 / row.steps, 0.0, (), ()), compile_seconds=None)
    assert said in ranking.cells(row)


def test_the_table_fits_a_terminal_and_rejects_follow_it(arguments, filled, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    kept = tmp_path / "plan.json"
    assert session.run(arguments("--cached", "--json", str(kept))) == 0
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines() if not line.startswith("written: ")) <= 80  # a path stays whole
    assert said.index("tokens/s |") < said.index("rejected, ") < said.index("best: ")
    figures_of_all = json.loads(kept.read_text())
    assert len(figures_of_all) == 4  # all that fit
    assert figures_of_all[0]["mfu"][0] > figures_of_all[0]["mfu"][1] > 0
    assert figures_of_all[0]["time"]["traffic"][0]["wire_bytes"] > 0


def test_all_columns_are_shown_when_asked_for(arguments, filled, capsys):
    assert session.run(arguments("--cached", "--wide")) == 0
    (headings,) = [line for line in capsys.readouterr().out.splitlines() if "| layout" in line]
    assert {"free", "predicted", "MFU %", "bubble", "hours"} <= {cell.strip() for cell in headings.split("|")}


@pytest.mark.parametrize(
    ("columns", "shown", "hidden"),
    [
        (80, ("tokens/s",), ("MFU %", "bubble", "sent, GiB a step")),
        (160, ("tokens/s", "MFU %", "bubble", "sent, GiB a step"), ("compiled in s",)),
    ],
)
def test_the_width_of_the_terminal_decides_which_columns_are_shown(
    arguments, filled, capsys, monkeypatch, columns, shown, hidden
):
    monkeypatch.setattr(ranking, "PIPED_WIDTH", columns)
    assert session.run(arguments("--cached")) == 0
    lines = capsys.readouterr().out.splitlines()
    (headings,) = [line for line in lines if "| layout" in line]
    cells = {cell.strip() for cell in headings.split("|")}
    assert set(shown) <= cells
    assert not cells & set(hidden)
    assert len(headings) <= columns


@pytest.mark.covers("T16")
def test_the_tokens_of_a_phase_are_those_of_its_steps():
    question = search.ask("gin/quickstart_phases.gin", slice_name="v4-16", bindings=["PHASE = 2"])
    assert (question.experiment.batch_size, question.num_steps, question.steps(16)) == (8, 50, 25)
    assert question.total_tokens == 50 * question.experiment.tokens_per_step


def test_other_batch_sizes_of_a_phase_are_refused():
    where = {"slice_name": "v4-16", "bindings": ["PHASE = 2"]}
    assert search.ask("gin/quickstart_phases.gin", **where, batch_sizes=[8]).batch_sizes == (8,)
    with pytest.raises(UserError, match="--batch-size 4: the phase has 8 rows, and no binding changes them"):
        search.ask("gin/quickstart_phases.gin", **where, batch_sizes=[8, 4])


@pytest.mark.slow
@pytest.mark.covers("T16")
def test_every_phase_is_planned(capsys):
    told = ["plan", "v4-16", "gin/quickstart_phases.gin", "--arithmetic", "--only", "fsdp"]
    assert cli.main(told) == 0
    said = capsys.readouterr().out
    first, second = said.split("phase 2 of 2, after step 150 to 200")
    assert "phase 1 of 2, after step 0 to 150" in first
    for part, rows in ((first, 16), (second, 8)):
        assert re.search(rf"fsdp: fsdp 8, remat none \(as written\) *\| +{rows} \|", part), part
    assert cli.main([*told, "--json", "plan.json"]) == 2
    assert (
        '--json is for one phase, and gin/quickstart_phases.gin has 2: add --gin "PHASE = N"' in capsys.readouterr().err
    )
    own = ["long/experiment.Phase.strategy = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2"]
    words = [word for binding in ("from parallel import strategies", *own) for word in ("--gin", binding)]
    assert cli.main([*told, *words]) == 0
    assert "not planned: the phase sets strategy itself" in capsys.readouterr().out
