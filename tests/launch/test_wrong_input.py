"""Wrong input to every command ends within seconds with one plain error, and before anything is written or compiled."""

import time

import pytest

from launch import __main__ as cli
from launch.config import loader

MOST_CPU_SECONDS, MOST_LINES = 8.0, 12
EXPERIMENT = "gin/quickstart.gin"
# Command lines; {no}: a path in a folder that does not exist; {locked}: a path that nobody can create; {run}: a run
# without checkpoints; {folder}: a folder with a file; {file}: a text file.
WRONG = """
agreement --only nosuch
agreement --model nosuch_module:build
agreement --experiment {no}.gin
agreement --only fsdp --json {no}
bisect v4-8 {no}.gin v4-8
describe {no}
describe {folder}
describe {file}
draw nosuch --stages 2 --microbatches 2
plan v4-9 {experiment}
plan v4-8 {no}.gin
plan v4-8 {experiment} --only nosuch
plan v4-8 {experiment} --write {no}
plan v4-8 {experiment} --json {folder}
plan v4-8 {experiment} --explain {no}.gin
plan v4-8 {experiment} --explain nosuch
report v4-9 {experiment}
report v4-8 {experiment} --strategies {no}.gin
report v4-8 {experiment} --strategies nosuch
report v4-8 {experiment} --json {no}
report v4-8 {experiment} --scale-from v4-9
slices nosuch
make-dataset sudoku --csv {no} --out {folder}/new
make-dataset sudoku --size 4 --train 4 --test 4 --out {folder}
make-dataset sudoku --size 4 --train 4 --test 4 --out {locked}
make-dataset arc --version 7 --out {folder}/new
check v4-9 {experiment}
check v4-8 {no}.gin
checkpoints ls {no}
checkpoints verify {no}
checkpoints diff {no} {no}
checkpoints prune {no} --keep 1
check v4-9 {experiment} --level hosts
evaluate {no}
evaluate {folder}
evaluate {run} --slice v4-9
evaluate {run} --rows nosuch
evaluate {run} --task nosuch
evaluate {run} --humaneval {no} --allow-code
evaluate {run} --gates nosuch
evaluate {run} --pictures
evaluate {run} --lm-eval nosuch --json {no}
export {no} --out {folder}/new
export {run} --out gs://bucket/new
export {run} --out {folder}
export {run} --out {locked}
export {run} --out {folder}/new --dtype nosuch
export {run} --out {folder}/new --push nosuch
generate {no} --prompt x
generate {run} --prompt x
generate {run} --prompt x --out {no}
generate {run} --prompt x --slice v4-9
cache-hidden-states {no}.gin --out {folder}/new
cache-hidden-states {experiment} --out {locked}
cache-hidden-states {experiment} --out {folder}/new --rows nosuch
pod v4-9 {experiment}
pod v4-8 {no}.gin --simulate
pod v4-8 {experiment} --simulate --run-dir {locked}
pod profile {no} --seconds 5
pod profile {run} --seconds 5
pod logs {no}
profile {no}
profile {run} --session nosuch
suite nosuch
suite exp02 --out {no}
suite exp02 --run-root {locked} --simulate
tensorboard {run} --port nosuch
tokenize --data {no} --vocabulary bytes --out {folder}/new
tokenize --data {file} --vocabulary {no} --out {folder}/new
tokenize --data {file} --vocabulary bytes --out {folder}
tokenize --data {file} --vocabulary bytes --out {locked}
tokenize --data nosuch:x --vocabulary bytes --out {folder}/new
tokenize --data {file} --vocabulary bytes --out {folder}/new --exclude {no}
tokenize --task renga.python_source --length 8
train {no}.gin --slice v4-8
train {experiment} --slice v4-9
check v4-9 {experiment} --level slice
""".strip().splitlines()


@pytest.mark.part("all")
def test_every_command_is_tried():
    assert {line.split()[0] for line in WRONG} == set(cli.commands())


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "file.txt").write_text("text")
    (folder / "run").mkdir()
    (folder / "run" / "config.gin").write_text(loader.load(EXPERIMENT).text)
    return {
        "experiment": EXPERIMENT,
        "no": folder / "nothing" / "nothing",
        "locked": "/proc/nothing",
        "run": folder / "run",
        "folder": folder,
        "file": folder / "file.txt",
    }


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_plain_error_within_seconds(line, places, capfd):
    before = sorted(places["folder"].rglob("*"))
    began = time.process_time()
    code = cli.main(line.format(**places).split())
    assert time.process_time() - began < MOST_CPU_SECONDS
    out, err = capfd.readouterr()
    assert code == 2, out + err
    assert "Traceback" not in err
    assert 0 < len((out + err).strip().splitlines()) <= MOST_LINES
    assert sorted(places["folder"].rglob("*")) == before
