"""Feeds changed files and messages to everything that reads what others wrote, and keeps what fails in another way.

A target reads bytes and may raise only the errors that its callers expect. Its seeds are valid; a case is a seed with
changed bytes, or with one value of its JSON replaced by an odd one. Cases that found something are kept in
`tests/lab/fuzz_cases/TARGET/` and are read by every run of the tests.
"""

import argparse
import contextlib
import copy
import functools
import hashlib
import hmac
import json
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.checkpoints import safetensors_files, steps
from core.errors import UserError
from core.files import foreign_json, paths
from core.hosts import host_messages
from core.training import goodput, metrics, run_lock
from launch import config, flags
from launch.config.trust import Trust
from models import pretrained
from tasks import streams

HELP = "feed changed files and messages to everything that reads what others wrote"
EXAMPLE = "tests/run.sh lab fuzz --seconds 60 --seed 1"

CASES = Path(__file__).parent / "fuzz_cases"
_ODD_BYTES = (
    b"[" * 5000,
    b"{",
    b"}",
    b'"',
    b"\0",
    b"\xff",
    b"1e999",
    b"-1",
    b"NaN",
    b"null",
    b"true",
    b"..",
    b"@",
    b"()",
)
_ODD_VALUES = (None, True, -1, 0, 2**80, 1e300, 0.5, "", "..", "²", "x" * 5000, [], {}, [[]], {"a": {}}, "NaN")
_CONFIG = {
    "model_type": "llama",
    "vocab_size": 83,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
}


class Target(NamedTuple):
    """Something that reads what others wrote.

    Attributes:
      read: reads the bytes.
      expected: the errors that it may raise.
      seeds: valid bytes.
    """

    read: Callable[[bytes], Any]
    expected: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


class Failure(NamedTuple):
    """A case whose reader failed in another way than expected; `kind` is the same for failures at the same place."""

    target: str
    case: bytes
    kind: str
    said: str


@contextlib.contextmanager
def targets() -> Iterator[Mapping[str, Target]]:
    """Context with all targets, by name; they write to a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="renga-fuzz-") as name:
        folder = Path(name)

        def reading(file: str, read: Callable[[Any], Any]) -> Callable[[bytes], Any]:
            return functools.partial(_read, folder / file, read)

        yield {
            "json": Target(foreign_json.loads, (foreign_json.MalformedError,), [_as_json({"a": [1, 2.5, None, "é"]})]),
            "message": Target(_message, (), _messages()),
            "lock": Target(_lock, (), [_as_json(run_lock.Owner("h", 1, 1e9, 7, "m", "t")._asdict())]),
            "metadata": Target(reading(f"7/{steps.PART}/metadata", _step), (steps.DamagedError,), [_metadata()]),
            "safetensors": Target(reading("model.safetensors", _tensors), (UserError,), [_tensor_file()]),
            "position": Target(_position, (UserError,), [_as_json({"row": 3, "source": {"id": 0}})]),
            "sessions": Target(reading(goodput.FILE, _sessions), (), [_session()]),
            "metrics": Target(reading(metrics.JSONL_NAME, _metrics), (), [_as_json({"step": 3, "loss": 2.5})]),
            "model": Target(reading("config.json", _model), (UserError,), [_as_json(_CONFIG)]),
            "configuration": Target(_configuration, (UserError,), [config.load("gin/quickstart.gin").text.encode()]),
        }


def changed(seed: bytes, rng: random.Random) -> bytes:
    """Returns a seed with a few changes."""
    if rng.random() < 0.5:
        with contextlib.suppress(ValueError):
            return _as_json(_changed_value(json.loads(seed), rng))
    content = bytearray(seed)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(4):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                del content[at : at + rng.choice((1, 8, len(content)))]
            case 2:
                content[at:at] = rng.choice(_ODD_BYTES)
            case _:
                start = rng.randrange(len(content) + 1)
                content[at:at] = content[start : start + rng.choice((1, 20, 200))]
    return bytes(content)


def _changed_value(value: Any, rng: random.Random) -> Any:
    """Replaces one value of a JSON document, removes it, or adds one."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def collect(inner: Any) -> None:
        keys = inner.keys() if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        for key in keys:
            places.append((inner, key))
            collect(inner[key])

    collect(value)
    if not places:
        return rng.choice(_ODD_VALUES)
    inner, key = rng.choice(places)
    if rng.random() < 0.2:
        del inner[key]
    else:
        inner[key] = rng.choice(_ODD_VALUES)
    return value


def attempt(name: str, target: Target, case: bytes) -> Failure | None:
    """Reads a case; returns how it failed, None if it was read or refused as expected."""
    try:
        target.read(case)
    except target.expected:
        return None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Failure(
            name, case, f"{name} {type(error).__name__} {place.filename}:{place.lineno}", traceback.format_exc()
        )
    return None


def run_for(seconds: float, *, seed: int, names: Sequence[str], tries: int | None = None) -> tuple[int, list[Failure]]:
    """Reads cases of the targets in turn, for a time or `tries` of each; returns their number and the failures."""
    rng, began, done = random.Random(seed), time.monotonic(), 0
    failures: dict[str, Failure] = {}
    with targets() as known:
        while time.monotonic() - began < seconds and (tries is None or done < tries * len(names)):
            name = names[done % len(names)]
            case = changed(rng.choice(known[name].seeds), rng)
            if failure := attempt(name, known[name], case):
                failures.setdefault(failure.kind, failure)
            done += 1
    return done, list(failures.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `lab fuzz`."""
    parser.add_argument("--seconds", type=flags.positive, default=60.0, help="time limit (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the changes (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="these targets alone")
    parser.add_argument("--keep", action="store_true", help=f"write cases that fail to {CASES.name}/")


def run(args: argparse.Namespace) -> int:
    """Runs the targets; returns 1 if something failed in another way than expected."""
    with targets() as known:
        if unknown := sorted(set(args.only or ()) - known.keys()):
            raise UserError(f"--only {' '.join(unknown)}: expected some of {', '.join(known)}")
        names = args.only or list(known)
    done, failures = run_for(args.seconds, seed=args.seed, names=names)
    for failure in failures:
        print(f"{failure.target}: {failure.case[:200]!r}\n{failure.said}")
        if args.keep:
            file = CASES / failure.target / f"{hashlib.sha256(failure.case).hexdigest()[:12]}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(failure.case)
    about = f"{done:,} cases of {len(names)} targets in {args.seconds:g} s (seed {args.seed})"
    print(f"{about}: {len(failures)} kinds of failure")
    return 1 if failures else 0


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _read(file: Path, read: Callable[[Any], Any], content: bytes) -> Any:
    """Writes a file, and reads its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return read(paths.resolve(str(file.parent)))


def _messages() -> list[bytes]:
    hello = host_messages.pack({"host": 1, "of": 2, "description": "x"}, b"")
    return [hello, hello * 3, _as_json({"host": 1, "of": 2, "description": "x"})]


def _message(case: bytes) -> None:
    """Reads the bytes as they are, and as the content of an authenticated message."""
    with contextlib.suppress(host_messages.Stranger):
        host_messages.Inbox(b"").add(_sealed(case))
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.suppress(host_messages.Stranger):
        with contextlib.suppress(OSError):
            theirs.settimeout(0.01)
            theirs.send(case[: 2**16])
        theirs.shutdown(socket.SHUT_WR)
        host_messages.receive(ours, b"", seconds=1.0)


def _sealed(body: bytes) -> bytes:
    head = host_messages.pack({}, b"")[:5] + len(body).to_bytes(4, "big")

    return head + hmac.digest(b"", body, "sha256") + body


def _lock(case: bytes) -> Any:
    owner = run_lock.Owner.parse(case.decode(errors="replace"))
    return owner and (str(owner), owner.is_alive())


def _metadata() -> bytes:
    meta = {"seed": 3, "config": "x", "validation": {"loss": 2.5}}
    return _as_json(steps.sealed(meta, step=7, content={"w": [1, 2]}, streams={"a": "b"}))


def _tensor_file() -> bytes:
    header = _as_json({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}})
    return len(header).to_bytes(8, "little") + header + bytes(24)


def _step(folder: Any) -> Any:
    """Reads the metadata as it is, and as somebody would seal it who knows the format."""
    file = folder / "metadata"
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        meta = json.loads(file.read_bytes())
        file.write_bytes(_as_json({**meta, "checksum": steps._checksum(meta)}))
    return steps.read(folder.parent)


def _position(case: bytes) -> Any:
    return streams.read_position(case, row=int)


def _metrics(folder: Any) -> Any:
    return metrics.read(str(folder))


def _model(folder: Any) -> Any:
    return pretrained.model(str(folder))


def _tensors(folder: Any) -> Any:
    found = safetensors_files.tensors(folder)
    return {name: safetensors_files.Reader(t, ())(tuple(slice(0, n) for n in t.shape)) for name, t in found.items()}


def _session() -> bytes:
    session = {"started": 1e9, "seen": 1e9 + 60, "first_step": 0, "last_step": 9, "useful_seconds": 3.0}
    return _as_json({**session, "lost_steps": 0, "finished": True})


def _sessions(folder: Any) -> Any:
    found = goodput.read(str(folder))
    return found and goodput.sentence(found)


def _configuration(case: bytes) -> Any:
    return config.load("runs/theirs/config.gin", text=case.decode(errors="replace"), trust=Trust()).build()
