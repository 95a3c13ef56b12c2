"""A training process imports no module for planning, checking, comparing or test equipment."""

import json
import os
import subprocess
import sys

from launch import environment

# A run uses nearly every file of `core/` and most of `parallel/` and `tasks/`; what may grow unnoticed is the launcher.
# Packages do not count: their `__init__.py` are nearly empty.
MOST_MODULES, MOST_OF_LAUNCH = 131, 26
NOT_FOR_TRAINING = (
    "launch.check",
    "launch.experiments",
    "launch.plan",
    "core.training.profile_request",
    "launch.verify",
    "parallel.verify.agreement",
    "parallel.verify.first_difference",
    "parallel.compiled.hlo",
    "parallel.compiled.lints",
    "parallel.planning",
    "parallel.verify.recording",
    "tests",
)
SMALL = (
    "BATCH_SIZE = 4",
    "LENGTH = 16",
    "NUM_STREAMS = 4",
    "EVAL_BATCHES = 1",
    "transformer.Transformer.num_layers = 1",
)
PROGRAM = """
import json, sys
from launch import __main__ as cli
code = cli.main(sys.argv[2:])
loaded = [name for name, module in sys.modules.items() if not hasattr(module, "__path__")]
open(sys.argv[1], "w").write(json.dumps(sorted(loaded)))
sys.exit(code)
"""


def test_a_run_imports_nothing_but_what_it_needs(tmp_path):
    bindings = [word for binding in SMALL for word in ("--gin", binding)]
    where = ["--slice", "v5e-1", "--run-dir", str(tmp_path / "run"), "--steps", "2"]
    command = ["train", "gin/quickstart.gin", *where, *bindings]
    simulated = {"RENGA_SIMULATE": "v5e-1", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "modules.json", *command],
        cwd=environment.WORKSPACE,
        env={**os.environ, **simulated},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    loaded = json.loads((tmp_path / "modules.json").read_text())
    ours = [name for name in loaded if name.split(".")[0] in ("core", "parallel", "models", "tasks", "launch", "tests")]
    assert not [name for name in ours if name.startswith(NOT_FOR_TRAINING)]
    assert "core.training.trainer" in ours
    assert len(ours) <= MOST_MODULES, "\n".join(ours)
    assert len([name for name in ours if name.startswith("launch")]) <= MOST_OF_LAUNCH, "\n".join(ours)
