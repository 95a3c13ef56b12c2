import json
import math
import re
import resource
import subprocess
import sys
import types

import pytest

from core import extras
from core.checkpoints import copying
from core.errors import UnreachableError, UserError
from core.files import paths
from core.training import metrics


@pytest.fixture(autouse=True)
def tensorboard_reads_without_tensorflow(monkeypatch):
    """TensorBoard's reader takes its own stand-in for TensorFlow, which costs 3 s, where this module exists."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return events


def series(folder, tag):
    return [(event.step, event.value) for event in read_events(folder).Scalars(tag)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.covers("O06")
def test_scalars_and_text_are_read_back_by_tensorboard(tmp_path):
    writers = metrics.open_writers(str(tmp_path), is_host_zero=True)
    for step in range(3):
        writers.scalars(step, {"loss": 2.5 - step, "tokens_per_second": 1000.0 * step})
    writers.text("config", "LR = 1e-3  # ünïcode\n\nSTEPS = 2")
    writers.close()
    writers.close()
    assert series(tmp_path / "tensorboard", "loss") == [(0, 2.5), (1, 1.5), (2, 0.5)]
    events = read_events(tmp_path / "tensorboard")
    assert set(events.Tags()["scalars"]) == {"loss", "tokens_per_second"}
    tag, layout = sorted(events.Tags()["tensors"])
    assert layout == "custom_scalars__config__"
    assert tag.startswith("config")
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert "LR = 1e-3  # ünïcode" in text
    assert "STEPS = 2" in text


@pytest.mark.covers("O06")
def test_only_host_zero_writes(tmp_path):
    writers = metrics.open_writers(str(tmp_path), is_host_zero=False)
    writers.scalars(1, {"loss": 1.0})
    writers.text("config", "x")
    writers.flush()
    writers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covers("O06")
def test_a_resumed_run_hides_repeated_records(tmp_path):
    first = metrics.open_writers(str(tmp_path), is_host_zero=True)
    for step in range(5):
        first.scalars(step, {"loss": 10.0 + step})
    first.close()
    second = metrics.TensorBoard(paths.resolve(tmp_path / "tensorboard"), first_step=2)  # of the checkpoint
    second.scalars(3, {"loss": 3.0})
    second.close()
    assert series(tmp_path / "tensorboard", "loss") == [(0, 10.0), (1, 11.0), (2, 12.0), (3, 3.0)]
    again = metrics.TensorBoard(paths.resolve(tmp_path / "tensorboard"))  # there was no checkpoint
    again.scalars(1, {"loss": 1.0})
    again.close()
    assert series(tmp_path / "tensorboard", "loss") == [(0, 10.0), (1, 1.0)]


@pytest.mark.covers("O07")
def test_json_lines_are_valid_json_and_survive_a_cut(tmp_path):
    path = paths.resolve(tmp_path / "metrics.jsonl")
    writer = metrics.JsonLines(path)
    writer.scalars(1, {"loss": 0.5, "worst": math.nan, "largest": math.inf})
    writer.text("config", "a\nb", step=1)
    writer.flush()
    first, second = lines(path)
    assert first == {"step": 1, "time_seconds": first["time_seconds"], "loss": 0.5, "worst": "nan", "largest": "inf"}
    assert (second["tag"], second["text"]) == ("config", "a\nb")
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    writer = metrics.JsonLines(path)
    writer.scalars(2, {"loss": 0.25})
    writer.close()
    kept = path.read_text().splitlines()
    assert len(kept) == 4
    assert json.loads(kept[3])["loss"] == 0.25


def test_a_mirror_copies_what_grew_and_continues_what_was_there(tmp_path):
    destination = paths.resolve(tmp_path / "bucket")
    mirror = metrics.Mirror(destination, fetch="log", copies=True)
    assert mirror.folder != tmp_path / "bucket"
    (mirror.folder / "log").write_text("one\n")
    assert not (destination / "log").exists()
    mirror.push()
    assert (destination / "log").read_text() == "one\n"
    mirror.close()
    again = metrics.Mirror(destination, fetch="log", copies=True)
    with (again.folder / "log").open("a") as file:
        file.write("two\n")
    again.close()
    assert (destination / "log").read_text() == "one\ntwo\n"
    assert not again.folder.exists()


def test_a_destination_that_cannot_be_written_delays_a_copy_and_ends_nothing(tmp_path, capsys):
    destination = paths.resolve(tmp_path / "bucket")
    destination.write_text("in the way of the folder")
    mirror = metrics.Mirror(destination, copies=True)
    (mirror.folder / "log").write_text("one\n")
    mirror.push()
    mirror.push()
    said = capsys.readouterr().out
    assert said.count(f"warning: {destination} could not be written (FileExistsError") == 1
    destination.unlink()
    mirror.push()
    assert (destination / "log").read_text() == "one\n"
    mirror.close()


def test_a_flush_before_a_checkpoint_copies_what_another_flush_would_copy_later(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "is_remote", lambda path: True)
    writers = metrics.open_writers(str(tmp_path / "bucket"), is_host_zero=True)

    def steps():
        return sorted(metrics.read(str(tmp_path / "bucket")).by_step)

    writers.scalars(1, {"loss": 2.0})
    writers.flush()  # the first copy
    writers.scalars(2, {"loss": 1.0})
    writers.flush()
    assert steps() == [1]
    writers.flush(now=True)
    assert steps() == [1, 2]
    writers.close()


def test_writing_loads_no_tensorflow(tmp_path):
    program = (
        "import sys; from core.training import metrics; from core.checkpoints import store\n"
        "from core.training import profiling\n"
        f"w = metrics.open_writers({str(tmp_path)!r}, is_host_zero=True); w.scalars(1, {{'a': 1.0}}); w.close()\n"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


STAND_IN = """
import json, os, types

class Error(Exception): pass
class CommError(Error): pass
class AuthenticationError(CommError): pass
class UsageError(Error): pass
errors = types.SimpleNamespace(
    Error=Error, CommError=CommError, AuthenticationError=AuthenticationError, UsageError=UsageError
)

def init(**arguments):
    if kind := os.environ.get("FAILS_WITH"):
        raise getattr(errors, kind)("no such key")
    def note(what, value):
        with open(arguments["dir"] + "/calls.jsonl", "a") as file:
            file.write(json.dumps([what, value]) + "\\n")
    note("init", arguments)
    newest = 0
    def log(values, step=None):
        nonlocal newest
        newest = newest + 1 if step is None else max(newest, step)
        if step is None or step == newest:  # the package drops values of an earlier step
            note("log", values)
    config = types.SimpleNamespace(update=lambda values, allow_val_change: note("config", values))
    return types.SimpleNamespace(
        log=log,
        define_metric=lambda name, step_metric=None: note("axis", [name, step_metric]),
        config=config,
        finish=lambda: note("finish", None),
    )
"""


@pytest.fixture
def wandb_stand_in(tmp_path, monkeypatch):
    """A module of its name that writes down what it is told; the package itself is not among those pinned."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield
    sys.modules.pop("wandb", None)


@pytest.mark.covers("O05")
def test_weights_and_biases_gets_what_tensorboard_gets_from_host_zero(tmp_path, wandb_stand_in):
    run_dir = tmp_path / "gin" / "first"
    for is_host_zero in (True, False):
        writers = metrics.open_writers(str(run_dir), is_host_zero=is_host_zero, wandb_project="renga")
        writers.scalars(7, {"loss": 2.5})
        writers.scalars(4, {"checkpoint/bytes": 3.0})  # of a save that is complete some steps later
        writers.text("config", "LR = 1")
        writers.flush()
        writers.close()
        writers.close()
    (began, begin), *rest = lines(run_dir / "calls.jsonl")
    assert (began, begin["project"], begin["name"], begin["resume"]) == ("init", "renga", "gin/first", "allow")
    assert len(begin["id"]) == 16
    assert rest == [
        ["axis", ["trained_step", None]],
        ["axis", ["*", "trained_step"]],
        ["log", {"loss": 2.5, "trained_step": 7}],
        ["log", {"checkpoint/bytes": 3.0, "trained_step": 4}],
        ["config", {"config": "LR = 1"}],
        ["finish", None],
    ]
    assert (run_dir / "metrics.jsonl").exists()
    metrics.open_writers(str(run_dir), is_host_zero=True, wandb_project="renga").close()
    again = [said for what, said in lines(run_dir / "calls.jsonl") if what == "init"]
    assert again[1] == begin  # the same run there
    (run_dir / "wandb_id").unlink()
    (run_dir / "metrics.jsonl").unlink()  # another run in a directory of this name
    metrics.open_writers(str(run_dir), is_host_zero=True, wandb_project="renga").close()
    last = [said for what, said in lines(run_dir / "calls.jsonl") if what == "init"][-1]
    assert last["id"] != begin["id"]
    assert metrics.WANDB_ID in copying._FILES  # a mirror brings it back


def test_numbers_that_json_does_not_have_are_text():
    value = {"loss": math.nan, "by_position": [{"loss": -math.inf, "scored": 3}], "name": "x", "none": None}
    found = metrics.finite(value)
    assert found == {"loss": "nan", "by_position": [{"loss": "-inf", "scored": 3}], "name": "x", "none": None}
    json.dumps(found, allow_nan=False)


def test_steps_that_a_later_start_did_not_continue_from_are_not_read(tmp_path):
    for first_step, steps in ((0, (2, 4, 6)), (4, (5,))):
        writers = metrics.open_writers(str(tmp_path), is_host_zero=True, first_step=first_step)
        for step in steps:
            writers.scalars(step, {"loss": float(step), "validation/loss": 1.0})
        writers.close()
    found = metrics.read(str(tmp_path))
    assert (found.step, found.last("loss"), found.curve("loss")) == (5, 5.0, [(2, 2.0), (4, 4.0), (5, 5.0)])
    assert not found.has_evaluation(6)


def test_steps_that_a_rollback_lost_are_not_read_and_not_shown(tmp_path):
    writers = metrics.open_writers(str(tmp_path), is_host_zero=True)
    for step in (2, 4):
        writers.scalars(step, {"loss": float(step), "validation/loss": 1.0})
    writers.lost_after(3)
    writers.scalars(5, {"rolled_back": 1.0})
    writers.scalars(4, {"loss": 0.5})
    writers.close()
    found = metrics.read(str(tmp_path))
    assert found.curve("loss") == [(2, 2.0), (4, 0.5)]
    assert (found.curve("rolled_back"), found.has_evaluation(2), found.has_evaluation(4)) == ([(5, 1.0)], True, False)
    assert series(tmp_path / "tensorboard", "loss") == [(2, 2.0), (4, 0.5)]
    assert series(tmp_path / "tensorboard", "validation/loss") == [(2, 1.0)]


def test_a_run_in_a_bucket_cannot_be_logged_offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="WANDB_MODE=offline keeps the records of renga in the run directory"):
        metrics.require_wandb("renga", run_dir="gs://bucket/runs/x")
    metrics.require_wandb("", run_dir="gs://bucket/runs/x")


@pytest.mark.parametrize(
    ("kind", "error"),
    [("UsageError", UserError), ("AuthenticationError", UserError), ("CommError", UnreachableError)],
)
def test_a_failed_start_of_weights_and_biases_says_whether_another_start_can_help(
    tmp_path, wandb_stand_in, monkeypatch, kind, error
):
    monkeypatch.setenv("FAILS_WITH", kind)
    with pytest.raises(
        UserError, match=rf"'renga': wandb.init failed \({kind}: no such key\).* WANDB_API_KEY"
    ) as raised:
        metrics.WeightsAndBiases("renga", run_dir=str(tmp_path), run_id="a")
    assert type(raised.value) is error


@pytest.fixture
def no_login(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_missing_login_of_weights_and_biases_is_refused(no_login):
    (no_login / ".netrc").write_text("machine github.com login a password b\n")
    says = rf"host 0 has no login .* {no_login}/\.netrc has no entry for api\.wandb\.ai.* set WANDB_API_KEY"
    with pytest.raises(UserError, match=says):
        metrics.require_wandb_login("renga")
    metrics.require_wandb_login("")


@pytest.mark.parametrize(
    "given",
    [
        {"WANDB_API_KEY": "x"},
        {"WANDB_IDENTITY_TOKEN_FILE": "x"},
        *({"WANDB_MODE": mode} for mode in ("offline", "dryrun", "disabled")),
        {"file": ".netrc", "text": "machine api.wandb.ai login user password x"},
        {
            "file": ".netrc",
            "text": "machine wandb.here:8080 login user password x",
            "WANDB_BASE_URL": "http://wandb.here:8080/",
        },
        {"file": "keys", "text": "machine api.wandb.ai login user password x", "NETRC": "~/keys"},
        {"file": ".config/wandb/settings", "text": "[default]\nbase_url = http://wandb.here\n"},
        {"file": "wandb/settings", "text": "[default]\nmode = offline\n"},
    ],
)
def test_every_login_of_weights_and_biases_is_accepted(no_login, monkeypatch, given):
    given = dict(given)
    if file := given.pop("file", None):
        (no_login / file).parent.mkdir(parents=True, exist_ok=True)
        (no_login / file).write_text(given.pop("text") + "\n")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    metrics.require_wandb_login("renga")


@pytest.mark.covers("O05")
def test_weights_and_biases_is_never_required():
    metrics.require_wandb("", run_dir="runs/x")
    with pytest.raises(UserError) as refused:
        metrics.require_wandb("renga", run_dir="runs/x")
    assert refused.value.args[0].setting == "settings.Logging.wandb_project = 'renga'"
    assert refused.value.args[0].fix == extras.install("wandb")
    with pytest.raises(ValueError, match="needs the package wandb"):
        metrics.WeightsAndBiases("renga", run_dir="runs/x", run_id="a")


@pytest.mark.covers("O07")
def test_every_host_has_lines_of_its_own(tmp_path):
    for index in (0, 2):
        writers = metrics.open_own_lines(str(tmp_path), process_index=index)
        writers.scalars(1, {"step_seconds": 0.5 + index})
        writers.close()
    assert sorted(file.name for file in (tmp_path / "metrics").iterdir()) == ["host_0.jsonl", "host_2.jsonl"]
    assert lines(tmp_path / "metrics" / "host_2.jsonl")[0]["step_seconds"] == 2.5


@pytest.fixture
def disk():
    """`disk.fill()` and `disk.clear()`: no file of this process grows beyond 4 KiB meanwhile, as on a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(most):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))

    yield types.SimpleNamespace(fill=lambda: limit(4096), clear=lambda: limit(hard))
    limit(hard)


@pytest.mark.covers("O06")
def test_a_full_disk_delays_writes_but_does_not_end_the_run(tmp_path, disk, capsys):
    writers = metrics.open_writers(str(tmp_path), is_host_zero=True)
    disk.fill()
    for step in range(200):  # more than any queue holds
        writers.scalars(step, {"loss": float(step)})
        writers.flush()
    disk.clear()
    writers.scalars(200, {"loss": 200.0})
    writers.close()
    assert [row["loss"] for row in lines(tmp_path / "metrics.jsonl")] == list(range(201))
    assert series(tmp_path / "tensorboard", "loss") == [(step, float(step)) for step in range(201)]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2  # once for each file
    assert all(
        re.search(r"warning: .* could not be written \(OSError: .*File too large\); the run continues", s) for s in said
    )
