"""The code and the tables of docs/explanation/pods.md, as they stand there."""

import re

import pytest

from core import slices
from core.errors import UserError
from launch import __main__ as command
from launch import environment, scaling
from launch.config import loader

GUIDE = (environment.WORKSPACE / "docs" / "explanation" / "pods.md").read_text()
PYTHON = re.findall(r"^```python\n(# .*?)\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)


def blocks(where):
    return [body for head, body in PYTHON if head == f"# {where}"]


@pytest.mark.covers("E09")
def test_the_table_of_slices_is_true():
    rows = re.findall(r"^\| (v\w+-\d+) \| [^|]+ \| (\d+) \| (\d+) \| ([\dx]+) \|$", GUIDE, flags=re.MULTILINE)
    assert len(rows) == 6
    for name, hosts, devices, topology in rows:
        found = slices.get(name)
        assert (found.hosts, found.devices, found.topology_name) == (int(hosts), int(devices), topology)


@pytest.mark.covers("E10")
def test_tables_become_the_collectives_that_the_guide_shows():
    assert len(blocks("one process")) == 1
    for body in blocks("one process"):
        exec(compile(body, "pods.md", "exec"), {})


@pytest.mark.slow  # two processes; a quick test of arrays over two hosts is tests/core/hosts/test_global_arrays.py
@pytest.mark.simulated(2)
@pytest.mark.covers("D04", "E09")
def test_the_ways_to_make_a_global_array(run_hosts):
    (body,) = blocks("every host")
    told = "coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2"
    assert "distributed.initialize()" in body
    for number, result in enumerate(run_hosts(body.replace("initialize()", f"initialize({told})"), hosts=2)):
        assert result.returncode == 0, result.output
        assert "an error: True" in result.output
        assert "equal: True sum: 1128.0" in result.output
        assert f"[{8 * number}:{8 * number + 4}, 0:3] from {24 * number} to {24 * number + 11}" in result.output


@pytest.mark.covers("L11")
def test_the_rehearsal_on_one_host_is_the_same_experiment_with_the_same_work_for_each_chip():
    file = "gin/arrcoc/v5p_128.gin"
    scaled = scaling.bindings(file, slice_name="v5p-8", scale_from="v5p-128")
    assert scaled == ["BATCH_SIZE = 16", "NUM_STREAMS = 16"]
    small, large = loader.load(file, bindings=scaled, slice_name="v5p-8").build(), loader.load(file).build()
    assert repr(small.model) == repr(loader.load("gin/arrcoc/v5p_8.gin").build().model)
    assert repr(small.model) == repr(large.model)
    assert small.strategy.name == large.strategy.name
    per_chip = [e.batch_size / slices.get(e.slice).devices for e in (small, large)]
    assert per_chip == [4, 4]
    assert small.task.spec(16)["images"].shape[1:] == large.task.spec(256)["images"].shape[1:]
    assert (small.row_length, small.total_steps) == (large.row_length, large.total_steps)


@pytest.mark.parametrize("bound", ["32\n", "%ROWS\nROWS = 32\n", "%BATCH_SIZE\nBATCH_SIZE = 32\n"])
def test_a_batch_size_that_the_file_binds_itself_is_scaled(tmp_path, bound):
    text = "from __gin__ import dynamic_registration\nfrom launch import experiment\ninclude 'gin/quickstart.gin'\n"
    (file := tmp_path / "own.gin").write_text(f"{text}experiment.Experiment.batch_size = {bound}")
    scaled = scaling.bindings(str(file), slice_name="v4-8", scale_from="v4-16")
    built = loader.load(str(file), bindings=scaled, slice_name="v4-8").build()
    assert (built.batch_size, built.task.num_streams) == (16, 8)
    assert not any("NUM_STREAMS" in binding for binding in scaled)  # unchanged


def test_rows_that_do_not_divide_are_refused_with_the_batch_sizes_that_do(capsys):
    words = ["report", "v5p-8", "gin/arrcoc/v5p_128.gin", "--scale-from", "v5p-128", "--gin", "BATCH_SIZE = 100"]
    assert command.main(words) != 0
    assert "is 6.25 rows on 4; expected whole rows" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="multiple of 16"):
        scaling.bindings("gin/quickstart.gin", slice_name="v5p-8", scale_from="v5p-128", given=["BATCH_SIZE = 8"])
    with pytest.raises(UserError, match=r"PHASES of gin/quickstart_phases\.gin set batch sizes"):
        scaling.bindings("gin/quickstart_phases.gin", slice_name="v4-8", scale_from="v4-16")
