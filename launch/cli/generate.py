"""`launch/run generate`: continues prompts with a run's model, or with a published one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from core import slices, units
from core.errors import UserError
from launch import flags, loaded_model, terminal
from parallel.generation import GREEDY, Sampling

HELP = "continue prompts with the model of a run, or with a published one"
EXAMPLE = """launch/run generate runs/gin/quickstart --prompt "import "
  launch/run generate smollm2 --prompt "Name three primary colors." --chat --greedy
  launch/run generate runs/first@1000 --file prompts.jsonl --out answers.jsonl --max-tokens 200
  launch/run generate runs/first --prompt-ids 0,5,7 --slice v4-8 --simulate --gin "STRATEGY = @strategies.fsdp()" """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, RUN@STEP, or the folder of a published model (config.json, *.safetensors)",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-ids", metavar="N,N", help="ids to continue, separated by commas")
    prompt.add_argument("--file", metavar="FILE", help='JSON lines, each {"prompt": "…"} or {"ids": [0, 5]}')
    parser.add_argument(
        "--chat", action="store_true", help="format the prompt by the chat template, as a user's message"
    )
    parser.add_argument("--max-tokens", metavar="N", type=flags.at_least(1), default=100, help="default: 100")
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--temperature", metavar="T", type=flags.positive, default=0.8, help="default: 0.8")
    parser.add_argument("--top-k", metavar="K", type=flags.at_least(0), default=0, help="default: 0, all tokens")
    parser.add_argument("--top-p", metavar="P", type=flags.positive, default=1.0, help="default: 1")
    parser.add_argument("--min-p", metavar="P", type=float, default=0.0, help="default: 0")
    parser.add_argument("--seed", metavar="N", type=flags.at_least(0), default=0, help="default: 0")
    parser.add_argument("--out", metavar="FILE", type=flags.output_file, help="write JSON lines here")
    parser.add_argument("--json", action="store_true", help="print JSON lines: text, ids, log-probabilities")
    flags.add(parser, "--slice", help="lay the model out on this slice (default: one chip)")
    flags.add(parser, "--simulate", "--gin")


def run(args: argparse.Namespace) -> int:
    """Loads the model, continues the prompts, and prints or writes the continuations."""
    for name in ("top_p", "min_p"):
        if getattr(args, name) > 1 or getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected from 0 to 1")
    if args.simulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", slices.get(args.slice or loaded_model.ONE_CHIP).chips)
    prompts = _prompts(args)
    model = loaded_model.load(args.model, slice_name=args.slice, bindings=args.gin)
    sampling = GREEDY if args.greedy else Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    shown = _Shown(model, is_live=not args.json and not args.out and len(prompts) == 1)
    began = time.monotonic()
    options = {"max_tokens": args.max_tokens, "sampling": sampling, "seed": args.seed, "is_chat": args.chat}
    found = model.continued(prompts, on_tokens=shown.add, **options)
    if shown.is_live:
        shown.end(found[0].text)
    _write(args, prompts, found)
    seconds, count = time.monotonic() - began, sum(len(one.ids) for one in found)
    print(f"{units.counted(count, 'token')} in {units.seconds(seconds)}, with compiling", file=sys.stderr)
    return 0


def _prompts(args: argparse.Namespace) -> list[str | list[int]]:
    if args.prompt is not None:
        return [args.prompt]
    if args.prompt_ids is not None:
        words = args.prompt_ids.split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise UserError(
                f"--prompt-ids {args.prompt_ids}: expected whole numbers separated by commas, such as 0,5,7"
            )
        return [list(map(int, words))]
    try:
        lines = [json.loads(line) for line in Path(args.file).read_text().splitlines() if line.strip()]
        return [line["ids"] if "ids" in line else line["prompt"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'--file {args.file}: {type(error).__name__}: {error}; expected lines such as {{"prompt": "Once"}}'
        ) from error


class _Shown:
    """Prints the text of one row while it grows; what a terminal could not show is escaped."""

    def __init__(self, model: loaded_model.LoadedModel, *, is_live: bool):
        self.is_live = is_live
        self._model = model
        self._ids: list[int] = []
        self._printed = ""

    def add(self, ids: list[int | None]) -> None:
        """Prints what the new id of the first row adds; an incomplete character waits for its other bytes."""
        if not self.is_live or ids[0] is None:
            return
        self._ids.append(ids[0])
        text = self._model.decoded(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._printed):
            return
        print(terminal.printable(text[len(self._printed) :]), end="", flush=True)
        self._printed = text

    def end(self, text: str) -> None:
        """Prints what is left of the text."""
        print(terminal.printable(text[len(self._printed) :]) if text.startswith(self._printed) else f"\n{text}")


def _write(args: argparse.Namespace, prompts: list[Any], found: list[loaded_model.Text]) -> None:
    if args.out or args.json:
        lines = [json.dumps({"prompt": p, **one._asdict()}) for p, one in zip(prompts, found, strict=True)]
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")
        else:
            print("\n".join(lines))
    elif len(found) > 1:
        for prompt, one in zip(prompts, found, strict=True):
            print(terminal.printable(f"{prompt}{one.text}"), end="\n\n")
