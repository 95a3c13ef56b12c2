"""`launch/run draw`: draws a pipeline schedule as text."""

import argparse

from core.errors import UserError
from launch import flags
from parallel.pipeline import drawing, schedules

COMMAND = ("layouts", "draw")
HELP = "draw what each stage of a pipeline does at each tick"
EXAMPLE = """launch/run draw gpipe --stages 4 --microbatches 8
  launch/run draw circular --stages 4 --microbatches 4 --repeats 2
  launch/run draw one_f_one_b --stages 4 --microbatches 8
  launch/run draw zero_bubble --stages 4 --microbatches 8"""
_SCHEDULES = ("gpipe", "circular", "one_f_one_b", "interleaved", "zero_bubble")
_NEED_REPEATS, _TAKE_REPEATS = ("circular", "interleaved"), ("circular", "interleaved", "zero_bubble")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", choices=_SCHEDULES)
    parser.add_argument("--stages", type=flags.at_least(1), required=True)
    parser.add_argument("--microbatches", type=flags.at_least(1), required=True)
    parser.add_argument(
        "--repeats",
        type=flags.at_least(1),
        help=f"passes of a microbatch through all stages, for {', '.join(_TAKE_REPEATS)}",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the drawing. Raises UserError if the options do not fit the schedule."""
    if args.repeats is None and args.schedule in _NEED_REPEATS:
        raise UserError(f"draw {args.schedule}: --repeats is required, such as --repeats 2")
    if args.repeats is not None and args.schedule not in _TAKE_REPEATS:
        raise UserError(f"draw {args.schedule}: --repeats is valid for {', '.join(_TAKE_REPEATS)} alone")
    more = {} if args.repeats is None else {"repeats": args.repeats}
    schedule = getattr(schedules, args.schedule)(num_microbatches=args.microbatches, **more)
    if problems := schedule.problems(args.stages):
        raise UserError("; ".join(problems))
    print(drawing.text(schedule, stages=args.stages))
    return 0
