"""Unexpected errors, including plain ValueErrors, keep their traceback and have their own exit code."""

import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.errors import UserError
from core.training.prefetch import Prefetch
from launch import __main__ as cli
from launch import environment
from launch.check import preflight
from launch.config import loader
from launch.plan import compiled_report, compiling
from parallel.verify import agreement


def unpack():
    _, _ = (1,)


def shard():
    jax.device_put(np.zeros(3), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data")))


def from_a_reader(error):
    """Raises `error` in the thread of a prefetch."""

    def read():
        raise error

    class Batches:
        __next__ = staticmethod(read)
        state = staticmethod(dict)

    with Prefetch(Batches(), to_device=lambda batch: batch) as prefetch:
        next(prefetch)


ERRORS = [
    (lambda: json.loads("{"), "json.decoder.JSONDecodeError: Expecting property name"),
    (lambda: b"\xff".decode(), "UnicodeDecodeError: 'utf-8' codec"),
    (unpack, "ValueError: not enough values to unpack"),
    (lambda: np.zeros(3).reshape(2, 2), "ValueError: cannot reshape array"),
    (shard, "but the dimension size is 3"),
    (lambda: {}["inputs"], "KeyError: 'inputs'"),
    (lambda: from_a_reader(ValueError("bad record")), "ValueError: bad record"),
]


@pytest.fixture
def command(monkeypatch):
    """Makes `train` call a function."""

    def use(function):
        module = types.SimpleNamespace(
            HELP="help", EXAMPLE="example", add_arguments=lambda parser: None, run=lambda args: function()
        )
        monkeypatch.setitem(sys.modules, "launch.runs.train", module)

    return use


@pytest.mark.parametrize(("raises", "last"), ERRORS, ids=[last for _, last in ERRORS])
def test_an_unexpected_error_keeps_its_traceback_and_is_code_13(raises, last, command, capsys):
    command(raises)
    assert cli.main(["train"]) == 13
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert "test_unexpected_errors.py" in said
    assert last in said.splitlines()[-1]


def refuse():
    raise UserError("rows = 3: expected 4")


@pytest.mark.parametrize("raises", [refuse, lambda: from_a_reader(UserError("rows = 3: expected 4"))])
def test_a_user_error_is_a_message_and_code_2(raises, command, capsys, monkeypatch):
    monkeypatch.delenv("RENGA_TRACEBACK", raising=False)
    command(raises)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: rows = 3: expected 4\n"


JOINED = """
import sys, types
from core.hosts import distributed
from core.errors import UserError
from launch import __main__ as cli

def run(args):
    distributed.exit_at_once_on_exception()
    {statement}

sys.modules["launch.runs.train"] = types.SimpleNamespace(
    HELP="help", EXAMPLE="example", add_arguments=lambda parser: None, run=run
)
sys.exit(cli.main(["train"]))
"""


@pytest.mark.parametrize(
    ("statement", "code", "says"),
    [("a, b = (1,)", 13, "Traceback"), ("raise UserError('rows = 3')", 2, "error: rows = 3")],
)
def test_the_codes_are_the_same_once_a_run_has_joined(statement, code, says):
    ended = subprocess.run(
        [sys.executable, "-c", JOINED.format(statement=statement)],
        cwd=environment.WORKSPACE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code
    assert ended.stderr.startswith(says), ended.stderr
    assert ended.stderr.count("Traceback") == (code == 13)


VERDICTS = {
    "check": lambda: preflight.check("mine.gin", run_dir="runs/mine"),
    "plan --compile": lambda: compiling.compile_one(
        "mine.gin", slice_name="v4-8", bindings=(), candidate=(), program=""
    ),
    "report --strategies": lambda: compiled_report._compiled("mine.gin", "fsdp", (), "v4-8"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_an_unexpected_error_is_no_verdict_on_the_input(name, monkeypatch):
    monkeypatch.setattr(loader, "load", lambda *_, **__: unpack())
    with pytest.raises(ValueError, match="not enough values to unpack"):
        VERDICTS[name]()


def test_an_unexpected_error_is_no_refusal_of_a_strategy():
    subject = types.SimpleNamespace(under=lambda example, batch: unpack())
    with pytest.raises(ValueError, match="not enough values to unpack"):
        agreement._refusal(subject, None, {})
