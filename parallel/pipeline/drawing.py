"""Draws a schedule: one line per stage, one column per tick.

    stage 0 | 0f 1f 2f 3f .. .. .. 0b 1b ..
    stage 1 | .. 0f 1f 2f 3f 0b …

Text is for terminals and logs. In the PNG forward work is blue, backward work red and a bubble gray; shades distinguish
microbatches. It is encoded here because colored squares do not need an image library.
"""

import struct
import zlib
from collections.abc import Sequence

from parallel.pipeline.schedules import Schedule, Work

_SQUARE, _GAP = 18, 2  # pixels
_BUBBLE, _PAPER = (225, 225, 225), (255, 255, 255)
_SHADES = {"F": ((24, 78, 160), (150, 192, 240)), "B": ((170, 40, 40), (245, 170, 150))}  # first, last microbatch

Pixel = tuple[int, int, int]


def text(schedule: Schedule, *, stages: int) -> str:
    """Returns one line per stage with one column per tick.

    `3f` is microbatch 3 forward, `3f+1b` both, `..` a bubble. With repeats, `3f'1` is microbatch 3 in repeat 1.
    """
    ticks = list(schedule.timeline(stages))
    cells = [[_cell(row[stage], schedule.repeats) for row in ticks] for stage in range(stages)]
    width = max(len(cell) for line in cells for cell in line)
    lines = [f"stage {s} | " + " ".join(cell.ljust(width) for cell in line).rstrip() for s, line in enumerate(cells)]
    return "\n".join([*lines, schedule.describe(stages)])


def _cell(work: tuple[Work, ...], repeats: int) -> str:
    return "+".join(f"{w.microbatch}{w.kind.lower()}" + (f"'{w.repeat}" if repeats > 1 else "") for w in work) or ".."


def png(schedule: Schedule, *, stages: int) -> bytes:
    """Returns a PNG file. A tick of 1F1B is as wide as a forward and a backward tick."""
    ticks = list(schedule.timeline(stages))
    kinds = [sorted({w.kind for work in row for w in work}, reverse=True) for row in ticks]  # F before B
    lines = []
    for stage in range(stages):
        squares = [
            _colour([w for w in row[stage] if w.kind == kind], schedule)
            for row, present in zip(ticks, kinds, strict=True)
            for kind in present
        ]
        lines += [_line(squares)] * _SQUARE + [_line([_PAPER] * len(squares))] * _GAP
    return _file(lines)


def _colour(work: Sequence[Work], schedule: Schedule) -> Pixel:
    if not work:
        return _BUBBLE
    first, last = _SHADES[work[0].kind]
    share = (work[0].microbatch + work[0].repeat * schedule.num_microbatches) / max(schedule.turns - 1, 1)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, last, strict=True))
    return red, green, blue


def _line(squares: Sequence[Pixel]) -> bytes:
    return b"".join(bytes(colour) * _SQUARE + bytes(_PAPER) * _GAP for colour in squares)


def _file(lines: Sequence[bytes]) -> bytes:
    """Encodes a PNG: signature, header, compressed lines, end (W3C, Portable Network Graphics, chapters 5 and 11)."""
    header = struct.pack(">IIBBBBB", len(lines[0]) // 3, len(lines), 8, 2, 0, 0, 0)  # 8 bits, red green blue
    data = zlib.compress(b"".join(b"\0" + line for line in lines), 9)  # each line starts with its filter type, 0
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
