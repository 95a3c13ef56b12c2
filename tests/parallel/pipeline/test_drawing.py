"""Drawings match their schedules."""

from launch import __main__ as cli
from parallel.pipeline import drawing, schedules


def test_text_has_a_line_for_each_stage_and_a_column_for_each_tick():
    lines = drawing.text(schedules.gpipe(num_microbatches=3), stages=2).splitlines()
    assert lines[:2] == [
        "stage 0 | 0f 1f 2f .. .. 0b 1b 2b",
        "stage 1 | .. 0f 1f 2f 0b 1b 2b ..",
    ]
    assert lines[2].startswith(
        "gpipe: 3 microbatches through 2 stages in 4 ticks each way; bubble (S - 1) / (M + S - 1)"
    )
    lines = drawing.text(schedules.one_f_one_b(num_microbatches=3), stages=2).splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["stage", "0", "|", "0f", "1f", "2f+0b", "1b", "2b"],
        ["stage", "1", "|", "..", "0f+0b", "1f+1b", "2f+2b", ".."],
    ]
    assert "0f'1" in drawing.text(schedules.circular(num_microbatches=2, repeats=2), stages=2)
    lines = drawing.text(schedules.zero_bubble(num_microbatches=3), stages=2).splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["stage", "0", "|", "0f", "1f", "2f+0b+0w", "1b+1w", "2b+2w"],
        ["stage", "1", "|", "..", "0f+0b", "1f+1b+0w", "2f+2b+1w", "2w"],
    ]


def test_the_command_prints(capsys):
    def run(*arguments, code=0):
        assert cli.main(["draw", *arguments]) == code
        said = capsys.readouterr()
        return said.out + said.err

    chosen = ["one_f_one_b", "--stages", "4", "--microbatches", "8"]
    assert "keeps the values that each layer saves of 7 passes of a microbatch" in run(*chosen)
    circular = ["circular", "--stages", "2", "--microbatches", "4", "--repeats", "2"]
    assert "keeps the values that each layer saves of 8 passes of a microbatch" in run(*circular)
    for wrong in (["gpipe", "--repeats", "2"], ["circular"], ["interleaved"]):
        assert "--repeats" in run(*wrong, "--stages", "4", "--microbatches", "8", code=2)
    uneven = ["interleaved", "--repeats", "2", "--stages", "4", "--microbatches", "6"]
    assert "use 4 or 8" in run(*uneven, code=2)
    few = ["circular", "--repeats", "2", "--stages", "4", "--microbatches", "2"]
    assert "num_microbatches = 2 is below stage = 4" in run(*few, code=2)


def test_lines_of_many_stages_are_aligned():
    lines = drawing.text(schedules.gpipe(num_microbatches=12), stages=12).splitlines()[:12]
    assert {line.index("|") for line in lines} == {9}
