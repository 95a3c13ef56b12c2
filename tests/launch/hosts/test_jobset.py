"""The manifest for GKE: its fields are documented ones of JobSet v1alpha2 and batch/v1, and match the slice.

What we know is written down by hand in jobset.schema.json, from the reference pages. It catches a field that is
misspelled, misplaced or of another kind; no API server has seen the manifest.
"""

import json
import pathlib

import pytest

from core import slices
from core.hosts import exit_codes
from launch import __main__ as cli
from launch.config import loader
from launch.hosts import jobset

pytestmark = pytest.mark.covers("L07")
# Of each object that is used: its fields with their kinds, `?` behind those that may be left out.
SCHEMA = json.loads((pathlib.Path(__file__).parent / "jobset.schema.json").read_text())


def problems(value, kind="object", where="JobSet"):
    """What is not as the schema has it."""
    plain = {"string": str, "integer": int}
    if isinstance(kind, list):
        assert isinstance(value, list), where
        return [p for i, item in enumerate(value) for p in problems(item, kind[0], f"{where}[{i}]")]
    if kind.startswith("="):
        return [] if value == kind[1:] else [f"{where} is {value!r}"]
    if kind.startswith("one of "):
        return [] if value in kind.split()[2:] else [f"{where} is {value!r}"]
    if kind in plain:
        return [] if type(value) is plain[kind] else [f"{where} is {value!r}, no {kind}"]
    if kind in ("strings", "integers"):
        return [p for name, item in value.items() for p in problems(item, kind[:-1], f"{where}.{name}")]
    fields = {name.rstrip("?"): (inner, name.endswith("?")) for name, inner in SCHEMA[kind].items()}
    found = [f"{where} has a {name}" for name in value if name not in fields]
    found += [f"{where} has no {name}" for name, (_, may_lack) in fields.items() if name not in value and not may_lack]
    return found + [p for n in value if n in fields for p in problems(value[n], fields[n][0], f"{where}.{n}")]


def of(slice_name, **more):
    options = {"image": "i:1", "arguments": [slice_name, "x.gin"], "restarts": 5, "environment": {}} | more
    return jobset.manifest("first", slices.get(slice_name), **options)


@pytest.mark.parametrize("name", ["v4-8", "v4-32", "2xv4-32", "v5e-16", "v5p-64", "v6e-256"])
def test_every_slice_is_a_job_of_its_hosts_with_their_chips(name):
    slice_ = slices.get(name)
    found = of(name, environment={"TPU_MESH_CONFIG": "2,2"})
    assert problems(found) == []
    (jobs,) = found["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert jobs["replicas"] == slice_.num_slices
    assert job["completions"] * jobs["replicas"] == job["parallelism"] * jobs["replicas"] == slice_.hosts
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == slice_.chips_per_host
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == slice_.topology_name
    assert {variable["name"] for variable in container["env"]} == {"TPU_MESH_CONFIG"}


def test_the_labels_are_those_of_gke():
    assert set(jobset.ACCELERATORS) == {slice_.generation for slice_ in slices.SLICES.values()}
    assert of("v4-32")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }


def test_exit_codes_that_end_or_restart_the_jobset():
    found = of("v4-32")
    (rule,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]["values"]
    assert {exit_codes.USER_ERROR, exit_codes.NON_FINITE, exit_codes.DIVERGED} <= set(codes)
    assert not {code for code in codes if exit_codes.ending(code).restart or code == 0}
    assert codes == sorted(codes)
    assert found["spec"]["failurePolicy"] == {
        "maxRestarts": 5,
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }


def test_the_check_finds_wrong_results():
    wrong = of("v4-32")
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "4"
    wrong["spec"]["maxRestarts"] = 3
    del wrong["metadata"]["name"]
    assert len(problems(wrong)) == 3


def test_the_command_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RENGA_RUN_ROOT", raising=False)
    file = tmp_path / "job.json"
    argv = ["jobset", "v4-32", "gin/valkyrie_7b.gin", "--image", "i:1", "--gin", "SEED = 1"]
    assert cli.main([*argv, "--run-dir", "gs://b/first", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert problems(found) == []
    assert found["metadata"]["name"] == "valkyrie-7b"
    command = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["launch/pod.sh", "v4-32", "gin/valkyrie_7b.gin"]
    assert command[3:] == ["--run-dir", "gs://b/first", "--gin", "SEED = 1"]
    capsys.readouterr()
    for more, says in (
        (["--run-dir", "runs/x"], "would be deleted with its pod"),
        (["--run-dir", "gs://b/x", "--name", "First_Run"], "expected up to 40 lower-case letters"),
        (["--run-dir", "gs://b/x", "--gin", "SED = 1"], "did you mean 'SEED'"),
    ):
        assert cli.main([*argv, *more]) == 2
        assert says in capsys.readouterr().err


def test_an_experiment_may_be_in_a_bucket(capsys, monkeypatch):
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://b/runs")
    monkeypatch.setattr(loader, "_content", lambda path: "include 'gin/quickstart.gin'\n")
    assert cli.main(["jobset", "v4-8", "gs://b/mine/First.gin", "--image", "i:1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"]["name"] == "first"
    (jobs,) = found["spec"]["replicatedJobs"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][1:] == ["v4-8", "gs://b/mine/First.gin", "--run-dir", "gs://b/runs/mine/First-v4-8"]
