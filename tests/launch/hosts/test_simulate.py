"""Simulated hosts that run tiny scripts: their environment, and that all end together."""

import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import psutil
import pytest

from core import slices
from launch.hosts import host_output, simulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
V4_16, V4_32 = slices.get("v4-16"), slices.get("v4-32")
INDEX = "import os, sys, time, signal; index = int(os.environ['JAX_PROCESS_INDEX'])\n"
LAUNCHER = """
import sys, pathlib
from core import slices
from launch.hosts import simulate
logs = pathlib.Path(sys.argv[2])
sys.exit(simulate.run(slices.get(sys.argv[1]), command=sys.argv[3:], log_directory=logs, grace_seconds=2))
"""
# Each host leaves its number and that of a child, which ignores SIGTERM, in the folder, then waits for ever.
WAITER = """
import subprocess, pathlib
deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'
child = subprocess.Popen([sys.executable, '-c', deaf])
(pathlib.Path({folder!r}) / f'pids_{{index}}').write_text(f'{{os.getpid()}} {{child.pid}} {{os.environ["TMPDIR"]}}')
print('host', index, 'ready', flush=True)
time.sleep(600)
"""


def python(text, tmp_path):
    (tmp_path / "host.py").write_text(INDEX + text)
    return [sys.executable, str(tmp_path / "host.py")]


def run(slice_, text, tmp_path, words_seconds=0.3, **kwargs):
    command = python(text, tmp_path)
    return simulate.run(slice_, command=command, log_directory=tmp_path / "logs", words_seconds=words_seconds, **kwargs)


def log(tmp_path, index):
    """What a host said; every line of its log begins with the time and the host."""
    stamped = [line.split(" | ", 1) for line in (tmp_path / f"logs/host_{index}.log").read_text().splitlines()]
    assert all(host_output.time_of(f"{stamp} | ") and stamp.endswith(f" host {index}") for stamp, _ in stamped)
    return "".join(f"{said}\n" for _, said in stamped)


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def launch(tmp_path, text, **kwargs):
    """The launcher as a process of its own."""
    command = [sys.executable, "-c", LAUNCHER, "v4-16", str(tmp_path / "logs"), *python(text, tmp_path)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True, **kwargs)


def wait_for_waiters(tmp_path, count=2):
    deadline = time.monotonic() + 20
    while len(notes := [p.read_text().split() for p in tmp_path.glob("pids_*")]) < count or not all(notes):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(n) for note in notes for n in note[:2]], [pathlib.Path(note[2]) for note in notes]


def assert_all_gone(pids, homes):
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) or any(home.parent.exists() for home in homes):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.05)


def test_every_host_gets_its_own_environment(tmp_path, capfdbinary, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    names = ["RENGA_SIMULATE", "JAX_PLATFORMS", "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_INDEX", "JAX_PROCESS_COUNT"]
    names += ["JAX_NUM_CPU_DEVICES", "TPU_SKIP_MDS_QUERY", "HOME", "HF_HOME", "TMPDIR", "XDG_CACHE_HOME"]
    text = "import json, tempfile; open(os.environ['TMPDIR'] + '/mine', 'x'); tempfile.mkdtemp()\n"
    text += f"print(json.dumps({{name: os.environ[name] for name in {names}}}))"
    assert run(V4_32, text, tmp_path) == 0
    seen = [json.loads(log(tmp_path, index).splitlines()[1]) for index in range(4)]
    assert [host["JAX_PROCESS_INDEX"] for host in seen] == ["0", "1", "2", "3"]
    assert {host["HOME"] for host in seen} == {str(tmp_path / "me")}  # where `~/data` and `~/.netrc` are
    assert {host["HF_HOME"] for host in seen} == {str(tmp_path / "me/.cache/huggingface")}
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        assert len({host[name] for host in seen}) == 4
        assert not any(pathlib.Path(host[name]).exists() for host in seen)
    (address,) = {host["JAX_COORDINATOR_ADDRESS"] for host in seen}
    assert address.startswith("127.0.0.1:")
    rest = {
        name: seen[3][name] for name in ("RENGA_SIMULATE", "JAX_PLATFORMS", "JAX_PROCESS_COUNT", "TPU_SKIP_MDS_QUERY")
    }
    assert list(rest.values()) == ["v4-32", "cpu", "4", "1"]
    assert seen[0]["JAX_NUM_CPU_DEVICES"] == "4"


@pytest.mark.parametrize("chosen", [None, "glibc.malloc.hugetlb=0"])
def test_hosts_use_large_pages_unless_the_user_says_otherwise(tmp_path, monkeypatch, chosen):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if chosen:
        monkeypatch.setenv("GLIBC_TUNABLES", chosen)
    assert run(V4_16, "print(os.environ['GLIBC_TUNABLES'])", tmp_path) == 0
    assert log(tmp_path, 1).splitlines()[1] == (chosen or "glibc.malloc.hugetlb=1")


@pytest.mark.parametrize("chosen", [None, "", "--xla_dump_to=/nowhere"])
@pytest.mark.parametrize(("cores", "own"), [(2, ["--xla_cpu_multi_thread_eigen=false"]), (8, [])])
def test_hosts_get_flags_of_the_experiment_and_one_thread_a_device_on_few_cores(
    tmp_path, monkeypatch, cores, own, chosen
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("XLA_FLAGS", chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))  # v4-16 has 8 devices
    assert run(V4_16, "print(os.environ['XLA_FLAGS'])", tmp_path, xla_flags="--flag=1") == 0
    assert log(tmp_path, 1).splitlines()[1] == (chosen or " ".join([*own, "--flag=1"]))


def test_a_host_that_is_frozen_is_killed_at_once(tmp_path):
    text = "index or os.kill(os.getpid(), signal.SIGSTOP); time.sleep(0.5); sys.exit(15)"
    started = time.monotonic()
    assert run(V4_16, text, tmp_path, grace_seconds=60) == 15
    assert time.monotonic() - started < 20


@pytest.mark.covers("X09")
def test_every_host_is_logged_and_host_0_is_on_the_terminal(tmp_path, capfdbinary):
    text = "print('out of', index); print('err of', index, file=sys.stderr)"
    assert run(V4_16, text, tmp_path) == 0
    assert run(V4_16, text, tmp_path) == 0
    for index in range(2):
        lines = log(tmp_path, index).splitlines()
        assert len(lines) == 6  # appended
        assert lines[0].startswith(f"--- host {index}: ")
        assert sorted(lines[1:3]) == [f"err of {index}", f"out of {index}"]
    shown = capfdbinary.readouterr().out
    assert shown.count(b"out of 0") == 2
    assert b"of 1" not in shown


@pytest.mark.covers("L06")
@pytest.mark.simulated(4)
def test_the_first_to_fail_stops_the_rest_and_gives_its_code_and_last_lines(tmp_path, capfd):
    text = "print('\\n'.join(f'line {n}' for n in range(50)))\n"
    text += "if index == 2: time.sleep(0.3); sys.exit(7)\ntime.sleep(600)"
    started = time.monotonic()
    assert run(V4_32, text, tmp_path) == 7
    assert time.monotonic() - started < 5
    error = capfd.readouterr().err
    assert "host_2 failed first (exit code 7)" in error
    assert "  host_2 | line 49\n" in error
    assert "  host_2 | line 30\n" in error
    assert "line 29\n" not in error
    assert str(tmp_path / "logs/host_2.log") in error


@pytest.mark.covers("L06")
def test_the_culprit_is_the_cause_and_the_others_have_a_moment_to_say_so(tmp_path, capfd):
    text = "if index == 1: sys.exit(15)\nif index == 2: time.sleep(0.4); os.kill(os.getpid(), signal.SIGKILL)\n"
    text += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    text += "time.sleep(1.2); print('host 2 was lost', flush=True); sys.exit(15)"
    assert run(V4_32, text, tmp_path, words_seconds=3.0) == 137
    assert "host_2 failed first (signal SIGKILL)" in capfd.readouterr().err
    for index in (0, 3):
        assert "host 2 was lost" in log(tmp_path, index)


@pytest.mark.parametrize(("code", "how"), [(143, "preempted (SIGTERM"), (130, "interrupted (SIGINT")])
def test_a_stopped_run_is_no_failure_of_the_host_that_ended_first(tmp_path, capfd, code, how):
    assert run(V4_16, f"time.sleep(0.2 * index); sys.exit({code})", tmp_path) == code
    said = capfd.readouterr().err
    assert "failed first" not in said
    assert f"the run was {how}" in said


@pytest.mark.parametrize("code", [143, 130])
def test_a_host_that_fails_while_the_run_is_stopped_is_the_one_that_is_named(tmp_path, capfd, code):
    text = f"time.sleep(0.2 * index); sys.exit([{code}, 13][index])"
    assert run(V4_16, text, tmp_path, words_seconds=20) == 13  # it ends when both have
    assert "host_1 failed first (exit code 13)" in capfd.readouterr().err


def test_death_by_signal_is_128_plus_its_number(tmp_path, capfd):
    assert run(V4_16, "if index: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)", tmp_path) == 137
    assert "host_1 failed first (signal SIGKILL)" in capfd.readouterr().err


def test_a_host_that_ignores_the_request_to_stop_is_killed_after_the_grace(tmp_path, capfd):
    text = "if index: time.sleep(0.5); sys.exit(3)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    started = time.monotonic()
    assert run(V4_16, text, tmp_path, grace_seconds=0.5) == 3
    assert 0.9 < time.monotonic() - started < 5
    assert "host_0 did not end within 0.5 s of SIGTERM and will be killed; steps since" in capfd.readouterr().err


def test_a_host_may_use_the_grace_to_save(tmp_path, capfd):
    text = "def save(*_): print('saved', flush=True); sys.exit(0)\n"
    text += "signal.signal(signal.SIGTERM, save)\nif index: time.sleep(0.5); sys.exit(3)\ntime.sleep(600)"
    assert run(V4_16, text, tmp_path) == 3
    assert "saved" in log(tmp_path, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_process_and_no_folder(tmp_path, number, code):
    launcher = launch(tmp_path, WAITER.format(folder=str(tmp_path)), stdout=subprocess.DEVNULL)
    pids, homes = wait_for_waiters(tmp_path)
    assert len(pids) == 4
    os.killpg(launcher.pid, number)
    launcher.communicate(timeout=20)
    assert launcher.returncode == code
    assert_all_gone(pids, homes)


def test_ctrl_c_is_passed_on_to_the_hosts(tmp_path):
    """Each host notes the signal that it gets, and ends a moment later."""
    text = "def note(number, _): print('got', signal.Signals(number).name, flush=True); sys.exit(5)\n"
    text += "signal.signal(signal.SIGINT, note); signal.signal(signal.SIGTERM, note)\n"
    text += f"pathlib.Path({str(tmp_path)!r}, f'pids_{{index}}').write_text(f'{{os.getpid()}} 0 home')\n"
    launcher = launch(tmp_path, f"import pathlib\n{text}time.sleep(600)", stdout=subprocess.DEVNULL)
    wait_for_waiters(tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 130
    assert [log(tmp_path, index).splitlines()[1:] for index in range(2)] == [["got SIGINT"]] * 2


def test_a_second_ctrl_c_kills_hosts_that_are_still_saving(tmp_path):
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    launcher = launch(tmp_path, text + WAITER.format(folder=str(tmp_path)), stdout=subprocess.DEVNULL)
    pids, homes = wait_for_waiters(tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    time.sleep(0.5)
    os.killpg(launcher.pid, signal.SIGINT)
    said = launcher.communicate(timeout=1.5)[1].decode()
    assert launcher.returncode == 130
    assert "host_0, host_1 did not end before the second Ctrl-C" in said
    assert_all_gone(pids, homes)


def test_killing_the_launcher_outright_leaves_no_process_and_no_folder(tmp_path):
    launcher = launch(tmp_path, WAITER.format(folder=str(tmp_path)), stdout=subprocess.DEVNULL)
    pids, homes = wait_for_waiters(tmp_path)
    launcher.kill()
    launcher.communicate(timeout=20)
    assert_all_gone(pids, homes)


def test_killing_the_launcher_with_its_guard_leaves_no_host(tmp_path):
    launcher = launch(tmp_path, WAITER.format(folder=str(tmp_path)), stdout=subprocess.DEVNULL)
    pids, _ = wait_for_waiters(tmp_path)
    hosts, started_by_hosts = pids[::2], pids[1::2]
    (guard,) = [child for child in psutil.Process(launcher.pid).children() if child.pid not in hosts]
    guard.kill()
    launcher.kill()
    launcher.communicate(timeout=20)
    assert_all_gone(hosts, [])
    for pid in started_by_hosts:
        os.kill(pid, signal.SIGKILL)


def test_a_progress_line_redraws_on_a_terminal_and_is_plain_in_the_log(tmp_path):
    text = "print(sys.stdout.isatty()); print('\\x1b[2Kstep 1\\r\\x1b[32mstep 2\\x1b[0m')"
    ours, theirs = pty.openpty()
    launcher = launch(tmp_path, text, stdout=theirs)
    launcher.communicate(timeout=20)
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"True" in shown
    assert b"step 1\r\x1b[32mstep 2" in shown
    assert log(tmp_path, 0).splitlines()[1:] == ["True", "step 2"]
    assert log(tmp_path, 1).splitlines()[1:] == ["False", "step 2"]


def test_connection_messages_are_only_in_the_log(tmp_path, capfd):
    rest = "ected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    parts = ["[", "Gloo] Rank 0 is conn", f"{rest}\n", "loss 3.25 [Glo", "om]\n", "half "]
    parts += [
        f"[Gloo] Rank 1 is conn{rest}\r\n",
        "a line\n",
        "[Gloo] Rank 7 is lost\n",
        "[G",
    ]
    text = f"for part in {parts!r}: print(part, end='', flush=True); time.sleep(0.05)\n"
    assert run(V4_16, text + "if index == 0: time.sleep(0.5); sys.exit(3)\ntime.sleep(600)", tmp_path) == 3
    said = capfd.readouterr()
    assert said.out.startswith("loss 3.25 [Gloom]\nhalf a line\n[Gloo] Rank 7 is lost\n[G")
    assert "  host_0 | loss 3.25 [Gloom]\n" in said.err
    assert "host_0 | [Gloo] Rank 7 is lost\n" in said.err
    assert "is connected to" not in said.out + said.err
    assert log(tmp_path, 0).count("is connected to 1 peer ranks") == 2
