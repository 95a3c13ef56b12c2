"""`python -m tests.lab.faulty_host FAULT -- COMMAND …`: runs `python -m launch COMMAND …` with an injected fault.

FAULT is the output of `faults.Fault.as_json`; JAX_PROCESS_INDEX tells whether this host is affected.
"""

import runpy
import sys

from launch import environment
from tests.lab import faults

if __name__ == "__main__":
    fault, _, *command = sys.argv[1:]
    index = environment.process_layout().index
    sys.argv = ["launch", *command, *faults.plant(faults.from_json(fault), process_index=index)]
    runpy.run_module("launch", run_name="__main__")
