"""Drawings match their schedules."""

import struct
import zlib

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


def pixels(data):
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT")
    size = struct.unpack(">I", data[start - 4 : start])[0]
    raw = zlib.decompress(data[start + 4 : start + 4 + size])
    lines = [raw[y * (3 * width + 1) :][: 3 * width + 1] for y in range(height)]
    assert all(line[0] == 0 for line in lines)
    return [[tuple(line[1 + 3 * x : 4 + 3 * x]) for x in range(width)] for line in lines]


def test_a_picture_has_a_square_for_each_tick_grey_where_a_stage_waits():
    found = pixels(drawing.png(schedules.gpipe(num_microbatches=3), stages=2))
    squares = [[row[10 + 20 * tick] for tick in range(8)] for row in (found[10], found[30])]

    def kind(colour):
        red, _, blue = colour
        return "." if red == blue else "F" if blue > red else "B"

    assert ["".join(map(kind, row)) for row in squares] == ["FFF..BBB", ".FFFBBB."]
    assert (len(found), len(found[0])) == (2 * 20, 8 * 20)


def test_the_command_prints_and_writes(tmp_path, capsys):
    def run(*arguments, code=0):
        assert cli.main(["draw", *arguments]) == code
        said = capsys.readouterr()
        return said.out + said.err

    path = tmp_path / "a.png"
    chosen = ["one_f_one_b", "--stages", "4", "--microbatches", "8", "--png"]
    assert "saves the layer inputs of 7 microbatches" in run(*chosen, str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"there is no folder {tmp_path}/none; create it first" in run(*chosen, f"{tmp_path}/none/a.png", code=2)
    circular = ["circular", "--stages", "2", "--microbatches", "4", "--repeats", "2"]
    assert "saves the layer inputs of 4 microbatches x 2 repeats" in run(*circular)
    for wrong in (["gpipe", "--repeats", "2"], ["circular"]):
        assert "--repeats is required for circular" in run(*wrong, "--stages", "4", "--microbatches", "8", code=2)
    few = ["circular", "--repeats", "2", "--stages", "4", "--microbatches", "2"]
    assert "num_microbatches = 2 is below stage = 4" in run(*few, code=2)
