"""`python -m tests.lab.faulty_host FAULT -- COMMAND …`: one host, as `python -m launch COMMAND …`, but for a fault.

FAULT is what `faults.Fault.as_json` gives; who it happens to is told by JAX_PROCESS_INDEX.
"""

from __future__ import annotations

import runpy
import sys

from launch import environment
from tests.lab import faults

if __name__ == "__main__":
    fault, _, *command = sys.argv[1:]
    index = environment.process_layout().index
    sys.argv = ["launch", *command, *faults.plant(faults.from_json(fault), process_index=index)]
    runpy.run_module("launch", run_name="__main__")
