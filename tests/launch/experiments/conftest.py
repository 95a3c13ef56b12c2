"""Runs whose answers are known: a small ARC dataset, and a model that says what it was told."""

import importlib.util
import json
import sys

import jax
import numpy as np
import pytest

from core.checkpoints.store import Checkpoints
from launch import __main__ as cli
from launch.config import loader
from launch.hosts import cluster
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from tasks.puzzles import arc_grids, writing

HOST = Host(0, 1, True)
ASKED = {"p": [[[1, 2], [3, 4]]], "r": [[[7]], [[8]]]}
RIGHT = {"p": [[[5, 6, 7]]], "r": [[[1, 1]], [[2, 2]]]}
WRONG, OTHER = [[5, 6, 8]], [[9]]
VARIANTS = 5  # of p, itself among them; r has none but itself
PARROT = '''
"""A model that says what it was told, by checkpoint and puzzle."""

import dataclasses

import haiku as hk
import jax.numpy as jnp
import numpy as np

from core import logical
from core.types import LossOutput, WeightedSum


@dataclasses.dataclass(frozen=True)
class Parrot:
    file: str

    def init(self, rng, batch):
        return hk.transform(lambda: logical.param("turn", (1,), ("norm",), jnp.zeros)).init(rng)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        rows = jnp.sum(batch["puzzle_ids"] > 0, dtype=jnp.float32)
        return carry, LossOutput(params["~"]["turn"][0] * rows, rows, {"seen": WeightedSum(rows, rows)})

    def evaluate(self, params, rng, batch):
        told, turn = np.load(self.file), params["~"]["turn"][0].astype(jnp.int32)
        _, out = self.loss(params, (), rng, batch, is_training=False)
        said = {name: jnp.asarray(told[name])[turn, batch["puzzle_ids"]] for name in ("predicted", "q_halt")}
        return out._replace(extras={"inputs": batch["inputs"], "puzzle_ids": batch["puzzle_ids"], **said})
'''
EXPERIMENT = """
from __gin__ import dynamic_registration
import parrot
include 'gin/defaults.gin'
include 'gin/tasks/arc.gin'
MODEL = @parrot.Parrot()
parrot.Parrot.file = '{told}'
DATA = '{data}'
BATCH_SIZE = 16
SLICE = 'v4-32'
"""


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """An ARC dataset of puzzles p (one test, five variants) and r (two tests): its folder, and variants by id."""
    directory = str(tmp_path_factory.mktemp("arc") / "set")
    rng = np.random.default_rng(0)
    turns = [arc_grids.Variant(), *(arc_grids.random_variant(rng) for _ in range(VARIANTS - 1))]
    variants = [None, *(("p", turn) for turn in turns), ("r", arc_grids.Variant())]
    with writing.dataset(directory, vocab_size=12, seq_len=900, about={}) as out:
        out.identifiers += [variant.name(name) for name, variant in variants[1:]]
        for ids in (range(1, VARIANTS + 1), [VARIANTS + 1]):
            pairs, sizes = [], []
            for name, variant in (variants[i] for i in ids):
                tests = zip(ASKED[name], RIGHT[name], strict=True)
                shown = [[framed(g, variant) for g in pair] for pair in tests]
                pairs += shown
                sizes.append(len(shown))
            inputs, labels = np.swapaxes(np.asarray(pairs), 0, 1)
            for split in (out.train, out.test):
                split.add_group(inputs, labels, puzzle_sizes=sizes, identifiers=list(ids))
        out.extra["test_puzzles.json"] = {
            name: {"test": [{"input": a, "output": b} for a, b in zip(ASKED[name], RIGHT[name], strict=True)]}
            for name in ASKED
        }
    return directory, variants


@pytest.fixture(scope="session")
def parrot(tmp_path_factory):
    """The folder of the module `parrot`, which Python finds while the tests run."""
    folder = tmp_path_factory.mktemp("parrot")
    (folder / "parrot.py").write_text(PARROT)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def parrot_run(dataset, parrot, tmp_path_factory):
    """A run with two checkpoints: at step 1 p is answered wrong three times and right twice; at step 2 right twice and
    three times another way. r's first test is right at both, its second never."""
    run_dir = tmp_path_factory.mktemp("runs") / "parrot"
    run_dir.mkdir()
    directory, variants = dataset
    said = [[WRONG, WRONG, RIGHT["p"][0], WRONG, RIGHT["p"][0]], [RIGHT["p"][0], OTHER, OTHER, RIGHT["p"][0], OTHER]]
    told = [[framed(OTHER)] + [framed(g, v[1]) for g, v in zip(s, variants[1:-1], strict=True)] for s in said]
    told = [by_id + [framed(RIGHT["r"][0])] for by_id in told]
    q_halt = np.arange(2 * len(told[0]), dtype=np.float32).reshape(2, -1) / 10
    np.savez(run_dir / "told.npz", predicted=np.asarray(told, np.int32), q_halt=q_halt)
    (run_dir / "experiment.gin").write_text(EXPERIMENT.format(told=run_dir / "told.npz", data=directory))
    config = loader.load(str(run_dir / "experiment.gin"))
    (run_dir / "config.gin").write_text(config.text)
    save(config, str(run_dir))
    return run_dir


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command line in this process, whose 16 devices play a v4-32; gives its exit code and what it said."""
    monkeypatch.setenv("RENGA_SIMULATE", "v4-32")
    monkeypatch.setattr(cluster, "join", lambda slice_, *, limits: HOST)

    def run(*argv):
        trusted = ["--gin", "import parrot"] if argv[0] == "evaluate" and importlib.util.find_spec("parrot") else []
        code = cli.main([*map(str, argv), *trusted])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def one_host(monkeypatch):
    """The 4 chips of a v4-8 instead of 16."""
    chips = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: chips)


def framed(grid, variant=None):
    grid = np.asarray(grid)
    return arc_grids.frame(variant.apply(grid) if variant else grid)


def save(config, run_dir):
    """A checkpoint for each turn of the parrot."""
    run = prepared_run.prepare_run(config.build(), config=config, revision="", run_dir=run_dir, last_step=2, host=HOST)
    checkpoints = Checkpoints(run.checkpoint_dir, keep=3)
    state = run.program.init()
    for turn in range(2):
        params = jax.tree.map(lambda x: jax.device_put(np.full(1, turn, np.float32), x.sharding), state.params)  # noqa: B023
        saved = state._replace(params=params, step=state.step + turn + 1)
        checkpoints.save(turn + 1, state=saved, data={}, meta=json.loads(json.dumps(run.meta)))
    checkpoints.close()
