"""README's commands, read from README: what it tells a new user to type works."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import sentencepiece

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REMOTE = "--tpu NAME"


def blocks(language):
    return [body for kind, body in BLOCK.findall((ROOT / "README.md").read_text()) if kind == language]


def commands():
    """Every line of every block without a language, continued lines joined, comments dropped."""
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    return [
        shlex.join(shlex.split(line, comments=True)) if "&&" not in line else line for line in lines if line.strip()
    ]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A copy of what git tracks, with README's own Python files written beside it, and our environment."""
    copy = tmp_path_factory.mktemp("clone") / "renga"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(["git", "add", "--all"], cwd=copy, check=True)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    for body in blocks("python"):
        (copy / body.splitlines()[0].removeprefix("# ")).write_text(body)
    return copy


def run(command, workspace):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(command, shell=True, cwd=workspace, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_there_are_commands():
    assert commands()[:2] == ["launch/pod.sh v4-16 gin/quickstart.gin --simulate", "tests/run.sh"]
    assert len(commands()) >= 10


def test_every_file_that_readme_and_workspace_link_to_exists():
    for page in ("README.md", "WORKSPACE.md", "launch/README.md", "tasks/README.md", "parallel/README.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("command", [c for c in commands() if "pod.sh v" in c and REMOTE not in c])
def test_every_run_passes_its_check(command, workspace):
    """As typed, but with --check: nothing starts. Valkyrie is told where its data would be."""
    (workspace / "runs" / "text").mkdir(parents=True, exist_ok=True)
    for name in ("a", "b"):
        (workspace / "runs" / "text" / f"{name}.txt").write_text("one document")
    if "valkyrie_7b" in command and "--smoke" not in command:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter((ROOT / "README.md").read_text().splitlines()),
            model_prefix=str(workspace / "runs" / "words"),
            vocab_size=300,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
        command += " --gin \"DATA = 'runs/text/*.txt'\" --gin \"VOCABULARY = 'runs/words.model'\""
    assert run(command + " --check", workspace).splitlines()[-1] == "READY"


@pytest.mark.parametrize("command", [c for c in commands() if REMOTE in c])
def test_what_goes_to_gcloud_is_printed(command, workspace):
    assert "gcloud compute tpus tpu-vm" in run(command + " --dry-run", workspace)


@pytest.mark.slow
def test_every_command_as_typed(workspace):
    """In README's order, in a copy of the workspace; without the one that runs these tests and those for gcloud."""
    for command in commands():
        if command != "tests/run.sh" and REMOTE not in command and "--check" not in command:
            run(command, workspace)
