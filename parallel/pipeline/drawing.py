"""Draws a schedule: one line per stage, one column per tick.

stage 0 | 0f 1f 2f 3f .. .. 0b 1b 2b 3b
stage 1 | .. 0f 1f 2f 3f 0b 1b 2b 3b ..
"""

from parallel.pipeline.schedules import Schedule, Work


def text(schedule: Schedule, *, stages: int) -> str:
    """Returns one line per stage, with one column per tick, and a line about the schedule.

    `3f` is microbatch 3 forward, `3f+1b` also microbatch 1 backward, `0w` the gradients of matrices for microbatch 0,
    and `..` a bubble. With repeats, `3f'1` is microbatch 3 in repeat 1, both counted from 0.
    """
    ticks = list(schedule.timeline(stages))
    cells = [[_cell(row[stage], schedule.repeats) for row in ticks] for stage in range(stages)]
    width = max(len(cell) for line in cells for cell in line)
    names = [f"stage {stage}".ljust(len(f"stage {stages - 1}")) for stage in range(stages)]
    rows = [" ".join(cell.ljust(width) for cell in line).rstrip() for line in cells]
    lines = [f"{name} | {row}" for name, row in zip(names, rows, strict=True)]
    return "\n".join([*lines, schedule.describe(stages)])


def _cell(work: tuple[Work, ...], repeats: int) -> str:
    return "+".join(f"{w.microbatch}{w.kind.lower()}" + (f"'{w.repeat}" if repeats > 1 else "") for w in work) or ".."
