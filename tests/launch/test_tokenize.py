"""`launch/run tokenize` from the command line, and the check of a run that reads its result."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from core.hosts import exit_codes
from core.training import run_lock
from launch import __main__ as main
from launch import environment
from tasks.text import tokenizing

TEXTS = [f"{i:03d} " + "word " * (i * 7 % 50) for i in range(200)]
VOCABULARY = environment.WORKSPACE / "tests/tasks/text/fixtures/tokenizers/bpe"


def write(file, texts=TEXTS):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def run(*argv):
    return main.main(["tokenize", *map(str, argv)])


def test_a_cache_is_written_and_a_run_is_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, out = write(tmp_path / "a.jsonl"), tmp_path / "tokens"
    line = ("--data", data, "--vocabulary", VOCABULARY, "--out", out, "--processes", 1)
    assert run(*line) == 0
    said = capsys.readouterr().out
    assert "hashing 1 file\n" in said
    counts = {words[0]: words[1:] for words in map(str.split, said.splitlines()) if len(words) == 4}
    assert list(counts) == ["read", "train", "validation"]
    documents, tokens, size = ([int(row[column].replace(",", "")) for row in counts.values()] for column in range(3))
    assert (documents[0], size[0]) == (len(TEXTS), sum(map(len, TEXTS)))
    assert all(whole == train + held_out > 0 for whole, train, held_out in (documents, tokens, size))
    assert f"gin/tasks/tokens.gin with DATA = '{out}', VOCABULARY = '{VOCABULARY}'" in said
    assert sorted(path.name for path in out.iterdir()) == ["cache.json", "train", "validation"]
    assert run(*line) == 0
    assert f"{out} is complete" in capsys.readouterr().out

    def check(vocabulary, *more):
        bindings = (
            *more,
            "include 'gin/tasks/tokens.gin'",
            f"DATA = '{out}'",
            f"VOCABULARY = '{vocabulary}'",
            "VOCAB_SIZE = 512",
        )
        words = [word for binding in bindings for word in ("--gin", binding)]
        code = main.main(["check", "v4-8", str(environment.WORKSPACE / "gin/quickstart.gin"), "--simulate", *words])
        return code, capsys.readouterr().out

    code, said = check(VOCABULARY)
    assert code == 0, said
    assert "text.tokens: " in said
    code, said = check(VOCABULARY, "experiment.Experiment.max_epochs = 1")
    assert code == exit_codes.USER_ERROR
    assert "max_epochs = 1: end after step" in " ".join(said.split())
    code, said = check("bytes")
    assert code == exit_codes.USER_ERROR
    assert "was written with another tokenizer" in " ".join(said.split())


def test_a_folder_in_use_or_of_something_else_is_refused(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl")
    line = ("--data", data, "--vocabulary", "bytes", "--out", tmp_path / "out")
    lock = run_lock.RunLock.acquire(str(tmp_path / "out"), say=print)
    try:
        assert run(*line) == exit_codes.USER_ERROR
    finally:
        lock.release()
    said = " ".join(capsys.readouterr().err.split())
    assert f"the token cache {tmp_path}/out is in use by another launch: process {os.getpid()} on" in said
    assert "or give another --out" in said
    assert run("--data", data, "--vocabulary", "bytes", "--out", tmp_path) == exit_codes.USER_ERROR
    assert "has other files (a.jsonl): give a new folder" in " ".join(capsys.readouterr().err.split())
    assert run("--data", tmp_path / "b.jsonl", "--vocabulary", "", "--out", tmp_path / "out") == exit_codes.USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert "--data: no file matches" in said
    assert "--vocabulary is not set" in said


@pytest.mark.slow
def test_a_killed_command_continues(tmp_path):
    """kill -9 of the process that writes, several times; every fourth text comes twice."""
    texts = [" ".join(str(i * j % 9973) for j in range(1, 400)) for i in range(1, 3201)]
    data = write(tmp_path / "a.jsonl", [*texts, *(f"{text} again" for text in texts[::4])])
    code = (
        "import sys; from tasks.text import token_writer as w, tokenizing as t; w._COMMIT_TOKENS = 2**19; "
        "t._BATCH_BYTES = 2**17; "
        "from launch import __main__ as main; sys.exit(main.main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", code, "tokenize", "--data", str(data), "--vocabulary", "bytes", "--processes", "1"]
    line.append("--deduplicate")
    kills = 0
    while True:
        started = subprocess.Popen([*line, "--out", str(tmp_path / "parts")], cwd=environment.WORKSPACE)
        file, before = tmp_path / "parts" / tokenizing.STARTED, None
        while started.poll() is None:
            now = file.read_text() if file.exists() else None
            if before is not None and now != before and now is not None:
                others = psutil.Process(started.pid).children(recursive=True)
                started.send_signal(signal.SIGKILL)
                kills += 1
                assert others
                assert not psutil.wait_procs(others, timeout=20)[1], (
                    "processes that convert outlive the one that writes"
                )
            before = now
            try:
                started.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        if started.returncode == 0:
            break
        assert started.returncode == -signal.SIGKILL
        assert not (tmp_path / "parts" / "cache.json").exists()
    assert kills >= 3
    subprocess.run([*line, "--out", str(tmp_path / "whole")], cwd=environment.WORKSPACE, check=True)
    files = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("c/*")}
        for name in ("parts", "whole")
    ]
    assert files[0] == files[1]
    assert files[0]
    about = json.loads((tmp_path / "parts" / "cache.json").read_text())
    assert about["left_out"]["near_duplicate"]["documents"] == 800
    assert sum(split["documents"] for split in about["splits"].values()) == 3200
