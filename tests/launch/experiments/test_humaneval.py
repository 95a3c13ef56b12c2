"""HumanEval: the estimator, the format, and a sandbox that survives hostile programs."""

import itertools
import json
import os
import socket
import time

import pytest

from core.errors import UserError
from launch import __main__ as command
from launch import loaded_model
from launch.experiments import benchmarks
from tasks.code import humaneval, sandbox
from tasks.code.sandbox import Limits, Outcome

LIMITS = Limits(seconds=30.0, memory_bytes=2**30)
RAISED = "PermissionError"


def outcome(code):
    return sandbox.run(code, LIMITS)


@pytest.mark.covers("N14")
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n >= k:
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert humaneval.pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_programs_that_compute_pass():
    assert outcome("import math, collections, re\nassert math.gcd(12, 18) == 6") == Outcome(True)
    assert outcome("import numpy as np\nassert np.arange(5).sum() == 10\nprint('said')") == Outcome(True)
    assert outcome("assert 1 + 1 == 3") == Outcome(False, "AssertionError")
    assert outcome("def f(:") == Outcome(False, "SyntaxError")


@pytest.mark.covers("N14")
def test_a_fork_bomb_starts_no_process():
    """200 attempts, so that a sandbox that failed would not harm the machine."""
    attempts = "import os\nfor _ in range(200):\n    pid = os.fork()\n    if pid == 0:\n        os._exit(0)\n"
    assert outcome(attempts) == Outcome(False, RAISED)
    assert outcome("import subprocess\nsubprocess.run(['true'])") == Outcome(False, RAISED)
    threads = "import threading\nthread = threading.Thread(target=print)\nthread.start()"
    assert outcome(threads) == Outcome(False, "RuntimeError")


@pytest.mark.covers("N14")
def test_an_endless_loop_ends_in_time():
    began = time.monotonic()
    for attempt in (
        "while True: pass",
        "import time\ntime.sleep(100)",
        "while True:\n try: 1 / 0\n except: pass",
        "import os\nos.closerange(0, 64)\nwhile True: pass",
    ):
        assert sandbox.run(attempt, Limits(seconds=0.2)) == Outcome(False, "timed out")
    assert time.monotonic() - began < 60  # of a busy machine


@pytest.mark.covers("N14")
def test_files_are_not_written_and_not_removed(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    for attempt in (
        f"open({str(tmp_path / 'new.txt')!r}, 'w')",
        "open('/tmp/renga-sandbox-wrote-this', 'w')",
        f"open({str(kept)!r}, 'a')",
        f"open({str(kept)!r}, 'r+')",
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.rename({str(kept)!r}, {str(tmp_path / 'moved')!r})",
        f"import os\nos.mkdir({str(tmp_path / 'folder')!r})",
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.symlink('/', {str(tmp_path / 'link')!r})",
        "import os\nos.memfd_create('x')",
    ):
        assert outcome(attempt) == Outcome(False, RAISED), attempt
    assert outcome(f"assert open({str(kept)!r}).read() == 'kept'").passed
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]
    assert not os.path.exists("/tmp/renga-sandbox-wrote-this")  # noqa: PTH110


@pytest.mark.covers("N14")
def test_10_gb_of_memory_are_refused():
    assert outcome("x = bytearray(10 * 10**9)") == Outcome(False, "MemoryError")
    assert not outcome("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))").passed


@pytest.mark.covers("N14")
def test_no_signal_reaches_another_process():
    for attempt in ("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(0, 9)", f"os.kill({os.getpid()}, 9)"):
        assert outcome(f"import os\n{attempt}") == Outcome(False, RAISED), attempt


@pytest.mark.covers("N14")
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))"
        assert outcome(attempt) == Outcome(False, RAISED)


@pytest.mark.covers("N14")
def test_a_program_that_ends_early_or_writes_much_has_not_passed():
    assert outcome("import os\nos._exit(0)") == Outcome(False, "ended early")
    assert outcome("raise SystemExit(0)") == Outcome(False, "SystemExit")
    assert not outcome(
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'x' * 10**6)\n    except OSError: pass"
    ).passed


def test_a_machine_that_cannot_confine_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda code, limits=None: Outcome(False, "RuntimeError"))
    with pytest.raises(UserError, match=r"cannot be confined on this machine \(RuntimeError\)"):
        sandbox.run_all(["pass"])


PROBLEMS = [
    {
        "task_id": "T/0",
        "prompt": "def add(a, b):\n",
        "test": "def check(f):\n    assert f(1, 2) == 3",
        "entry_point": "add",
    },
    {"task_id": "T/1", "prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"},
]


class Scripted:
    """A model whose samples are given."""

    def __init__(self, texts):
        self.texts, self.asked = texts, {}
        self.model = type("Model", (), {"generator": type("Generator", (), {"max_positions": None}), "where": "here"})

    def continued(self, prompts, **options):
        self.asked = options
        return self.texts


def test_every_sample_is_run_and_counted(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, PROBLEMS)) + "\n")
    problems = humaneval.read(str(file))
    assert [p.name for p in humaneval.read(str(file), most=1)] == ["T/0"]
    right, wrong = "    return a + b", "    return a - b"
    texts = [right, *[wrong] * 9, *["    return 1"] * 10]
    model = Scripted(texts)
    found = benchmarks.solve(problems, model, samples=10, temperature=0.7)
    assert found["pass_at"] == {1: pytest.approx((0.1 + 1) / 2), 10: 1.0}
    assert [s["passed"] for s in found["samples"]] == [True] + [False] * 9 + [True] * 10
    assert found["samples"][1] == {"task_id": "T/0", "completion": wrong, "passed": False, "why": "AssertionError"}
    assert model.asked["sampling"].temperature == 0.7


def test_wrong_arguments_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(loaded_model, "load", None)
    file, bad, empty = tmp_path / "problems.jsonl", tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    file.write_text(json.dumps(PROBLEMS[0]))
    bad.write_text(json.dumps(PROBLEMS[0]) + '\n{"task_id": "T/1", "prompt": 3}\n')
    empty.write_text("\n")
    for arguments, message in {
        (file,): "give --allow-code to run them",
        (tmp_path / "none.jsonl", "--allow-code"): "no such file",
        (bad, "--allow-code"): "line 2: prompt, test, entry_point is missing or no text",
        (empty, "--allow-code"): "has no problems",
        (file, "--allow-code", "--lm-eval", "arc_easy"): "give one of --lm-eval and --humaneval",
    }.items():
        assert command.main(["evaluate", "smollm2", "--humaneval", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert command.main(["evaluate", "smollm2", "--allow-code"]) == 2
    assert "belong to" in capsys.readouterr().err
