"""Conversations at the terminal and from standard input."""

import io
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launch import conversation, live_text, loaded_model
from launch.conversation import Conversation
from parallel.generation.sampling import GREEDY
from tests.launch.test_published_models import FAMILY, WORDS, run_command, write_tokenizer

pytestmark = pytest.mark.usefixtures("no_cache_of_the_user")
ROOT = pathlib.Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'w0' %}{{ raise_exception('w0 is not allowed') }}{% endif %}"
    "{{ 'w1 ' if m['role'] == 'user' else 'w2 ' }}{{ m['content'] }} {% endfor %}w2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder with 64 positions and a chat template."""
    found = tmp_path_factory.mktemp("published") / "tiny"
    shutil.copytree(FAMILY, found)
    write_tokenizer(found, WORDS)
    (found / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w82", "chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="module")
def model(folder):
    return loaded_model.load(str(folder))


def conversation_of(model, **options):
    return Conversation(model, **{"max_tokens": 4, "sampling": GREEDY, "seed": 0, **options})


def said(text, model, monkeypatch, capsys):
    """The answers to lines of standard input, and the messages on standard error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    conversation.run(conversation_of(model))
    found = capsys.readouterr()
    return found.out.splitlines(), found.err


def test_each_line_is_answered_after_all_before_it(model, monkeypatch, capsys):
    answers, _ = said("w5 w6\n\nw7\n/new\nw5 w6\n/exit\nw9\n", model, monkeypatch, capsys)
    options = {"max_tokens": 4, "slots": conversation._SLOTS}  # those of the conversation, for one program
    alone = model.continued(["w1 w5 w6 w2"], **options)[0].text
    after = model.continued([f"w1 w5 w6 w2 {alone} w1 w7 w2"], **options)[0].text
    assert [answer.strip() for answer in answers] == [alone.strip(), after.strip(), alone.strip()]


def test_a_message_that_cannot_be_answered_changes_nothing(model, monkeypatch, capsys):
    long = " ".join(["w5"] * 70)
    answers, errors = said(f"w0\n{long}\nw5 w6\n", model, monkeypatch, capsys)
    assert len(answers) == 1
    assert "w0 is not allowed" in errors
    assert "needs 72 positions with this message, and the model has 64" in errors


def test_a_growing_history_compiles_few_programs(model):
    talk = conversation_of(model)
    before = model.generator._decoder._prefill._cache_size()
    for word in ("w5", "w6 w7", "w8 w9 w10"):
        talk.answer(word)
    assert model.generator._decoder._prefill._cache_size() - before <= 1


def test_ctrl_c_ends_an_answer_and_not_the_conversation(model, monkeypatch, capsys):
    add = live_text.LiveText.add

    def interrupted(self, ids):
        add(self, ids)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    talk = conversation_of(model, max_tokens=60)
    with monkeypatch.context() as patch:
        patch.setattr(live_text.LiveText, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):  # the second one
            talk.answer("w5")
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(live_text.LiveText, "add", lambda self, ids: None)
    capsys.readouterr()
    talk.answer("w5")
    assert "cut after" in capsys.readouterr().err


def test_what_a_conversation_cannot_do_is_an_error_before_weights_are_read(folder, tmp_path, capsys):
    without = tmp_path / "without"
    shutil.copytree(FAMILY, without)
    (without / "model.safetensors").write_bytes(b"never read")
    for words, message in {
        ("generate", folder): "give --prompt, --prompt-ids or --file",
        ("generate", folder, "--chat", "--json"): "neither --json nor --out",
        ("generate", without, "--chat"): "has no tokenizer.json",
        ("generate", without, "--prompt", "w5"): "has no tokenizer.json: give ids",
        ("generate", without, "--prompt-ids", "5,83"): "the model's are 0 to 82",
        ("generate", without, "--prompt-ids", "5", "--max-tokens", 64): "and the model has 64",
        ("generate", folder, "--prompt", "w5", "--temperature", 0): "; --greedy always takes the most likely token",
        ("generate", folder, "--prompt", "w5", "--greedy", "--top-k", 3, "--min-p", 0.1): "--top-k and --min-p: leave",
    }.items():
        assert run_command(*words) == 2, words
        assert message in capsys.readouterr().err, words


def test_ids_need_no_tokenizer(tmp_path, capsys):
    shutil.copytree(FAMILY, tmp_path / "tiny")
    assert run_command("generate", tmp_path / "tiny", "--prompt-ids", "5,7", "--max-tokens", 3, "--greedy") == 0
    assert re.fullmatch(r"\d+ \d+ \d+\n", capsys.readouterr().out)


@pytest.mark.slow  # a process that starts, loads and compiles
def test_a_conversation_at_a_terminal(folder):
    master, terminal = pty.openpty()
    words = [sys.executable, "-m", "launch", "generate", str(folder), "--chat", "--max-tokens", "3", "--greedy"]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": os.devnull}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    shown = b""

    def until(count):
        nonlocal shown
        end = time.monotonic() + 120
        while shown.count(b"> ") < count and time.monotonic() < end:
            if select.select([master], [], [], 1)[0]:
                shown += os.read(master, 4096)
        assert shown.count(b"> ") >= count, shown.decode()

    until(1)
    os.write(master, b"w5 w6\r")
    until(2)
    assert re.search(rb"w5 w6\r\n.*w\d+ w\d+ w\d+", shown, re.DOTALL), shown
    os.write(master, b"w7")
    time.sleep(0.2)  # typed before Ctrl-C, which has no terminal of its own to come from
    process.send_signal(signal.SIGINT)
    until(3)
    assert b"(/exit ends)" in shown
    os.write(master, b"/exit\r")
    assert process.wait(30) == 0
