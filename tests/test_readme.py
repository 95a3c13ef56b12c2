"""Runs the commands of README.md and of the tutorials as they are written there, and checks what all pages say."""

import argparse
import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from core import batches, logical
from core.checkpoints import published
from core.hosts import exit_codes
from launch import __main__ as cli
from launch import environment, experiment, settings
from models.decoder import transformer
from models.decoder.published import families, family_tensors
from tasks import streams
from tests.lab import golden, recording, reference
from tests.models.vision import folders

pytestmark = pytest.mark.part("all")  # pages name every part
ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REMOTE = "--tpu NAME"
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
PAGES = [ROOT / name for name in LISTED.stdout.split()]


DOCS = ROOT / "docs"
TUTORIALS = [ROOT / "README.md", *(DOCS / "tutorials" / f"{n}.md" for n in ("first-run", "tune-a-model", "own-model"))]
GUIDES = sorted((DOCS / "how-to").glob("*.md"))
STUDIES = sorted((DOCS / "results").glob("*.md"))


def commands(pages=TUTORIALS, kinds=("",)):
    """Each line of each block of these languages, once: continued lines joined, comments dropped."""
    bodies = [body for page in pages for kind, body in BLOCK.findall(page.read_text()) if kind in kinds]
    lines = "\n".join(bodies).replace("\\\n", " ").splitlines()
    found = [
        shlex.join(shlex.split(line, comments=True)) if "&&" not in line else line for line in lines if line.strip()
    ]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A copy of what git tracks, and the environment of this process."""
    copy = tmp_path_factory.mktemp("clone") / "renga"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(["git", "add", "--all"], cwd=copy, check=True)
    (copy / Path(sys.prefix).name).symlink_to(sys.prefix)
    published_model(copy / "smollm2")
    model_of_images(copy)
    return copy


def model_of_images(into):
    """A folder of images and text, and questions, as a page names them."""
    config = Path(folders.copied("llava", into)) / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 4096'))
    (into / "my_questions").mkdir()
    lines = []
    for number in range(40):
        (into / "my_questions" / f"{number}.png").write_bytes(folders.PHOTO.read_bytes())
        lines.append(json.dumps({"image": f"{number}.png", "question": "what?", "answer": "ab"}))
    (into / "my_questions" / "lines.jsonl").write_text("\n".join(lines) + "\n")


def published_model(folder):
    """A folder as the pages name it, with a small random model and a tokenizer with a chat template."""
    shutil.copytree(ROOT / "tests" / "tasks" / "text" / "fixtures" / "tokenizers" / "bpe", folder)
    model = transformer.Transformer(
        vocab_size=512, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, tied=True, rope_theta=1e5
    )
    batch = batches.batch_shapes(streams.batch_spec(1, length=8))
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch)
    values = np.random.default_rng(0)
    published.write(
        folder,
        published.tensors_of(
            lambda path, layer: 0.1 * values.standard_normal(_shape(shapes, path)[layer is not None :]),
            shapes,
            specs,
            family_tensors.named_sources(model),
            limits={"vocab": 512},
            dtype=np.float32,
        ),
    )
    (folder / "config.json").write_text(json.dumps(families.config(model, "llama")))


def _shape(shapes, path):
    *module, name = path.split("/")
    return shapes["/".join(module) or "~"][name].shape


def run(command, workspace, *, code=0):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(command, shell=True, cwd=workspace, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == code, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_there_are_commands():
    assert commands()[0] == "launch/pod.sh v4-16 gin/quickstart.gin --simulate"
    assert len(commands()) >= 10
    assert len(RUNS) >= 20


def test_every_file_that_a_page_links_to_exists():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"


def anchors(page):
    """The names under which GitHub links to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.covers("E05")
def test_every_section_that_a_page_links_to_exists():
    links = [
        (page, *link) for page in PAGES for link in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text())
    ]
    assert len(links) > 20
    gone = [
        (page, target, name)
        for page, target, name in links
        if name not in anchors((page.parent / target) if target else page)
    ]
    assert not gone


@pytest.mark.covers("E05")
def test_settings_that_pages_name_exist_and_have_the_default_that_they_say():
    homes = {"experiment.Experiment": experiment.Experiment}
    homes |= {f"settings.{kind.__name__}": kind for kind in settings.GROUPS.values()}
    defaults = {f"{home}.{f.name}": f.default for home, kind in homes.items() for f in dataclasses.fields(kind)}
    form = rf"(?:{'|'.join(map(re.escape, homes))})\.\w+"
    for page in PAGES:
        named = re.findall(rf"\b{form}", page.read_text())
        assert not [name for name in named if name not in defaults], page
    rows = re.findall(rf"^\| `({form})` \| ([^|]+) \|", "\n".join(p.read_text() for p in PAGES), re.MULTILINE)
    said = {name: default.strip("` ") for name, default in rows}
    assert len(said) > 5
    wrong = {
        n: (text, defaults[n])
        for n, text in said.items()
        if defaults[n] is not None and text != f"{defaults[n]!r}".removesuffix(".0")
    }
    assert not wrong


def peak(record):
    return record["memory"]["peak_bytes"] / 2**30


@pytest.mark.covers("E05")
def test_memory_that_a_paragraph_says_of_an_experiment_is_that_of_its_record():
    records = {name: golden.read(name) for name in golden.files()}
    checked = []
    for page in PAGES:
        for paragraph in re.split(r"\n\n|\n\|", page.read_text()):
            named = {name for name in re.findall(r"gin/(\w+)\.gin", paragraph) if name in records}
            if len(named) != 1:
                continue
            (name,) = named
            for said, most in re.findall(r"(\d+\.\d+) (?:GiB )?of (\d+\.\d+)", paragraph):
                digits = len(said.partition(".")[2])
                assert said == f"{peak(records[name]):.{digits}f}", f"{page}: {name}"
                usable = records[name]["memory"]["usable_bytes"] / 2**30
                assert most == f"{usable:.{len(most.partition('.')[2])}f}", f"{page}: {name}"
                checked.append((page.name, name))
    assert len(checked) > 10


@pytest.mark.covers("E05")
def test_times_in_the_table_of_experiments_are_those_of_their_records():
    table = re.findall(r"^\| `gin/(\w+)\.gin` \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(table) == 4
    for name, row in table:
        slice_name, tokens, _, seconds, mfu = (cell.strip() for cell in row.split("|"))
        record = golden.read(name)
        assert (slice_name, tokens) == (record["slice"], f"{record['tokens_per_step']:,}"), name
        times, shares = record["predicted"]["step_seconds"], record["predicted"]["mfu"]
        assert seconds == f"{times['scheduled']:.3g}", name
        assert mfu == f"{100 * shares['scheduled']:.0f}", name


def parse(line):
    """Parses the arguments of a command line as its command does, and runs nothing."""
    program, *words = shlex.split(line, comments=True)
    name = "pod" if program == "launch/pod.sh" else words.pop(0)
    module = cli.commands()[name]
    return cli.parser(importlib.import_module(module), program).parse_args(words)


def test_the_arguments_of_commands_in_every_page_are_valid():
    """`[--spot]` may be left out, N stands for a number, and a line with `…` is an outline."""
    lines = [
        line
        for page in PAGES
        for body in page.read_text().split("\n```")[1::2]
        for line in body.replace("\\\n", " ").splitlines()
    ]
    shown = [line for line in lines if line.startswith(("launch/run ", "launch/pod.sh ")) and "…" not in line]
    assert len(shown) > 40
    for line in shown:
        parse(re.sub(r"\bN\b", "1", re.sub(r"[\[\]]", "", line)))
    with pytest.raises(ValueError, match="--stps"):
        parse("launch/pod.sh v4-8 gin/quickstart.gin --stps 1")


def options(parser):
    """All flags of a parser and of its subcommands."""
    own = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        for child in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            own |= options(child)
    return own


@pytest.mark.covers("E05")
def test_commands_within_sentences_exist_and_have_the_flags_that_they_show():
    """They are often incomplete, such as `launch/run evaluate --num-examples all`, so that they are not parsed."""
    checked, known = 0, {}
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for program, rest in re.findall(r"`launch/(run|pod\.sh) ([^`]+)`", text):
            name = "pod" if program == "pod.sh" else rest.split()[0]
            if name == "COMMAND":
                continue
            module = cli.commands()[name]
            known.setdefault(name, options(cli.parser(importlib.import_module(module), "")))
            assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest)) <= known[name], f"{page}: {program} {rest}"
            checked += 1
    assert checked > 30


@pytest.mark.covers("E05")
def test_gin_files_that_pages_name_exist():
    named = [(page, name) for page in PAGES for name in re.findall(r"(?<![\w/])gin/[\w/]+\.gin\b", page.read_text())]
    assert len(named) > 50
    assert not [(page, name) for page, name in named if not (ROOT / name).exists()]


@pytest.fixture(scope="module")
def text(workspace):
    """Text, where the pages' own commands put it."""
    for start in ("mkdir -p runs/text", "mkdir -p runs && seq"):
        (line,) = [c for c in commands(GUIDES) if c.startswith(start)]
        run(line, workspace)
    train = (
        "from tasks import text; from tasks.text import vocabularies as v; "
        "vocabulary = v.trained_sentencepiece(size=1024); "
        "task = text.files(train='runs/text/*.txt', length=256, num_streams=4, vocabulary=vocabulary); "
        "task.prepare('runs/own', is_host_zero=True)"
    )
    run(f'{sys.executable} -c "{train}"', workspace)
    (line,) = [c for c in commands(GUIDES) if c.startswith("launch/run tokenize --data runs/text")]
    run(line, workspace)


PLACEHOLDERS = re.compile(r"\b(NAME|BUCKET|DIR|HIDDEN)\b|…|tuned\.gin|--scale-from")  # `check` has no --scale-from
RUNS = [c for c in commands([*TUTORIALS, *GUIDES]) if "pod.sh v" in c and not PLACEHOLDERS.search(c)]
IN_ONE_PROCESS = """
import contextlib, io, json, sys
from launch.__main__ import main
from launch.cli import pod

pod._become = main  # the command that would replace this process
found = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(words)
    found.append((code, said.getvalue()))
json.dump(found, sys.stdout)
"""


def check_of(command):
    """The words of the check that makes no run: of a smoke run, the check of its small layout."""
    _, slice_, experiment, *words = shlex.split(command)
    if "smoke" in words:
        at = words.index("--check")
        return ["check", slice_, experiment, *words[:at], *words[at + 2 :], "--part", "small"]
    return ["pod", slice_, experiment, *words, *([] if "--check" in words else ["--check"])]


@pytest.fixture(scope="module")
def checked(workspace, text):
    """{command: (exit code, what it printed)} of every run with --check, all of them in one process."""
    words = [check_of(command) for command in RUNS]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHONPATH": str(workspace), "PYTHONSAFEPATH": "1", "COLUMNS": "1000"}  # the first two as in launch/run
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        input=json.dumps(words), cwd=workspace, env=env, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(RUNS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", RUNS)
def test_every_run_passes_its_check(command, checked):
    """As typed, but with --check: nothing starts."""
    code, said = checked[command]
    if not re.search(r"INIT_FROM = 'runs/", (ROOT / command.split()[2]).read_text()):
        assert code == 0, said
        assert said.splitlines()[-1] == "READY"
        return
    assert code == 2
    failed = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1  # a command above it trains that run
    assert failed[0].startswith("FAIL  initial parameters  INIT_FROM = 'runs/")


def test_a_check_as_typed_says_what_the_same_one_says_beside_others(workspace, checked):
    """In a process of its own, started by launch/pod.sh; numbers are left out, as free memory varies."""
    typed, other = run(f"launch/run {shlex.join(check_of(RUNS[0]))}", workspace), checked[RUNS[0]][1]
    assert re.sub(r"[\d.]", "", typed) == re.sub(r"[\d.]", "", other)


def test_gke_restarts_runs_after_the_exit_codes_that_a_restart_helps():
    """xpk itself restarts a run after the exit codes 127 to 255, so the guide lists those below."""
    (listed,) = re.findall(r"--restart-on-exit-codes (\S+)", (DOCS / "how-to" / "pods.md").read_text())
    wanted = [code for code, end in exit_codes.ENDINGS.items() if end.restart and code < 127]
    assert [int(code) for code in listed.split(",")] == wanted


@pytest.mark.parametrize(
    "command", [c for c in commands([DOCS / "how-to" / "pods.md"]) if REMOTE in c and "tensorboard" not in c]
)
def test_gcloud_commands_are_printed(command, workspace):
    assert "gcloud compute tpus" in run(re.sub(r"[\[\]]", "", command) + " --dry-run", workspace)


# Commands of README.md and of tutorials that no test types, and why.
NOT_TYPED = {
    ".venv/bin/hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir smollm2": "downloads 260 MB; the tests have "
    "a small random model in this folder",
}
LINES = {  # as the pages say
    "launch/run report v4-16 gin/quickstart.gin --compile": "compiler warnings: none",
    "launch/run check v4-16 gin/quickstart.gin": "READY",
}


@pytest.mark.slow
def test_every_command_as_typed(workspace):
    """README's commands and Python, then the commands of each tutorial, in a copy of the workspace."""
    typed = commands(kinds=("", "bash"))
    assert set(NOT_TYPED) | set(LINES) <= set(typed)
    (python,) = [body for kind, body in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python"]
    for command in [*typed, shlex.join([".venv/bin/python", "-c", python])]:
        if command in NOT_TYPED:
            continue
        began = time.perf_counter()
        said = run(command, workspace)
        print(f"{time.perf_counter() - began:6.0f} s  {command.splitlines()[0]}")
        if command in LINES:
            assert LINES[command] in said.splitlines(), command


def test_blocks_of_tutorials_that_no_command_is_in_are_excerpts_and_output():
    blocks = {page: BLOCK.findall(page.read_text()) for page in TUTORIALS}
    assert {kind for found in blocks.values() for kind, _ in found} == {"", "bash", "python", "gin", "text"}
    excerpts = [body for found in blocks.values() for kind, body in found if kind == "gin"]
    lines = (ROOT / "tests" / "outside" / "gpt.gin").read_text().splitlines()
    assert excerpts
    assert all(line in lines for body in excerpts for line in body.splitlines())


def test_no_two_commands_of_the_pages_share_a_default_run_directory():
    """A start in the directory of another experiment, or of other settings, is an error."""
    starts: dict[str, set[str]] = {}
    for page in PAGES:
        for kind, body in BLOCK.findall(page.read_text()):
            for line in body.replace("\\\n", " ").splitlines() if kind == "" else ():
                words = shlex.split(line, comments=True) if line.startswith("launch/pod.sh ") else []
                if words[2:3] and words[2].endswith(".gin") and not {"--run-dir", "--check"} & {*words}:
                    settings = " ".join(
                        w for w in words[3:] if not w.isdecimal() and w not in ("--steps", "--simulate")
                    )
                    starts.setdefault(environment.run_directory(words[2], words[1], environ={}), set()).add(settings)
    assert len(starts) > 5
    assert not {directory: settings for directory, settings in starts.items() if len(settings) > 1}


def prose(page):
    """The paragraphs and list items of a page, without code blocks, tables and headings; code and links as one word."""
    text = re.sub(
        r"^```.*?^```$|^<!--.*?-->$|^#[^\n]*$|^\|[^\n]*$|^    \S[^\n]*$",
        "",
        page.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    text = re.sub(r"`[^`]*`", "`", re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n\s*(?:\*|\d+\.) ", text) if part.strip()]


def test_readme_has_at_most_700_words_and_a_guide_500():
    assert len((ROOT / "README.md").read_text().split()) <= 700
    assert not {page.name: n for page in GUIDES if (n := len(page.read_text().split())) > 500}


def test_every_picture_is_shown_with_a_caption_and_the_command_that_makes_it():
    """The three badges need none."""
    shown, without = set(), []
    for page in PAGES:
        for alt, target, after in re.findall(r"!\[([^]]*)\]\(([^)]+)\)(?:\n\n(\*.*\*)\n)?", page.read_text()):
            picture = (page.parent / target).resolve()
            shown.add(picture)
            if picture.stem not in recording.BADGES and not (
                alt and re.search(r"`(launch/run|tests/run\.sh lab) [^`]+`", after)
            ):
                without.append((page.name, target))
    assert not without
    assert shown == set((DOCS / "pictures").iterdir())


GENERATED = "<!-- Made by"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parts[-2] != "lab"], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_sentences_have_at_most_40_words_and_cells_60_characters(page):
    """Of pages that people write. Cells of a study may be longer: they show what its command prints."""
    if page.read_text().startswith(GENERATED) or page.name == "STATUS.md" or "gin" in page.parts:
        return
    sentences = [each for part in prose(page) for each in re.split(r"(?<=[.?!:;])\s", part)]
    assert not [each for each in sentences if len(each.split()) > 40]
    if page in STUDIES:
        return
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    cells = [c.strip() for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE) for c in re.split(r"(?<!\\)\|", line)]
    assert not [c for c in cells if len(re.sub(r"\]\([^)]*\)", "", c)) > 60]


def test_executables_that_pages_name_exist():
    named = {(page, name) for page in PAGES for name in re.findall(r"\.venv/bin/([\w-]+)", page.read_text())}
    assert {name for _, name in named} >= {"hf", "python"}
    assert not {(page, name) for page, name in named if not (Path(sys.prefix) / "bin" / name).exists()}


def test_generated_pages_are_current():
    found = {name: text for name, text in reference.pages().items() if (reference.FOLDER / name).read_text() != text}
    assert not list(found), "tests/run.sh lab reference --write makes them"
