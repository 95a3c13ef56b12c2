import json
import math
import subprocess
import sys
import types

import pytest

from core import metrics, paths


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
    (tag,) = events.Tags()["tensors"]
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
def test_a_run_that_continues_hides_what_it_redoes(tmp_path):
    first = metrics.open_writers(str(tmp_path), is_host_zero=True)
    for step in range(5):
        first.scalars(step, {"loss": 10.0 + step})
    first.close()
    second = metrics.TensorBoard(paths.resolve(tmp_path / "tensorboard"), first_step=3)
    second.scalars(3, {"loss": 3.0})
    second.close()
    assert series(tmp_path / "tensorboard", "loss") == [(0, 10.0), (1, 11.0), (2, 12.0), (3, 3.0)]


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


def test_writing_loads_no_tensorflow(tmp_path):
    program = (
        "import sys; from core import metrics; from core.checkpoints import store\n"
        "from core.training import profiling\n"
        f"w = metrics.open_writers({str(tmp_path)!r}, is_host_zero=True); w.scalars(1, {{'a': 1.0}}); w.close()\n"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
