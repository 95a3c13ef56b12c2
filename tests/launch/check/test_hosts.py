"""Checks of all hosts: on a simulated slice, and each check with a problem."""

import json
import re
import subprocess
import sys

import jax
import pytest

from core import slices
from core.errors import Problem, UserError
from core.hosts import exit_codes
from launch import __main__ as cli
from launch import findings
from launch.check import hosts
from launch.findings import Finding
from launch.hosts import cluster, tpu_host
from parallel import collectives

V4_8 = slices.get("v4-8")
TINY = ["LENGTH = 64", "transformer.Transformer.num_layers = 1", "transformer.Transformer.embed_dim = 32"]


@pytest.fixture(scope="module")
def simulated(launch, tmp_path_factory):
    """The output of the check of a slice without problems: (text, rows)."""
    folder = tmp_path_factory.mktemp("check")
    where = ["--simulate", "--run-dir", str(folder / "run"), "--json", str(folder / "rows.json")]
    strategy = ["STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2"]
    bindings = [word for binding in (*TINY, *strategy) for word in ("--gin", binding)]
    said = launch("check", "v4-16", "gin/quickstart.gin", "--level", "hosts", *where, *bindings)
    return said, {row["name"]: row for row in json.loads((folder / "rows.json").read_text())}


@pytest.mark.covers("X01", "X03")
@pytest.mark.simulated(2)
def test_a_slice_without_problems(simulated):
    said, found = simulated
    assert said.rstrip().endswith("\nREADY")
    assert {"configuration", "layout", "data", "memory", "checkpoint", "versions", "environment"} <= set(found)
    assert {"hosts", "clocks", "run directory", "data on hosts", "HBM"} <= set(found)
    assert "2 hosts, 8 simulated chips, 4 on each" in found["hosts"]["detail"]
    for axis, number in (("fsdp", 4), ("tensor", 2)):
        trips = re.fullmatch(
            rf"{number} devices: all-reduce [\d.e-]+, all-gather [\d.e-]+, reduce-scatter [\d.e-]+, "
            r"all-to-all [\d.e-]+, permute [\d.e-]+ GB/s sent by a device \(simulated\)",
            found[f"axis {axis}"]["detail"],
        )
        assert trips
    assert all(row["ok"] for row in found.values())


@pytest.mark.simulated(2)
@pytest.mark.slow
def test_other_checks_run_if_the_run_directory_cannot_be_written(launch, tmp_path):
    (tmp_path / "file").write_text("")
    where = ["--simulate", "--run-dir", str(tmp_path / "file/run")]
    bindings = [word for binding in TINY for word in ("--gin", binding)]
    said = launch("check", "v4-16", "gin/quickstart.gin", "--level", "hosts", *where, *bindings, code=2)
    assert re.search(r"FAIL  run directory +cannot write to .*/file/run", said)
    assert re.search(r"ok    axis fsdp +8 devices: all-reduce", said)
    assert "Traceback" not in said


def test_a_look_that_does_not_end_ends_the_check(run_hosts):
    story = """
        import time
        from core.hosts import failure_diagnosis, heartbeat
        from launch.check import hosts

        assert hosts.LIMITS.of(failure_diagnosis.Place(0, "clocks", 0.0)) == 120
        heartbeat.start(None, limits=failure_diagnosis.Limits(0.5, 0.5))
        hosts._attempt("collectives", lambda: time.sleep(30))
    """
    (result,) = run_hosts(story, hosts=1)
    assert result.returncode == exit_codes.HUNG, result.output
    assert "host 0 has been at step 0, collectives for" in result.output


def test_a_collective_with_wrong_numbers_fails_its_axis_and_is_named(monkeypatch):
    trips = [
        collectives.Trip("all-reduce", "fsdp", True, 3e9),
        collectives.Trip("all-gather", "fsdp", False, 2e9),
        collectives.Trip("permute", "fsdp", False, 1e9),
        collectives.Trip("all-reduce", "tensor", True, 4e9),
    ]
    monkeypatch.setattr(collectives, "trips", lambda *_, **__: trips)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    wrong, right = hosts.links(mesh, cluster.Host(0, 1, simulated=False))
    assert (wrong.name, wrong.ok, right.name, right.ok) == ("axis fsdp", False, "axis tensor", True)
    assert wrong.detail.startswith("wrong numbers from all-gather, permute; 4 devices: all-reduce 3, all-gather 2")
    assert "another slice" in wrong.detail.fix


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), KeyError("vocabulary"), ValueError("no"), UserError("no")]
)
def test_no_look_ends_another(error):
    def look():
        raise error

    (row,) = hosts._attempt("data on hosts", look)
    assert (row.name, row.ok) == ("data on hosts", False)
    assert str(error) in row.detail
    assert isinstance(error, UserError) or row.detail.startswith(f"{type(error).__name__}: ")


def test_all_mistakes_are_found_at_once_and_no_host_is_started(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RENGA_RUNROOT", "x")
    where = ["--simulate", "--run-dir", str(tmp_path / "file/run"), "--gin", "BATCH_SIZE = 12", "--gin", "LENGHT = 3"]
    assert cli.main(["check", "v4-16", "gin/quickstart.gin", "--level", "hosts", *where]) == 2
    said = capsys.readouterr().out
    assert "did you mean 'LENGTH'" in said
    assert "cannot write to" in said
    assert "NOT READY: 2 of 2 checks failed" in said


def test_a_machine_outside_a_slice_is_reported(capsys):
    assert cli.main(["check", "v4-16", "gin/quickstart.gin", "--level", "hosts"]) == 2
    assert "this machine is not a host of a TPU slice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"libtpu": "0.0.17"}, "libtpu 0.0.17 is older than the 0.0.42.1 of requirements.txt"),
        ({"jax": "0.10.1"}, "jax 0.10.1 is older than the 0.10.2 of requirements.txt"),
    ],
)
def test_versions_that_do_not_go_together(changes, says):
    have = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"} | changes
    row = cluster.check_versions(
        V4_8, installed=have.__getitem__, pins="jax==0.10.2\njaxlib==0.10.2\nlibtpu==0.0.42.1 ; x\n"
    )
    assert not row.ok
    assert says in row.detail
    assert cluster.check_versions(V4_8).ok


def test_versions_newer_than_tested_are_noted_by_a_check_and_at_the_start_of_a_run(monkeypatch, capsys):
    requirements = "jax==0.10.1\njaxlib==0.10.2\nlibtpu==0.0.41\n"
    have = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}
    row = cluster.check_versions(V4_8, installed=have.__getitem__, pins=requirements)
    assert (row.ok, row.is_note) == (True, True)
    assert ", jax 0.10.2, jaxlib 0.10.2, libtpu 0.0.42.1; newer" in row.detail
    assert row.detail.endswith("; newer than tested: jax (tested with 0.10.1), libtpu (tested with 0.0.41)")
    monkeypatch.setattr(cluster, "check_versions", lambda slice_: row)
    cluster.warn_at_start(cluster.Host(0, 1, simulated=True), V4_8)
    assert capsys.readouterr().out == f"host 0 of 1: note: versions: {row.detail}\n"


def test_a_library_that_is_missing_is_named():
    def installed(name):
        if name == "libtpu":
            raise cluster.importlib.metadata.PackageNotFoundError(name)
        return {"jax": "0.10.2", "jaxlib": "0.10.2"}[name]

    row = cluster.check_versions(V4_8, installed=installed, pins="jax==0.10.2\njaxlib==0.10.2\nlibtpu==0.0.42.1\n")
    assert (row.ok, row.detail.found) == (False, "libtpu is not installed")
    pins = "jax==0.10.2\njaxlib==0.10.2\nlibtpu==0.0.42.1\n"
    assert cluster.check_versions(slices.get("h100:8"), installed=installed, pins=pins).ok  # a GPU needs none


@pytest.mark.covers("X03", "L10")
@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RENGA_RUN_ROOTS": "x"}, "RENGA_RUN_ROOTS is not read by anything; did you mean RENGA_RUN_ROOT?"),
        ({"TPU_MESH_CONFIGS": "2,2"}, "did you mean TPU_MESH_CONFIG?"),
        ({"JAX_PROCESS_INDEX": "1"}, "JAX_PROCESS_INDEX is set and JAX_COORDINATOR_ADDRESS and JAX_PROCESS_COUNT are"),
        ({"TPU_MESH_CONFIG": "2,2"}, "TPU_MESH_CONFIG is set and TPU_AXIS_NAMES is not"),
        ({"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu hides the TPU from JAX"),
    ],
)
def test_variables_that_contradict_or_are_not_read_are_reported(environ, says):
    (row,) = hosts.variables(environ, is_tpu=True)
    assert says in row.detail
    assert not row.ok or row.is_note


def test_variables_of_other_programs_are_ignored():
    environ = {"JAX_ENABLE_X64": "1", "HOME": "/x", "TPU_NAME": "t", "JAX_PLATFORMS": "tpu,cpu"}
    assert [row.ok for row in hosts.variables(environ, is_tpu=True)] == [True]
    assert [row.ok for row in hosts.variables({"JAX_PLATFORMS": "cpu"}, is_tpu=False)] == [True]


def test_only_tpus_have_chips_that_other_processes_hold():
    assert {row.name for row in hosts.own_host(V4_8, is_tpu=False)} == {"versions", "environment"}
    assert {row.name for row in hosts.own_host(V4_8, is_tpu=True)} == {"versions", "environment", "chips"}


def test_processes_that_hold_a_chip_are_named(tmp_path):
    chip = tmp_path / "accel0"
    chip.touch()
    is_chip = re.compile(rf"{tmp_path}/accel\d+$")
    assert tpu_host.chip_holders(is_chip=is_chip).ok
    holds = f"file = open({str(chip)!r}); print('open', flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "open\n"
        row = tpu_host.chip_holders(is_chip=is_chip)
        process.kill()
    assert not row.ok
    assert f"process {process.pid} holds {chip}: {sys.executable}" in row.detail
    assert row.detail.fix.startswith(f"end it (kill {process.pid})")


def test_clocks_that_are_apart_are_named(run_hosts):
    results = run_hosts(
        """
        import time
        from core.hosts import distributed
        from launch.hosts import cluster

        distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS)
        row = cluster.check_clocks(now=lambda: time.time() + 100 * PROCESS)
        print(row.ok, row.detail, flush=True)
        distributed.shutdown()
        """,
        hosts=2,
        timeout=120,
    )
    assert all(re.search(r"False (99|100)\.\d+ s apart .*: host 1 is ahead of host 0", r.output) for r in results)


def test_rows_of_all_hosts_become_one_table():
    same, bad = Finding("a", True, "fine"), Finding("b", False, Problem("broken", fix="mend it"))
    merged = findings.merge([[same, Finding("b", True, "fine")], [same, bad], [same, bad]])
    assert [row.detail for row in merged[:2]] == ["fine", "host 0: fine"]
    assert (merged[2].detail.found, merged[2].detail.fix) == ("host 1, 2: broken", "mend it")
    text = findings.table(merged)
    assert "FAIL  b  host 1, 2: broken\n" in text
    assert "fix: mend it\n" in text
    assert text.endswith("NOT READY: 1 of 3 checks failed")
    again = findings.from_json(findings.to_json(merged))
    assert again == merged
    assert again[2].detail.fix == "mend it"


def test_findings_of_two_phases_are_two_rows():
    layouts = [Finding("layout", True, "fits"), Finding("layout", False, "does not divide", phase=2)]
    merged = findings.merge([layouts, layouts])
    assert merged == layouts
    assert findings.from_json(findings.to_json(merged)) == layouts
    assert "ok    layout             fits\nFAIL  layout of phase 2  does not divide" in findings.table(merged)


def test_hbm_is_that_of_the_record(monkeypatch):
    from launch import predictions
    from launch.config import loader

    config = loader.load("gin/valkyrie_7b.gin")
    experiment = config.build()
    need = predictions.find(experiment, config)["memory"]["peak_bytes"]
    row = hosts.hbm(config, experiment, limit_bytes=need - 1)
    assert not row.ok
    assert hosts.hbm(config, experiment, limit_bytes=need).ok
    other = loader.load("gin/valkyrie_7b.gin", bindings=["LENGTH = 1024"])
    assert hosts.hbm(other, other.build(), limit_bytes=None).is_note
    bound = {"memory": {"peak_bytes": need, "peak_is_bound": True}}  # with arrays on the host
    monkeypatch.setattr(predictions, "find", lambda *_: bound)
    row = hosts.hbm(config, experiment, limit_bytes=need - 1)
    assert (row.ok, row.is_note) == (True, True)
    assert str(row.detail).startswith("at most ")
    assert not hosts.hbm(config, experiment, limit_bytes=need).is_note
