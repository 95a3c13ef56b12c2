"""Workers: two at a time, a record of each, and no process left."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from core.errors import UserError
from launch import program_identity
from launch.config import loader
from launch.plan import compiling, search
from launch.plan.compiling import Job
from parallel.planning import records

STUB = """
import json, os, pathlib, sys, time
job = json.load(open(sys.argv[1]))
kind, _, argument = job["name"].partition(" ")
if kind == "crash":
    print("out of luck"); sys.exit(3)
if kind == "log":
    together, _, path = argument.partition(" ")
    with open(path, "a") as log: log.write("+")
    end = time.time() + 20
    while pathlib.Path(path).read_text().count("+") < int(together) and time.time() < end: time.sleep(0.02)
    with open(path, "a") as log: log.write("-")
if kind == "sleep":
    pathlib.Path(argument).write_text(str(os.getpid())); time.sleep(60)
record = {"status": "refused", "reason": job["name"], "time": None, "warnings": []}
pathlib.Path(job["record"]).write_text(json.dumps(record))
"""


@pytest.fixture
def command(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    return [sys.executable, str(stub)]


def jobs(tmp_path, *names):
    return iter([Job(name, "e.gin", "v4-8", (), (), "", tmp_path / f"{i}.json") for i, name in enumerate(names)])


def test_every_job_gives_its_record(tmp_path, command):
    done = list(compiling.compile_all(jobs(tmp_path, "a", "b", "c"), wanted=lambda: 9, command=command))
    assert sorted(record.reason for _, record in done) == ["a", "b", "c"]
    assert all(job.name == record.reason for job, record in done)


def test_a_crash_is_a_row_with_its_last_words_and_is_not_kept(tmp_path, command):
    ((job, record),) = compiling.compile_all(jobs(tmp_path, "crash"), wanted=lambda: 9, command=command)
    assert record.status == records.FAILED
    assert "ended with 3: out of luck" in record.reason
    assert not job.record.exists()


def test_workers_import_our_modules_from_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.environment, "import_root", lambda: tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", "mine")
    command = [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH']); raise SystemExit(3)"]
    ((_, record),) = compiling.compile_all(jobs(tmp_path, "a"), wanted=lambda: 1, command=command)
    assert record.reason.endswith(f": {tmp_path}/site:mine")


def test_a_worker_refuses_to_compile_another_program_than_the_candidate(monkeypatch):
    """Its record would be that of the candidate, for every experiment."""
    monkeypatch.setattr(compiling.compiled_records, "record", lambda bound: "compiled")
    experiment = loader.load("gin/quickstart.gin", slice_name="v4-8").build()
    given = {"slice_name": "v4-8", "candidate": (), "program": program_identity.layout_text(experiment)}
    assert compiling.compile_one("gin/quickstart.gin", bindings=(), **given) == "compiled"
    with pytest.raises(UserError, match="change the candidate to another program"):
        compiling.compile_one("gin/quickstart.gin", bindings=[OVERLAPPED], **given)


OVERLAPPED = "strategies.fsdp.overlap_reduction = True"
GIVEN = {  # bindings of flags that have no effect beside the strategy of another candidate
    "of its own strategy": [OVERLAPPED],
    "of a schedule": [
        "from parallel.pipeline import schedules",
        "STRATEGY = @strategies.pipeline()",
        "strategies.pipeline.stage = 2",
        "strategies.pipeline.schedule = @schedules.gpipe()",
        "schedules.gpipe.num_microbatches = 4",
    ],
    "of own tables": [
        "STRATEGY = @strategies.override()",
        "strategies.override.strategy = @strategies.fsdp_tensor()",
        "strategies.fsdp_tensor.tensor = 2",
        "strategies.override.param_rules = {'kv_heads': None}",
    ],
}


FEW = (None, "fsdp", "fsdp_tensor", "pipeline")  # its own tables, what they are made of, and others


@pytest.mark.parametrize(
    ("bindings", "constructors"),
    [
        pytest.param(GIVEN["of own tables"], FEW, id="of own tables"),
        *(
            pytest.param(given, (), id=f"{name}, every strategy", marks=pytest.mark.slow)
            for name, given in GIVEN.items()
        ),
    ],
)
def test_a_binding_that_a_candidate_leaves_without_effect_does_not_refuse_it(monkeypatch, bindings, constructors):
    monkeypatch.setattr(compiling.compiled_records, "record", lambda bound: "compiled")
    asked = search.ask("gin/quickstart.gin", slice_name="v4-8", bindings=bindings)
    first = {}
    for one in search.options(asked):
        constructor = one.candidate.layout and one.candidate.layout.constructor
        if not one.reason and constructor in (constructors or (constructor,)):
            first.setdefault(constructor, one)
    assert len(first) > 3
    for one in first.values():
        compiled = compiling.compile_one(
            asked.path,
            slice_name="v4-8",
            bindings=asked.bindings,
            candidate=one.bindings,
            program=program_identity.layout_text(one.made),
        )
        assert compiled == "compiled", one.name


def test_a_configuration_with_mistakes_gives_no_record():
    """It says nothing about the program, whose record every experiment would find."""
    with pytest.raises(UserError, match=r"strategies\.tensor\.tensor has no effect"):
        compiling.compile_one(
            "gin/quickstart.gin",
            slice_name="v4-8",
            bindings=["strategies.tensor.tensor = 2"],
            candidate=(),
            program="",
        )


@pytest.mark.parametrize(("room", "begins"), [(1, "+-+-+-"), (2, "++")])
def test_as_many_max_concurrent_as_there_is_room_for(tmp_path, command, monkeypatch, room, begins):
    monkeypatch.setattr(compiling, "max_concurrent", lambda: room)
    file = tmp_path / "log"
    list(compiling.compile_all(jobs(tmp_path, *[f"log {room} {file}"] * 3), wanted=lambda: 9, command=command))
    assert file.read_text().startswith(begins)


def test_room_is_memory_and_processors(monkeypatch):
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 8)
    for gib, expected in ((3, 1), (9, 2), (99, 2)):
        monkeypatch.setattr(compiling.host_memory, "available_bytes", lambda gib=gib: gib * 2**30)
        assert compiling.max_concurrent() == expected


def test_no_more_are_started_than_are_wanted(tmp_path, command):
    left = [2]

    def started(job):
        left[0] -= 1

    done = list(
        compiling.compile_all(jobs(tmp_path, *"abcde"), wanted=lambda: left[0], on_start=started, command=command)
    )
    assert len(done) == 2


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_end_of_a_plan_ends_its_workers_and_keeps_what_is_done(tmp_path, command, number, code):
    """A plan of its own, interrupted as a terminal would, or killed: one record is there, and no process."""
    pid = tmp_path / "pid"
    text = f"""
    import pathlib, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    from launch.plan import compiling
    from launch.plan.compiling import Job
    compiling.max_concurrent = lambda: 2
    folder = pathlib.Path({str(tmp_path)!r})
    names = ["quick", "sleep {pid}"]
    jobs = iter([Job(n, "e.gin", "v4-8", (), (), "", folder / f"{{i}}.json") for i, n in enumerate(names)])
    try:
        for _, record in compiling.compile_all(jobs, wanted=lambda: 9, command={command!r}):
            print("done", record.reason, flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.time() + 60
    while not (pid.exists() and pid.read_text() and (tmp_path / "0.json").exists()) and time.time() < deadline:
        time.sleep(0.05)
    assert process.stdout.readline() == "done quick\n"
    os.killpg(process.pid, number)
    assert process.wait(timeout=30) == code
    while is_running(int(pid.read_text())):
        assert time.time() < deadline
        time.sleep(0.05)
