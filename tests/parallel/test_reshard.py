"""A checkpoint written under a strategy restores under others, bit for bit, on any number of hosts."""

import json

import jax
import numpy as np
import pytest

from core.checkpoints.store import Checkpoints
from models.agreement_subjects import MODELS, batches_for
from parallel.verify.agreement import EXAMPLES
from tests.lab.subjects import bind


@pytest.mark.covers("C07")
@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        pytest.param("transformer", "zero1", "context", marks=pytest.mark.slow),
        (
            "transformer",
            "fsdp",
            "pipeline_fsdp_tensor",
        ),  # circular: layers run in another order than they are stored in
        pytest.param("transformer", "tensor", "fsdp", marks=pytest.mark.slow),
        pytest.param("transformer", "sequence_tensor", "multislice", marks=pytest.mark.slow),
        pytest.param("transformer", "hsdp", "tensor", marks=pytest.mark.slow),
        pytest.param("trm", "tensor", "zero1", marks=pytest.mark.slow),  # as of the transformer
        pytest.param("trm", "fsdp", "mesh3d", marks=pytest.mark.slow),
    ],
)
def test_a_state_is_bit_equal_under_another_strategy(kind, source, target, tmp_path):
    model = MODELS[kind]
    batch = next(batches_for(model, steps=1))
    first = bind(model, EXAMPLES[source], batch)
    rng = np.random.default_rng(0)
    written = jax.tree.map(  # no two entries need be equal, and moments are not zero
        lambda s: jax.device_put((100 * rng.random(s.shape)).astype(s.dtype), s.sharding), first.abstract_state
    )
    saved = Checkpoints(str(tmp_path), keep=1)
    saved.save(1, state=written, data={}, meta={})
    saved.close()
    reader = Checkpoints(str(tmp_path), keep=1, read_only=True)
    program = bind(model, EXAMPLES[target], batch)
    restored, _, _ = reader.restore(1, program.abstract_state)
    jax.tree.map(
        lambda a, layout: a.sharding.is_equivalent_to(layout, a.ndim) or pytest.fail(str(a.sharding)),
        restored,
        program.state_shardings,
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(written))


HEAD = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = str(16 // HOSTS)
import jax
from core.hosts import distributed
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS,
                       local_cpu_devices=16 // HOSTS, single_process=False)
from core.checkpoints.store import Checkpoints
from tests.lab.subjects import bind
from models.agreement_subjects import MODELS, batches_for
from parallel.verify import agreement
from parallel.verify.agreement import EXAMPLES
MODEL = MODELS[KIND]
BATCHES = list(batches_for(MODEL, steps=2))
SPREAD = {name: EXAMPLES[name] for name in NAMES}

def rows(program, batch):
    mine = list(program.partitioner.data_layout(len(batch["inputs"])).rows)
    return program.put({k: a[mine] for k, a in batch.items()})

def hashes(program, state):
    whole = agreement.gather_to_hosts(program, state)
    return [hash(a.tobytes()) for a in jax.tree.leaves(whole)]
"""
WRITE = (
    HEAD
    + """
for name, example in SPREAD.items():
    program = bind(MODEL, example, BATCHES[0])
    state, _ = program.train_step(program.init(), rows(program, BATCHES[0]))
    checkpoints = Checkpoints(f"{FOLDER}/{name}", keep=1)
    checkpoints.save(1, state=state, data={}, meta={"hashes": hashes(program, state)})
    checkpoints.close()
    _, metrics = program.train_step(state, rows(program, BATCHES[1]))
    if PROCESS == 0:
        print(json.dumps({"name": name, "next_loss": float(metrics["loss"])}), flush=True)
"""
)
READ = (
    HEAD
    + """
for source, target in PAIRS:
    program = bind(MODEL, EXAMPLES[target], BATCHES[0])
    checkpoints = Checkpoints(f"{FOLDER}/{source}", keep=1, read_only=True)
    state, _, meta = checkpoints.restore(1, program.abstract_state)
    equal = hashes(program, state) == meta["hashes"]
    _, metrics = program.train_step(state, rows(program, BATCHES[1]))
    checkpoints.close()
    if PROCESS == 0:
        row = {"source": source, "target": target, "equal": equal, "loss": float(metrics["loss"])}
        print(json.dumps(row), flush=True)
"""
)


def said(results):
    assert all(r.returncode == 0 for r in results), results[0].output[-3000:]
    return [json.loads(line) for line in results[0].output.splitlines() if line.startswith("{")]


SPREAD = [name for name, example in EXAMPLES.items() if example.slice != "v4-8"]  # those that use all 16 devices
PIPELINES = [name for name in SPREAD if EXAMPLES[name].strategy.pipeline]
TABLES = [name for name in SPREAD if name not in PIPELINES]
GROUPS = {
    "tables": ("transformer", TABLES),
    "pipelines": ("transformer", ["fsdp", *PIPELINES]),
    "recursive": ("trm", TABLES),  # no pipeline can hold it
}


READERS = (1, 2, 4)


@pytest.mark.slow
@pytest.mark.simulated(4)
@pytest.mark.parametrize("group", GROUPS)
def test_every_strategy_is_read_and_reads_on_other_hosts(run_hosts, tmp_path, monkeypatch, group):
    """Four hosts write under each strategy; the next one reads, on 1, 2 or 4 hosts.

    Bytes are equal, and the next loss is what it would have been.
    """
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    kind, names = GROUPS[group]
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    folder = f"FOLDER, KIND, NAMES = {str(tmp_path / 'runs')!r}, {kind!r}, {names!r}\n"
    losses = {row["name"]: row["next_loss"] for row in said(run_hosts(folder + WRITE, hosts=4, timeout=1800))}
    assert sorted(losses) == sorted(names)
    for index, readers in enumerate(READERS):
        asked = pairs[index :: len(READERS)]
        found = said(run_hosts(f"{folder}PAIRS = {asked!r}\n{READ}", hosts=readers, timeout=1200))
        assert [(row["source"], row["target"]) for row in found] == asked
        assert [row for row in found if not row["equal"]] == []
        for row in found:
            np.testing.assert_allclose(row["loss"], losses[row["source"]], atol=1e-5, rtol=0, err_msg=str(row))
