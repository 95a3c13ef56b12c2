"""The table of environment variables is complete, the page of them is current, and malformed values are errors."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from core import slices
from core.errors import UserError
from launch import environment

ROOT = environment.WORKSPACE
LAYERS = ("core", "parallel", "models", "tasks", "launch")
READ = re.compile(r"environ\.(get|pop|setdefault)$|getenv$|environment\.read$")
NAMES = environment.NAMES


def reads_of_the_environment(path: Path) -> set[str]:
    """Literal names in `environ[…]`, `environ.get(…)`, `getenv(…)`, `environment.read(…)` and the like."""
    names, text = set(), path.read_text()
    for node in ast.walk(ast.parse(text if re.search("environ|getenv", text) else "")):
        if isinstance(node, ast.Subscript):
            key, place, reads = node.slice, node.value, r"environ$"
        elif isinstance(node, ast.Call) and node.args:
            key, place, reads = node.args[0], node.func, r"environ\.|getenv|environment\.read$"
        else:
            continue
        is_literal = isinstance(key, ast.Constant) and isinstance(key.value, str)
        if is_literal and re.search(reads, ast.unparse(place)):  # which is slow
            names.add(key.value)
    return names


@pytest.mark.covers("L10")
def test_every_variable_that_is_read_is_in_the_table():
    read = {}
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            for name in reads_of_the_environment(path):
                read[name] = str(path.relative_to(ROOT))
    for path in (ROOT / "launch").glob("*.sh"):
        for name in re.findall(r"\$\{?((?:RENGA|TPU|JAX|HF)_[A-Z_]+)", path.read_text()):
            read[name] = str(path.relative_to(ROOT))
    assert {"RENGA_SIMULATE", "RENGA_PYTHON"} <= set(read)
    assert {name: where for name, where in read.items() if name not in NAMES} == {}


@pytest.mark.covers("L10")
def test_the_page_describes_every_variable():
    described = re.findall(r"(?m)^\* `([A-Z_]+)`: ", (ROOT / "docs" / "reference" / "environment.md").read_text())
    assert len(described) == len(NAMES)
    assert set(described) == NAMES


def test_the_page_names_what_a_workstation_sends():
    page = " ".join((ROOT / "docs" / "reference" / "environment.md").read_text().split())
    sent, secrets = (", ".join(f"`{name}`" for name in names) for names in (environment.SENT, environment.SECRETS))
    assert f"`launch/pod.sh --tpu` sends to the hosts: {sent}, and the secrets {secrets}." in page


AT = {"coordinator_address": "h:1"}


def layout(**values):
    return environment.process_layout(environ={f"JAX_{name.upper()}": value for name, value in values.items()})


@pytest.mark.covers("R03")
def test_the_process_layout_is_read():
    unset = environment.ProcessLayout(None, None, None)
    assert layout() == layout(process_index="", process_count="") == unset
    three = layout(coordinator_address="h:1", process_index="3", process_count="4")
    assert three == environment.ProcessLayout("h:1", 3, 4)
    six = layout(coordinator_address="[::1]:8476", process_index="0", process_count="1")
    assert six.coordinator == "[::1]:8476"


@pytest.mark.covers("R03")
@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {**AT, "process_index": "abc", "process_count": "2"},
            "JAX_PROCESS_INDEX='abc': expected a whole number from 0",
        ),
        ({**AT, "process_index": "-1", "process_count": "2"}, "JAX_PROCESS_INDEX='-1'"),
        ({**AT, "process_index": "0", "process_count": "0"}, "JAX_PROCESS_COUNT='0': expected a whole number from 1"),
        (
            {**AT, "process_index": "2", "process_count": "2"},
            "JAX_PROCESS_INDEX=2 but JAX_PROCESS_COUNT=2: expected 0 to 1",
        ),
        (
            {"process_index": "0", "coordinator_address": "h:1"},
            "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_INDEX are set and JAX_PROCESS_COUNT is not: set all three",
        ),
        (
            {"coordinator_address": "h:1"},
            "JAX_COORDINATOR_ADDRESS is set and JAX_PROCESS_INDEX and JAX_PROCESS_COUNT are not: set all three",
        ),
        ({"process_index": "0", "process_count": "2"}, "JAX_COORDINATOR_ADDRESS is not: set all three, or none"),
        (
            {"coordinator_address": "10.0.0.2", "process_index": "0", "process_count": "1"},
            "JAX_COORDINATOR_ADDRESS='10.0.0.2': expected HOST:PORT",
        ),
    ],
)
def test_a_bad_process_layout_is_a_named_error(values, says):
    with pytest.raises(ValueError, match="JAX_") as error:
        layout(**values)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("experiment", "slice_name", "directory"),
    [
        ("gin/valkyrie_7b.gin", "v4-32", "valkyrie_7b-v4-32"),  # found in the workspace
        (ROOT / "gin/valkyrie_7b.gin", "v4-64", "valkyrie_7b-v4-64"),
        ("gin/trm/sudoku4.gin", "v4-8", "trm/sudoku4-v4-8"),
        ("mine/x.gin", "h100:8x2", "mine/x-h100-8x2"),
        ("/a/mine/x.gin", "v4-8", "mine/x-v4-8"),
        ("gs://bucket/mine/x.gin", "v4-8", "mine/x-v4-8"),
        ("/x.gin", "v4-8", "x-v4-8"),
    ],
)
def test_a_run_goes_to_a_folder_of_its_experiment_and_slice(monkeypatch, tmp_path, experiment, slice_name, directory):
    monkeypatch.chdir(tmp_path)  # from any folder the same, in the working directory
    root = {"RENGA_RUN_ROOT": "gs://bucket/runs/"}
    assert environment.run_directory(experiment, slice_name, environ={}) == f"runs/{directory}"
    assert environment.run_directory(experiment, slice_name, environ=root) == f"gs://bucket/runs/{directory}"
    assert environment.run_directory(experiment, slice_name, level="smoke", environ={}) == f"runs/{directory}-smoke"


def test_earlier_versions_named_a_run_by_folder_and_experiment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").touch()
    for experiment, beside in (("gin/quickstart.gin", ROOT), ("mine.gin", tmp_path), ("gs://bucket/a/x.gin", ROOT)):
        path = Path(tmp_path / experiment if beside == tmp_path else experiment)
        name = f"{path.parent.name}/{path.stem}"
        assert environment.former_run_directory(experiment, environ={}) == f"{beside}/runs/{name}"
        root = {"RENGA_RUN_ROOT": "gs://bucket/runs/"}
        assert environment.former_run_directory(experiment, environ=root) == f"gs://bucket/runs/{name}"


def test_git_ignores_runs_and_the_environment():
    paths = [".venv", ".venv.lock", ".venv.log", ".venv-newest", ".venv-newest.lock", "runs/gin/x/logs/host_0.log"]
    ignored = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", *paths], capture_output=True, text=True, check=False
    )
    assert ignored.stdout.split() == paths


def test_how_long_hosts_wait_for_the_last():
    assert environment.join_seconds(environ={}) == environment.JOIN_SECONDS
    assert environment.join_seconds(environ={"RENGA_JOIN_SECONDS": "45"}) == 45
    with pytest.raises(ValueError, match="RENGA_JOIN_SECONDS='soon': expected a whole number from 1 up"):
        environment.join_seconds(environ={"RENGA_JOIN_SECONDS": "soon"})


@pytest.mark.covers("E02")
def test_several_hosts_need_a_place_for_the_run_that_was_named(monkeypatch):
    for name in ("RENGA_RUN_ROOT", "RENGA_SIMULATE"):
        monkeypatch.delenv(name, raising=False)
    one, several = slices.get("v4-8"), slices.get("v4-32")
    environment.require_named(None, one)
    environment.require_named("gs://bucket/first", several)
    for run_dir in (None, ""):
        with pytest.raises(
            UserError, match=r"v4-32 has 4 hosts, and no place for the run was named\. Set RENGA_RUN_ROOT"
        ):
            environment.require_named(run_dir, several)
    monkeypatch.setenv("RENGA_RUN_ROOT", "gs://bucket/runs")
    environment.require_named(None, several)
    monkeypatch.delenv("RENGA_RUN_ROOT")
    monkeypatch.setenv("RENGA_SIMULATE", "v4-32")
    environment.require_named(None, several)


@pytest.mark.parametrize("package", ["", "renga."])
def test_runs_and_imports_of_a_wheel_stay_out_of_its_folder(monkeypatch, tmp_path, package):
    monkeypatch.delenv("RENGA_RUN_ROOT", raising=False)
    monkeypatch.setattr(environment, "PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    assert environment.run_directory(ROOT / "gin/quickstart.gin", "v4-8") == "runs/quickstart-v4-8"
    assert environment.import_root() == (ROOT.parent if package else ROOT)
