"""The same decoder by transformers with PyTorch, which `torch_decoder.py` measures in an environment that has them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from core import slices
from tests.lab.on_accelerator import decoder, torch_decoder
from tests.lab.on_accelerator.recorder import Recorder, Request
from tests.lab.on_accelerator.report import FILE, Report

PROMPT, NEW, REHEARSED_NEW, BATCHES = 64, 128, 8, (1, 8, 64)
_HAS = "from importlib.util import find_spec as f; raise SystemExit(not (f('torch') and f('transformers')))"
_NEW_TOKENS = "new tokens/s, batch {}"


def training(record: Recorder, request: Request) -> None:
    """Times its training steps and its generation."""
    python = request.python or sys.executable
    # An environment of its own has its own packages, and not those of PYTHONPATH.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable}
    if subprocess.run([python, "-c", _HAS], env=env, check=False).returncode:
        record.absent("transformers", f"{python} has no torch and transformers: name one with --python")
        return
    if slices.get(request.slice).is_tpu:
        record.absent("transformers", "PyTorch does not run on TPUs here")
        return
    sizes, vocab, length = request.sized(
        (decoder.SIZES, decoder.VOCAB, decoder.LENGTH), (decoder.SMALL, decoder.SMALL_VOCAB, decoder.SMALL_LENGTH)
    )
    new = request.sized(NEW, REHEARSED_NEW)
    asked = {**sizes, "vocab_size": vocab, "length": length, "on_cpu": request.is_rehearsal}
    asked |= {"rows": request.sized(16, 2), "prompt": PROMPT, "new": new, "batches": BATCHES}
    command = [python, "-P", str(Path(torch_decoder.__file__)), json.dumps(asked)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            found = json.loads(line)
            if "absent" in found:
                record.absent("transformers", found["absent"])
            else:
                record.figure(**found, **_beside(request, found["what"], found["value"]))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def generated(request: Request) -> dict[int, float]:
    """Returns the new tokens/s that transformers had, by batch size, if it was measured before."""
    found = _earlier(request, "transformers")
    return {rows: found[name] for rows in BATCHES if (name := _NEW_TOKENS.format(rows)) in found}


def _beside(request: Request, what: str, value: float | str) -> dict[str, str]:
    ours = _earlier(request, "training").get("tokens/s") if what == "tokens/s" else None
    return {"beside": f"ours {ours:,.0f}: {ours / float(value):.2f} times"} if ours else {}


def _earlier(request: Request, step: str) -> dict[str, float]:
    file = Path(request.out, FILE)
    figures = Report.read(file).figures(step) if file.exists() else []
    return {figure.what: figure.value for figure in figures if not isinstance(figure.value, str)}
