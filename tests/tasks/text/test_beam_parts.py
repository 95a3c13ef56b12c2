"""Parts on workers of Apache Beam, which this environment excludes: a pipeline of a few lines takes its place."""

import pathlib
import subprocess
import sys
import threading
import types

import pytest

from core.errors import UserError
from tasks.text import beam_parts
from tasks.text.seqio_pipeline import Asked, Lane

ASKED, LANES = Asked("lines", None, None, 8), [Lane("lines", "train", 0, lane, 3, False) for lane in range(3)]


class Pipeline:
    """Calls the function of `Map` with the elements of `Create`, in a thread that nobody waits for."""

    def __init__(self, options):
        self.options, self.steps = options, []

    def __or__(self, step):
        self.steps.append(step)
        return self

    def run(self):
        create, _, write = self.steps
        work = threading.Thread(target=lambda: [write.function(element) for element in create.elements], daemon=True)
        work.start()
        return types.SimpleNamespace(wait_until_finish=work.join)


class Map:
    def __init__(self, function):
        self.function = function

    def __rrshift__(self, name):
        return self


@pytest.fixture
def beam(monkeypatch):
    """The module apache_beam."""
    made = []
    found = types.SimpleNamespace(
        Pipeline=lambda options: made.append(Pipeline(options)) or made[-1],
        Create=lambda elements: types.SimpleNamespace(elements=elements),
        Reshuffle=lambda: None,
        Map=Map,
        made=made,
    )
    options = types.SimpleNamespace(PipelineOptions=list)
    for name, module in {"": found, ".options": types.SimpleNamespace(), ".options.pipeline_options": options}.items():
        monkeypatch.setitem(sys.modules, f"apache_beam{name}", module)
    return found


def make(folder, monkeypatch, write):
    """Makes the parts with a function in place of `_write_lane`."""
    monkeypatch.setattr(beam_parts, "_write_lane", write)
    folder.mkdir()
    beam_parts.Parts(str(folder)).make(ASKED, LANES, 7, None, ["--runner=FlinkRunner"])


def test_tasks_whose_names_differ_in_a_mark_have_files_of_their_own():
    places = {
        beam_parts._part("folder", lane._replace(task=task), 0) for task in ("a:b", "a_b", "a#b") for lane in LANES
    }
    assert len(places) == 3 * len(LANES)
    assert all(place.count("/") == 1 and ":" not in place for place in places)


def test_each_lane_is_written_beside_the_marker_of_the_command(beam, tmp_path, monkeypatch):
    written = []

    def write(marker, asked, most, filters, fields):
        written.append((pathlib.Path(marker).read_text() != "", asked, most, filters, Lane(*fields)))

    make(tmp_path / "parts", monkeypatch, write)
    assert written == [(True, ASKED, 7, None, lane) for lane in LANES]
    assert beam.made[0].options == ["--runner=FlinkRunner"]
    assert not list((tmp_path / "parts").iterdir())


def fail(*_):
    raise OSError("a disk is full")


@pytest.mark.parametrize("where", ["runner", "thread of a worker"])
def test_a_failure_is_an_error_and_ends_the_workers(beam, tmp_path, monkeypatch, where):
    """Also one in a thread, for which the DirectRunner would wait forever."""
    workers, ends = [], threading.Event()

    def run(self):
        workers.append(subprocess.Popen(["sleep", "60"]))
        if where == "runner":
            fail()
        threading.Thread(target=fail, daemon=True).start()
        return types.SimpleNamespace(wait_until_finish=ends.wait)

    monkeypatch.setattr(Pipeline, "run", run)
    before = threading.excepthook
    try:
        with pytest.raises(UserError, match="Apache Beam failed: OSError: a disk is full"):
            make(tmp_path / "parts", monkeypatch, fail)
        assert workers[0].wait(timeout=10) < 0
        assert threading.excepthook is before
        assert not list((tmp_path / "parts").iterdir())
    finally:
        ends.set()
        workers[0].kill()
