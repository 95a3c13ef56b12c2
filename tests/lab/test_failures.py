"""Injected failures: their descriptions, the table of results, and detection of growth."""

import dataclasses
import gc
import random
import re
import subprocess
import sys
import threading
import tracemalloc

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from core.checkpoints import writing
from core.hosts import activity, exit_codes
from launch.environment import WORKSPACE
from tests.lab import faults, growth, table
from tests.lab.flips import Flips
from tests.lab.growth import Sample
from tests.lab.harness import Outcome
from tests.lab.scenarios import SCENARIOS

ENDED = Outcome("a host leaves", (15, 137), 2.04, "host 2 left | its loop", 3, 8.1)


def test_a_fault_travels_on_a_command_line():
    fault = faults.Fault("config", hosts=(1, 3), bindings=("A = 1", "B = 'x y'"), note="/tmp/n")
    assert faults.from_json(fault.as_json()) == fault


def test_every_scenario_can_be_planted_and_says_what_it_expects():
    assert len({s.name for s in SCENARIOS}) == len(SCENARIOS)
    known = {"kill", "config", "missing", *faults.KINDS}
    for one in SCENARIOS:
        assert [one.fault, one.damage, one.refused] != [None, None, None]
        assert one.fault is None or one.fault.kind in known
        assert all(exit_codes.ending(code).meaning for code in one.codes)
        re.compile(one.says)
    assert {s.fault.kind for s in SCENARIOS if s.fault} == known


def test_random_kills_come_while_training_saving_and_restoring():
    chance = random.Random(0)
    kills = [faults.random_kill(chance, hosts=4, newest=40, within=8, note="n") for _ in range(60)]
    assert {k.activity for k in kills} == {activity.TRAINING, activity.SAVING, activity.RESTORING}
    assert {k.hosts[0] for k in kills} == {0, 1, 2, 3}
    assert {k.step for k in kills if k.activity == activity.RESTORING} == {0}
    assert {k.step for k in kills if k.activity != activity.RESTORING} == set(range(41, 49))


def test_no_host_is_killed_restoring_without_a_checkpoint():
    chance = random.Random(0)
    kills = [faults.random_kill(chance, hosts=4, newest=0, within=8, note="n") for _ in range(40)]
    assert {k.activity for k in kills} == {activity.TRAINING, activity.SAVING}


def test_the_table_has_a_row_for_each_and_is_kept_between_its_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    made = table.markdown([ENDED], Flips(198, 2, ()))
    assert made.startswith("Hosts were CPU processes that communicate by gloo. Hangs of TPU links")
    assert "| a host leaves | 2.0 | 15, 137 | host 2 left / its loop | 3 | 8.1 | yes |" in made
    assert "200 times | – | – | 198 refused, 2 without effect, 0 neither | – | – | yes |" in made
    table.keep(made, whole=True, readme=readme)
    table.keep(made, whole=True, readme=readme)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{table.END}\nafter\n")
    assert text.count(made) == 1
    assert "old" not in text


def test_a_part_of_the_table_replaces_only_its_rows(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{table.BEGIN}\n{table.END}\n")
    other = dataclasses.replace(ENDED, name="a host hangs")
    table.keep(table.markdown([other, ENDED], Flips(9, 1, ())), whole=True, readme=readme)
    table.keep(table.markdown([dataclasses.replace(ENDED, lost_steps=7)], None), whole=False, readme=readme)
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0][2:] for row in rows] == [
        "injected fault",
        "a host hangs",
        "a host leaves",
        "one bit flipped in a checkpoint's files, 10 times",
    ]
    assert "| 3 | 8.1 |" in rows[1]
    assert "| 7 | 8.1 |" in rows[2]
    assert len(rows) == 4


def test_a_table_without_marks_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match="to write the table between"):
        table.keep("x", whole=True, readme=tmp_path / "README.md")


def test_the_table_that_is_kept_is_of_every_failure_and_all_ended_as_they_must():
    text = table.README.read_text().partition(table.BEGIN)[2].partition(table.END)[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    kills, flips = "kill -9 of a random host at 20 random moments", "one bit flipped in a checkpoint's files, 200 times"
    assert [row[0] for row in rows[1:]] == [*(s.name for s in SCENARIOS), kills, flips]
    assert {row[-1] for row in rows[1:]} == {"yes"}
    assert table.CAPTION in text


def samples(**at):
    """Returns fifty samples; the values are functions of the step, by name."""
    steady = {
        "memory_bytes": lambda n: 10**9 + n % 3 * 10**6,
        "arrays": lambda n: 100 + n % 2,
        "array_bytes": lambda n: 7,
    }
    steady |= {"files": lambda n: 40 + n % 4, "threads": lambda n: 9}
    return [Sample(100 * n, **{name: f(n) for name, f in (steady | at).items()}) for n in range(1, 51)]


def test_oscillating_values_do_not_count_as_growth():
    assert growth.grown(samples()) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", lambda n: 6 * 10**8 + n % 3 * 10**6 + n * 100 * 5000),  # 5 KB a step
        ("arrays", lambda n: 100 + n // 5 + 12 * (n % 2)),
        ("array_bytes", lambda n: 7 + n // 10),
        ("files", lambda n: 40 + n),
        ("threads", lambda n: 9 + (n > 40)),
    ],
)
def test_growing_resources_are_named(name, value):
    assert set(growth.grown(samples(**{name: value}))) == {name}


def test_a_start_that_needs_more_and_more_is_no_growth():
    assert growth.grown(samples(memory_bytes=lambda n: 10**9 - max(0, 8 - n) * 10**8)) == {}


def test_the_known_leak_of_tensorstore_does_not_count():
    leaking = samples(memory_bytes=lambda n: 10**8 + n * 20 * growth.LEAKED_BYTES)
    assert set(growth.grown(leaking)) == {"memory_bytes"}
    assert growth.grown(leaking, save_interval=5) == {}
    assert set(growth.grown(leaking, save_interval=100)) == {"memory_bytes"}


@pytest.mark.slow
def test_a_save_leaks_in_tensorstore_what_is_allowed_for(tmp_path):
    """If it leaks less, reduce or remove `growth.LEAKED_BYTES`."""
    tree = {f"array_{n}": jax.device_put(np.ones((64, 32), np.float32)) for n in range(41)}
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path / "checkpoints", options=options) as manager:

        def leaked(steps):
            for step in steps:
                manager.save(step, args=ocp.args.StandardSave(tree))
                manager.wait_until_finished()
            gc.collect()
            traced = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*tensorstore_utils.py")])
            return sum(trace.size for trace in traced.traces)

        tracemalloc.start()
        try:
            before = leaked(range(5))
            a_save = (leaked(range(5, 25)) - before) / 20
        finally:
            tracemalloc.stop()
    assert 0.8 * growth.LEAKED_BYTES < a_save < 1.2 * growth.LEAKED_BYTES


def test_a_soak_without_measurements_is_refused():
    with pytest.raises(ValueError, match="run more steps"):
        growth.grown(samples()[:12])


def test_a_sample_is_of_the_memory_of_this_process(tmp_path):
    """One more device buffer, open file and thread are counted as one more each."""
    gc.collect()
    before = growth.sample(1)
    held, file, over = jax.device_put(np.zeros((256, 4), np.float32)), (tmp_path / "file").open("w"), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    after = growth.sample(2)
    over.set()
    thread.join()
    file.close()
    assert (after.arrays - before.arrays, after.array_bytes - before.array_bytes) == (1, held.nbytes)
    assert (after.files - before.files, after.threads - before.threads) == (1, 1)
    assert abs(after.memory_bytes - before.memory_bytes) < 2**28 < 20 * after.memory_bytes


def test_memory_that_was_freed_is_not_held():
    """Even if the last of many blocks lies above the freed ones, so that the C library cannot return them by itself.

    In a process of its own: memory that other tests have freed would be taken first.
    """
    program = f"from tests.lab import test_failures; test_failures.{hold_and_free.__name__}()"
    ended = subprocess.run([sys.executable, "-c", program], cwd=WORKSPACE, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def hold_and_free():
    before = growth.sample(1).memory_bytes
    blocks = [bytearray(b"x" * 2**10) for _ in range(2**17)]
    during, last = growth.sample(1).memory_bytes, blocks.pop()
    del blocks
    assert during - before > 2**27
    assert growth.sample(1).memory_bytes - before < 2**24
    assert last


def test_a_sampler_waits_for_saves_in_progress(tmp_path):
    """It waits for no other thread."""
    over = threading.Event()
    saving = threading.Timer(0.2, lambda: None)
    other = threading.Thread(target=over.wait, daemon=True)
    saving.name = f"{writing.THREAD}20"
    saving.start()
    other.start()
    growth.Sampler(tmp_path / "samples", every=10).before_step(21)
    assert not saving.is_alive()
    assert other.is_alive()
    over.set()


def test_a_checkpoint_that_is_never_written_ends_the_soak(tmp_path, monkeypatch):
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True, name=f"{writing.THREAD}20").start()
    monkeypatch.setattr(growth, "WRITTEN_WITHIN_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"checkpoint 20 was not written within 0\.1 s"):
        growth.Sampler(tmp_path / "samples", every=10).before_step(21)
    over.set()


def test_a_sampler_writes_a_line_every_so_many_steps(tmp_path):
    sampler = growth.Sampler(tmp_path / "samples", every=10)
    for step in range(1, 42):
        sampler.before_step(step)
    assert [s.step for s in growth.read(tmp_path / "samples")] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["failures", "--only", "earthquake"], "no failure has such a name"),
        (["failures", "--kills", "-1"], "--kills -1: expected 0 or more"),
        (["surroundings", "--only", "the moon"], "no surroundings have such a name"),
        (["soak", "--steps", "3"], "--steps 3: expected at least 400"),
    ],
)
def test_wrong_input_is_refused(lab, arguments, said):
    assert said in lab(*arguments, code=exit_codes.USER_ERROR)
