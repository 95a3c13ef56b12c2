"""Compares the final states of two runs, with real checkpoints, metrics and logs."""

import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import store
from tests.lab import evidence
from tests.lab.faults import Fault
from tests.lab.harness import Ended, FaultHarness
from tests.lab.scenarios import LOST, Scenario

LAYOUT = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("fsdp",)), PartitionSpec("fsdp"))
LOG = "11-22 04:26:52.4 host 2 step 5 | host 2 (127.0.0.1) raised RuntimeError: no"


def make(run_dir, *, weight=1.0, loss=0.5, steps=(4, 8), first_steps=(0,)):
    """Run directory of a finished run: checkpoints, losses, a log, a line for each start."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "host_2.log").write_text(f"--- host 2: raised\n{LOG}\n")
    checkpoints = store.Checkpoints(str(run_dir / "checkpoints"), keep=3)
    for step in steps:
        state = jax.device_put({"w": np.full((8, 4), weight * step, np.float32)}, LAYOUT)
        checkpoints.save(step, state=state, data={"host_0": b"16"}, meta={})
    checkpoints.close()
    rows = [{"step": n, "loss": loss / n, "time_seconds": 100.0 + n} for n in range(1, max(steps) + 1)]
    lines = [json.dumps(row) for row in rows]
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "lo']))
    sessions = [{"started": 1.0, "seen": 2.0, "first_step": n, "last_step": 8} for n in first_steps]
    (run_dir / "sessions.jsonl").write_text("".join(json.dumps(s) + "\n" for s in sessions))
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return make(tmp_path_factory.mktemp("runs") / "undisturbed")


def truncate_newest(run_dir):
    files = (run_dir / "checkpoints" / "8" / "state").glob("**/d/*")  # the files that contain arrays
    file = max(files, key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("made", "damage", "said"),
    [
        ({}, None, ""),
        ({"weight": 1.0 + 2**-23}, None, "arrays of its last checkpoint differ"),
        ({"loss": 0.5 + 1e-16 * 2}, None, "its losses differ"),
        ({"steps": (4,)}, None, "its last checkpoint is step 4, expected 8"),
        ({}, truncate_newest, "its last checkpoint is damaged: "),
    ],
)
def test_differences_are_found(undisturbed, tmp_path, made, damage, said):
    """Finds the smallest difference of a number, and a file that differs from its description."""
    run_dir = make(tmp_path / "run", **made)
    if damage:
        damage(run_dir)
    found = evidence.difference(run_dir, undisturbed)
    assert found.startswith(said) if said else found == ""


def test_evidence_of_a_run_is_read(undisturbed):
    assert evidence.left(undisturbed) == (8, 8, 1)
    assert evidence.said(undisturbed, "raised") == "host 2 (127.0.0.1) raised RuntimeError: no"
    assert evidence.said(undisturbed, "silent") == ""
    assert evidence.seconds_to_a_step(undisturbed, behind=4, started=90.0) == 15.0
    assert evidence.seconds_to_a_step(undisturbed, behind=8, started=90.0) is None
    assert evidence.event(undisturbed) is None


@pytest.fixture
def harness(undisturbed, tmp_path, monkeypatch):
    """A harness for existing run directories; starts nothing."""
    monkeypatch.setattr(FaultHarness, "undisturbed", undisturbed)
    return FaultHarness(tmp_path, requested=[])


def judged(harness, run_dir, *, code=15, seconds=2.0, newest=4, again=0, says="host 2 .*raised"):
    before = evidence.Left(made=6, newest=newest, starts=1)
    ended = Ended(again, 3.0, 105.0)
    return harness._outcome(Scenario("it fails", LOST, says), run_dir, (code,), seconds, before, ended)


def test_a_run_that_went_on_as_it_must_has_no_problems(harness, tmp_path):
    outcome = judged(harness, make(tmp_path / "run", first_steps=(0, 4)))
    assert (outcome.problems, outcome.difference, outcome.lost_steps) == ((), "", 2)
    assert outcome.recovered_seconds == 3.0  # step 5 ended at 105, the start was at 102


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        ({"first_steps": (0, 0)}, {}, "it went on from step 0, and step 4 was there"),
        ({}, {"code": 0}, r"exit code 0, expected one of \(15, 137\)"),
        ({}, {"seconds": 31.0}, "it took 31 s to end, expected 30 at most"),
        ({}, {"again": 13}, "the restart ended with exit code 13"),
        ({}, {"says": "silent"}, "no log matches 'silent'"),
        ({"weight": 2.0}, {}, "arrays of its last checkpoint differ"),
    ],
)
def test_each_deviation_is_a_problem(harness, tmp_path, made, asked, said):
    """A run that lost its checkpoints ends in the same state; the step at which it began reveals it."""
    run_dir = make(tmp_path / "run", **{"first_steps": (0, 4), **made})
    problems = judged(harness, run_dir, **asked).problems
    assert len(problems) == 1
    assert re.match(said, problems[0])


def test_a_fault_that_never_came_is_a_problem(harness, tmp_path):
    run_dir = make(tmp_path / "run", first_steps=(0, 4))
    scenario = Scenario("it fails", LOST, "raised", Fault("kill"))
    before = evidence.Left(made=6, newest=4, starts=1)
    outcome = harness._outcome(scenario, run_dir, (15,), 2.0, before, Ended(0, 3.0, 105.0))
    assert outcome.problems == ("the injected fault did not happen",)
