"""The agreement command, with README's model and strategy, and with wrong ones."""

import argparse
import importlib
import os
import re
import sys

import pytest

from core import slices
from launch import __main__ as cli
from launch import agreement, environment
from launch.commands.layouts import agreement as command
from parallel import strategies
from parallel.agreement import Difference, Trajectory, beyond

MINE = """
import dataclasses
import types

import jax
from jax.sharding import PartitionSpec as P

from core import logical
from my_model import INIT, TokenModel
from parallel import strategies


def build():
    return TokenModel(vocab_size=260)


class Forgetful(TokenModel):
    def _block(self, x, side):
        up = logical.param("up", (self.embed_dim, 256), ("embed", "mlp"), INIT)
        down = logical.param("down", (256, self.embed_dim), ("mlp", "embed"), INIT)
        hidden = jax.nn.gelu(x @ up)
        if jax.sharding.get_abstract_mesh().empty:
            return x + hidden @ down
        forgotten = jax.shard_map(
            lambda h, w: h @ w,
            in_specs=(P(None, None, "tensor"), P("tensor", None)),
            out_specs=P(),
            axis_names={"tensor"},
            check_vma=False,
        )
        return x + forgotten(hidden, down)


def forgetful():
    return Forgetful(vocab_size=260)


def shipped_name():
    return strategies.fsdp()


def too_wide():
    return dataclasses.replace(strategies.tensor(tensor=4), name="too_wide")


def bare():
    return types.SimpleNamespace(init=None, init_carry=None, loss=None)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """README's own files, and others, where Python finds them."""
    readme = (environment.WORKSPACE / "README.md").read_text()
    for body in re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        (tmp_path / body.splitlines()[0].removeprefix("# ")).write_text(body)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


def measured(said, name):
    row = next(line.split() for line in said.splitlines() if line.strip().startswith(f"| {name} "))
    return row[3], [float(cell) for cell in row[5:] if "e" in cell]


@pytest.mark.usefixtures("mine")
def test_a_model_and_a_strategy_of_ones_own(launch):
    strategy = "my_strategies:tensor_only@v4-8"
    said = launch("agreement", "--model", "mine:build", "--strategy", strategy, "--steps", "2", "--float32-only")
    slice_name, absolute = measured(said, "tensor_only")
    assert slice_name == "v4-8"
    assert len(absolute) == 4
    assert 0 < max(absolute) < 1e-4  # measured, not assumed: rounding, and nothing more
    assert "differs" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("mine")
def test_a_model_that_forgets_a_sum_fails(launch):
    strategy = "my_strategies:tensor_only@v4-8"
    said = launch(
        "agreement", "--model", "mine:forgetful", "--strategy", strategy, "--steps", "1", "--float32-only", code=1
    )
    assert re.search(r"differs: tensor_only, v4-8: gradients \['layers/.*'\] \d{6,} ulp apart, tolerance \d+", said)


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Runs the command here; gives its exit code and what it said."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", os.environ["JAX_NUM_CPU_DEVICES"])  # puts back what the command sets
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        code = cli.main(["agreement", *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "fdsp"], "no strategy fdsp; expected some of data_parallel, zero1, fsdp"),
        (["--strategy", "mine:halves"], "expected MODULE:FUNCTION@SLICE"),
        (["--strategy", "my_strategies:tensor_only@v9-1"], "unknown TPU slice 'v9-1'"),
        (["--strategy", "os:nope@v4-8"], "--strategy os:nope: module 'os' has no attribute 'nope'"),
        (["--strategy", "os:sep@v4-8"], "--strategy os:sep: expected a function, found a str"),
        (["--strategy", "mine:build@v4-8"], "it returned a TokenModel; expected a parallel.strategies.Strategy"),
        (["--strategy", "parallel.strategies:hsdp@v4-8"], "it needs data; give a function of no arguments"),
        (["--strategy", "mine:shipped_name@v4-8"], "there is already a strategy named 'fsdp'"),
        (["--strategy", "my_strategies:tensor_only@v4-8"] * 2, "there is already a strategy named 'tensor_only'"),
        (["--model", "mine"], "'mine': expected MODULE:FUNCTION"),
        (["--model", "nosuch:build"], "--model nosuch:build: no module nosuch, here or on PYTHONPATH"),
        (["--model", "mine:nope"], "--model mine:nope: module 'mine' has no attribute 'nope'"),
        (["--model", "mine:bare"], "the SimpleNamespace it returned has no vocab_size"),
        (["--model", "my_model:TokenModel"], "--model my_model:TokenModel: it needs vocab_size"),
        (["--processes", "3", "--only", "fsdp"], "3 processes cannot share the 16 chips of v4-32 evenly; expected one"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
    ],
)
def test_what_cannot_be_compared_is_said(in_process, arguments, message):
    code, said = in_process(*arguments)
    assert code == 2
    assert message in said


@pytest.mark.usefixtures("mine")
def test_a_strategy_that_cannot_hold_the_model_fails_before_anything_runs(in_process):
    code, said = in_process("--model", "mine:build", "--strategy", "mine:too_wide@v4-32")
    assert code == 1
    assert "too_wide on v4-32 is refused: " in said


def test_devices_for_the_largest_slice():
    given = argparse.Namespace(strategy=["a:b@v4-8", "c:d@2xv4-32"])
    assert command._devices(given) == 32
    largest = max(slices.get(example.slice).chips for example in agreement.EXAMPLES.values())
    assert command._devices(argparse.Namespace(strategy=[])) == largest
    examples = {"own": agreement.Example("v4-64", strategies.fsdp())}
    assert agreement.rows_for(agreement.EXAMPLES) == 16
    assert agreement.rows_for(examples) == 32


def row(**ulp):
    apart = {part: Difference(0.0, ulp.get(part, 0.0), "w") for part in Trajectory._fields}
    return agreement.Row("fsdp", "v4-32", apart, None, {2: apart})


def test_the_exit_code_says_whether_all_agree(in_process, monkeypatch):
    monkeypatch.setattr(agreement, "measure", lambda *_, **__: [row()])
    assert in_process("--only", "fsdp", "--float32-only")[0] == 0
    monkeypatch.setattr(agreement, "measure", lambda *_, **__: [row(params=80_000.0)])
    code, said = in_process("--only", "fsdp", "--float32-only")
    assert code == 1
    assert "differs: fsdp, v4-32: params w 80000 ulp apart" in said
    assert "differs: fsdp, 2 processes: params w 80000 ulp apart" in said


def agree_when_played(names, *, steps, processes, model=agreement.MODEL, options=()):
    examples = {name: agreement.EXAMPLES[name] for name in names}
    argv = [sys.executable, "-m", "launch", "agreement", "--steps", str(steps), *options]
    found = agreement.measure_played(model, examples, steps=steps, processes=processes, command=argv)
    assert list(found) == list(names)
    for name, apart in found.items():
        assert not beyond(name, apart)
        assert apart["gradients"].ulp > 0, name  # it was another computation


@pytest.mark.covers("R11")
@pytest.mark.simulated(2)
@pytest.mark.usefixtures("mine")
def test_numbers_do_not_depend_on_the_number_of_processes():
    model = importlib.import_module("my_model").TokenModel(vocab_size=260)  # quick to compile
    agree_when_played(["fsdp_tensor"], steps=1, processes=2, model=model, options=("--model", "mine:build"))


RECURSIVE = [name for name, example in agreement.EXAMPLES.items() if not example.strategy.pipeline]  # that can hold it


@pytest.mark.slow
@pytest.mark.covers("R11", "N12")
@pytest.mark.simulated(4)
@pytest.mark.parametrize(("processes", "steps", "names"), [(2, 3, ["fsdp", "fsdp_tensor"]), (4, 20, RECURSIVE)])
def test_no_number_of_the_recursive_model_depends_on_the_number_of_processes(processes, steps, names):
    model = agreement.MODELS["trm"]
    agree_when_played(names, steps=steps, processes=processes, model=model, options=("--model", "trm"))


@pytest.mark.slow
@pytest.mark.covers("R11")
@pytest.mark.simulated(4)
@pytest.mark.parametrize("processes", [2, 4])
def test_no_number_depends_on_the_number_of_processes(processes):
    """As `launch/run agreement --processes`, for all that it shows."""
    agree_when_played(list(agreement.EXAMPLES), steps=3, processes=processes)
