"""`python -m tests.lab.on_accelerator STEP REQUEST ANSWER`: the process of one step of `tests.lab.accelerator`."""

import importlib
import json
import sys
from pathlib import Path

from tests.lab.on_accelerator.recorder import Recorder, Request
from tests.lab.on_accelerator.steps import STEPS


def main(name: str, request: str, answer: str) -> None:
    """Measures one step."""
    module, _, function = STEPS[name].code.partition(":")
    measure = getattr(importlib.import_module(f"tests.lab.on_accelerator.{module}"), function)
    measure(Recorder(Path(answer)), Request(**json.loads(Path(request).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
