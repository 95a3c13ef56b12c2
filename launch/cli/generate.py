"""`launch/run generate`: continues prompts with a run's model, or with a published one."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import identity, units
from core.checkpoints import reading
from core.errors import UserError
from core.training import compilation
from launch import conversation, flags, loaded_model, terminal
from launch.conversation import Conversation
from launch.live_text import LiveText
from parallel.generation.sampling import GREEDY, Sampling

COMMAND = ("runs", "generate")
HELP = "continue prompts with the model of a run, or with a published one"
EXAMPLE = """launch/run generate runs/quickstart-v4-16 --prompt "import "
  launch/run generate smollm2 --prompt "Name three primary colors." --chat --greedy
  launch/run generate smollm2 --chat
  launch/run generate llava-1.5-7b-hf --image photo.png --prompt "What is this?" --chat --greedy
  launch/run generate runs/first@1000 --file prompts.jsonl --out answers.jsonl --max-tokens 200
  launch/run generate runs/first --prompt-ids 0,5,7 --slice v4-8 --simulate --gin "STRATEGY = @strategies.fsdp()" """

_NO_LIMIT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_CONTINUATION, _ANSWER = 100, 500  # most new tokens after a prompt, and of an answer in a conversation
_SHOWN = 100  # characters to which a prompt is shortened if there are several
_EXPECTED = 'expected lines such as {"prompt": "Once"} or {"ids": [0, 5]}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, RUN@STEP, or a published model: a folder (config.json, *.safetensors) or hf://OWNER/NAME",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-ids", metavar="N,N", help="ids to continue, separated by commas")
    prompt.add_argument("--file", metavar="FILE", help='JSON lines, each {"prompt": "…"} or {"ids": [0, 5]}')
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="an image for a model that reads images; once for each image token of the prompt, in their order",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="format the prompt by the chat template, as a user's message; without a prompt, a conversation",
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=flags.at_least(1), help="default: 100; 500 for an answer in a conversation"
    )
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument("--greedy", action="store_true", help="always take the most likely token")
    drawn.add_argument("--temperature", metavar="T", type=_temperature, default=0.8, help="default: 0.8")
    parser.add_argument("--top-k", metavar="K", type=flags.at_least(0), default=0, help="default: 0, all tokens")
    parser.add_argument("--top-p", metavar="P", type=flags.positive, default=1.0, help="default: 1")
    parser.add_argument("--min-p", metavar="P", type=float, default=0.0, help="default: 0")
    parser.add_argument("--seed", metavar="N", type=flags.at_least(0), default=0, help="default: 0")
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=flags.at_least(1),
        default=16,
        help="prompts of --file that run together; default: 16",
    )
    parser.add_argument(
        "--out",
        **flags.OUTPUT,
        help="write JSON lines here when all are done; the same command continues after an interruption",
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines: text, tokens, ids, log-probabilities")
    flags.add(parser, "--slice", help="lay the model out on this slice (default: one chip)")
    flags.add(parser, "--overwrite", "--simulate", "--gin")


def _temperature(text: str) -> float:
    try:
        return flags.positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; --greedy always takes the most likely token") from error


def run(args: argparse.Namespace) -> int:
    """Continues prompts, and prints or writes the continuations; without prompts, converses.

    Raises UserError if options are out of range or contradictory.
    """
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected from 0 to 1")
    limits = [f"--{name.replace('_', '-')}" for name, off in _NO_LIMIT.items() if getattr(args, name) != off]
    if args.greedy and limits:
        raise UserError(f"--greedy takes the most likely token, whatever {' and '.join(limits)}: leave one out")
    if args.json and args.out:
        raise UserError("--json prints the lines that --out writes to a file: give one of them")
    is_conversation = args.prompt is args.prompt_ids is args.file is None
    if args.image and (is_conversation or args.file is not None):
        raise UserError("--image belongs to one prompt: give --prompt or --prompt-ids")
    prompts = [] if is_conversation else _prompts(args)
    images = [args.image] if args.image else []
    if is_conversation:
        _check_conversation(args)
    compilation.use_cache_of_user()
    loaded_model.choose_devices(args.slice, is_simulated=args.simulate)
    max_tokens = args.max_tokens or (_ANSWER if is_conversation else _CONTINUATION)
    ids: list[list[int]] = []

    def check(model: loaded_model.LoadedModel) -> None:
        if is_conversation:  # with a short message, which finds a model without a template
            model.checked(["Hello"], max_tokens=1, is_chat=True)
        else:
            ids.extend(model.checked(prompts, max_tokens=max_tokens, is_chat=args.chat, images=images))

    model = loaded_model.load(args.model, slice_name=args.slice, bindings=args.gin, check_model=check)
    sampling = GREEDY if args.greedy else Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling, "seed": args.seed}
    options |= {"images": images} if images else {}
    if is_conversation:
        conversation.run(Conversation(model, **options))
        return 0
    return _answer(args, model, prompts, ids, options)


def _check_conversation(args: argparse.Namespace) -> None:
    if not args.chat:
        raise UserError("give --prompt, --prompt-ids or --file; or --chat alone for a conversation")
    if args.json or args.out:
        raise UserError(
            "--chat without a prompt is a conversation, which neither --json nor --out records: leave them out, or "
            "give --prompt or --file"
        )


def _answer(
    args: argparse.Namespace,
    model: loaded_model.LoadedModel,
    prompts: list[str | list[int]],
    ids: list[list[int]],
    options: Mapping[str, Any],
) -> int:
    answers = _Answers(args.out, len(prompts), _inputs(model, ids, options)) if args.out else None
    live = None if args.json or args.out or len(prompts) > 1 else LiveText(model, ids[0])
    watched: dict[str, Any] = {} if live is None else {"on_tokens": live.add}
    done, count, began = answers.done if answers else 0, 0, time.monotonic()
    for found in model.batches(ids, rows=args.batch_size, skip=done, **watched, **options):
        of_found = zip(prompts[done:], ids[done:], found, strict=False)
        lines = [_line(model, prompt, before, one) for prompt, before, one in of_found]
        if answers:
            answers.add(lines)
        elif args.json:
            print("\n".join(lines), flush=True)
        elif live is not None:
            live.end(found[0].text)
        else:
            _print(prompts, done, found)
        done, count = done + len(found), count + sum(len(one.ids) for one in found)
    if answers:
        answers.finish()
    seconds = units.seconds(time.monotonic() - began)
    print(f"{units.counted(count, 'token')} in {seconds}, with compiling", file=sys.stderr)
    return 0


def _prompts(args: argparse.Namespace) -> list[str | list[int]]:
    if args.prompt is not None:
        return [args.prompt]
    if args.prompt_ids is None:
        return _read(args.file, is_chat=args.chat)
    if args.chat:
        raise UserError("--chat formats text, and --prompt-ids gives ids: give --prompt, or leave out --chat")
    words = args.prompt_ids.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UserError(f"--prompt-ids {args.prompt_ids}: expected whole numbers separated by commas, such as 0,5,7")
    return [list(map(int, words))]


def _read(file: str, *, is_chat: bool) -> list[str | list[int]]:
    try:
        lines = Path(file).read_text().split("\n")  # JSON may contain other separators of lines
    except (OSError, UnicodeError) as error:
        raise UserError(f"--file {file}: {error}") from error
    found = [
        _prompt(line, f"--file {file}, line {n}", is_chat=is_chat) for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise UserError(f"--file {file} has no prompts: {_EXPECTED}")
    return found


def _prompt(line: str, where: str, *, is_chat: bool) -> str | list[int]:
    try:
        read = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: {error}: {_EXPECTED}") from error
    if not isinstance(read, dict) or len(read.keys() & {"prompt", "ids"}) != 1:
        raise UserError(f"{where}: {line.strip()[:80]}: {_EXPECTED}")
    if "prompt" in read and isinstance(read["prompt"], str):
        return read["prompt"]
    if "ids" in read and isinstance(read["ids"], list) and all(type(i) is int for i in read["ids"]):
        if is_chat:
            raise UserError(f"{where}: --chat formats text, and this line gives ids: leave out --chat")
        return read["ids"]
    raise UserError(f"{where}: {line.strip()[:80]}: {_EXPECTED}")


def _line(
    model: loaded_model.LoadedModel, prompt: str | list[int], before: Sequence[int], found: loaded_model.Text
) -> str:
    whole = [*before, *found.ids]
    tokens = [model.decoded([whole[at]], after=whole[:at]) for at in range(len(before), len(whole))]
    return json.dumps({"prompt": prompt, "text": found.text, "tokens": tokens, **found._asdict()})


def _print(prompts: Sequence[str | list[int]], done: int, found: Sequence[loaded_model.Text]) -> None:
    for number, one in enumerate(found, done + 1):
        of = f"prompt {number} of {len(prompts)}: {_shortened(prompts[number - 1])}"
        print(f"{of}\n{terminal.printable(one.text)}\n", flush=True)


def _shortened(prompt: str | list[int]) -> str:
    text = " ".join(prompt.split()) if isinstance(prompt, str) else ",".join(map(str, prompt))
    return terminal.printable(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")


def _inputs(model: loaded_model.LoadedModel, ids: Sequence[Sequence[int]], options: Mapping[str, Any]) -> Any:
    vocabulary = None if model.vocabulary is None else model.vocabulary.size
    params = model.params if model.sight is None else (model.params, model.sight.params)
    numbers = reading.fingerprints(reading.by_name(params))
    if "images" in options:
        contents = [hashlib.sha256(loaded_model.image_content(file)).hexdigest() for file in options["images"][0]]
        options = {**options, "images": contents}
    return model.model, numbers, model.stop_ids, vocabulary, ids, options


class _Answers:
    """The file of answers, which the same command continues after an interruption."""

    def __init__(self, path: Path, prompts: int, inputs: Any):
        digest = hashlib.sha256(identity.text(inputs).encode()).hexdigest()[:8]
        self._path, self._partial = path, path.with_name(f"{path.name}.{digest}.partial")
        written = self._partial.read_bytes() if self._partial.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]  # the last line may have been cut off
        self.done = whole.count(b"\n")
        if self.done:
            print(f"{self._partial}: continues after {self.done} of {prompts} prompts", file=sys.stderr)
        if whole != written:
            self._partial.write_bytes(whole)

    def add(self, lines: list[str]) -> None:
        with self._partial.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def finish(self) -> None:
        self._partial.replace(self._path)
