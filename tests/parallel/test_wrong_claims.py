"""Common mistakes about TPU slices, mostly from counting cores, are refused with the correct number.

One row for each belief. No device is looked at: asking JAX for one ends the test.
"""

import math
import re

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from core import logical, optimizers, slices
from core.hosts import distributed
from core.logical import Axes
from launch.experiment import padding
from launch.hosts import cluster
from models.decoder.transformer import Transformer
from parallel import mesh, strategies, strategy
from parallel.compiled import report
from parallel.partitioner import Partitioner
from parallel.strategies import REPLICATED, Strategy
from tasks import streams

SPLIT = {**REPLICATED, "batch": ("data", "fsdp"), "embed": "fsdp", "mlp": "tensor"}
ADAMW = optimizers.adamw(learning_rate=optimizers.constant(1e-3))


@pytest.fixture(autouse=True)
def no_devices(monkeypatch):
    def refuse(*_):
        raise AssertionError("a device was asked for")

    for name in ("devices", "local_devices", "device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, refuse)
    monkeypatch.setattr(distributed, "initialize", refuse)


def of(mesh_shape, *, params=None, activations=None, **options):
    return Strategy(
        name="mine",
        mesh_shape=mesh_shape,
        param_rules=SPLIT | (params or {}),
        activation_rules=SPLIT | (activations or {}),
        **options,
    )


MESHES = [  # slice, mesh, one of the nearest that fit
    ("v4-8", {"data": 8}, "data 4"),
    ("v4-32", {"data": 4, "fsdp": 4, "tensor": 2}, "data 4 x fsdp 2 x tensor 2"),
    ("v4-32", {"data": 4, "fsdp": 2, "tensor": 4}, "data 4 x fsdp 2 x tensor 2"),
    ("v4-32", {"data": 32}, "data 16"),
    ("v4-32", {"fsdp": -1, "tensor": 3}, "fsdp -1 x tensor 2"),
    ("v4-64", {"data": 64}, "data 32"),
    ("v4-64", {"data": 8, "fsdp": 8}, "data 4 x fsdp 8"),
    ("v5p-16", {"fsdp": 16}, "fsdp 8"),
    ("v5p-128", {"fsdp": 128}, "fsdp 64"),
    ("v5p-128", {"data": 8, "fsdp": 16}, "data 8 x fsdp 8"),
    ("v5p-128", {"data": 4, "tensor": 32}, "data 4 x tensor 16"),
]


@pytest.mark.covers("R08", "M05")
@pytest.mark.parametrize(("name", "mesh_shape", "nearest"), MESHES)
def test_a_mesh_of_another_size(name, mesh_shape, nearest):
    chips = slices.get(name).devices
    with pytest.raises(ValueError, match=rf"but {name} has {chips} \({chips} chips?\)") as error:
        strategy.resolve(of(mesh_shape), slices.get(name))
    fits = str(error.value).split("Nearest that fit: ")[1].split("; ")
    assert nearest in fits
    for fit in fits:  # every suggestion is accepted
        shape = {axis: int(degree) for axis, degree in re.findall(r"(\w+) (-?\d+)", fit)}
        assert math.prod(strategy.resolve(of(shape), slices.get(name)).values()) == chips


@pytest.mark.covers("R08")
def test_hosts_of_one_slice_joined_by_the_data_center_network():
    wrong = of({"data": 1, "fsdp": 4}, dcn_shape={"data": 8})
    with pytest.raises(
        ValueError,
        match=r"spans 8 slices, but v4-64 has 1\. Use .* such as fsdp\. .* leave dcn_shape empty: ICI connects",
    ):
        strategy.resolve(wrong, slices.get("v4-64"))


HOSTS = [  # slice, the number of hosts believed, the number it has
    ("v4-8", 2, 1),
    ("v4-32", 2, 4),
    ("v4-32", 8, 4),
    ("v4-64", 4, 8),
    ("v5p-16", 1, 2),
    ("v5p-32", 2, 4),
    ("v5p-64", 4, 8),
    ("v5p-128", 8, 16),
    ("v5p-256", 16, 32),
    ("v5p-512", 32, 64),
    ("v5p-1024", 64, 128),
]


@pytest.mark.covers("R03", "R08")
@pytest.mark.parametrize(("name", "believed", "hosts"), HOSTS)
def test_another_number_of_hosts(name, believed, hosts, monkeypatch):
    monkeypatch.delenv("RENGA_SIMULATE", raising=False)
    monkeypatch.setenv("JAX_PROCESS_COUNT", str(believed))
    monkeypatch.setenv("JAX_PROCESS_INDEX", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    says = rf"JAX_PROCESS_COUNT={believed}, but {name} has {hosts} hosts? with 4 chips each: set {hosts}"
    with pytest.raises(ValueError, match=says):
        cluster.join(slices.get(name))


@pytest.mark.covers("M05")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of({"model": 4}), "mesh_shape: unknown mesh axis 'model'; call it 'tensor'"),
        (
            lambda: of({}, activations={"batch": PartitionSpec("data", "fsdp")}),
            r"batch -> P\('data', 'fsdp'\) has 2 dimensions, but a row describes one dimension: .* \('data', 'fsdp'\) "
            "to shard",
        ),
        (
            lambda: of({}, params={"embed": PartitionSpec("fsdp", None, "tensor")}),
            "param_rules: embed -> .* has 3 dimensions",
        ),
        (
            lambda: of({"data": 2}, params={"batch": None}, activations={"batch": "fsdp"}),
            "data = 2, but no rule uses 'data'",
        ),
    ],
    ids=["axis model", "two dimensions", "three dimensions", "idle axis"],
)
def test_tables(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def fit(shape, axes):
    leaf = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return strategy.specs(leaf, {"w": Axes(axes)}, SPLIT, mesh_shape={"data": 2, "fsdp": 4, "tensor": 2}, where="mine")


@pytest.mark.covers("M05")
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: fit((8, 4), ("layers", "embed", "mlp")),
            r"w: shape \(8, 4\), axes .*: 2 dimensions, but its axes name 3",
        ),
        (lambda: fit((8,), ("embed", "mlp")), r"w: shape \(8,\), axes .*: 1 dimensions, but its axes name 2"),
        (lambda: fit((6, 4), ("embed", "mlp")), "embed = 6 does not divide over fsdp = 4. Degrees that do: 1, 2;"),
        (lambda: fit((8, 8), ("embed", "embed")), "mesh axis 'fsdp' is used twice, by 'embed' and by 'embed'"),
        (
            lambda: logical.constrain(jnp.ones((8, 4)), "batch", "length", "embed"),
            r"constrain: 3 names .* for an array of shape \(8, 4\)",
        ),
        (
            lambda: jax.eval_shape(
                hk.transform(lambda: logical.param("w", (8, 4), ("layers", "embed", "mlp"), jnp.ones)).init,
                jax.random.key(0),
            ),
            r"parameter ~/w: 3 axes \('layers', 'embed', 'mlp'\) for shape \(8, 4\)",
        ),
    ],
    ids=["rank 3 on a matrix", "rank 2 on a vector", "no divisor", "one axis twice", "activation", "parameter"],
)
def test_specs(use, message):
    with pytest.raises(ValueError, match=message):
        use()


TINY = {"vocab_size": 64, "num_layers": 1, "embed_dim": 16, "mlp_dim": 16, "num_heads": 4, "num_kv_heads": 4}


def bind(tables, slice_name="v4-8", *, rows=4, accum_steps=1, **changes):
    model = Transformer(**{**TINY, "vocab_multiple": 16, **changes})
    spec = streams.batch_spec(rows, length=8)
    slice_ = slices.get(slice_name)
    bound = Partitioner(tables, slice=slice_, devices=mesh.topology_devices(slice_))
    return bound.program(model, ADAMW, spec, seed=0, accum_steps=accum_steps)


def refused(*args, **options):
    with pytest.raises(ValueError) as error:
        bind(*args, **options)
    return str(error.value)


BATCHES = [  # slice, rows, microbatches, groups of chips, nearest
    ("v4-8", 6, 1, 4, "4, 8"),
    ("v4-8", 12, 2, 4, "8, 16"),
    ("v4-64", 500, 1, 32, "480, 512"),
    ("v4-64", 8, 1, 32, "32"),
    ("v5p-128", 128 + 4, 1, 64, "128, 192"),
]


@pytest.mark.covers("D01", "M05")
@pytest.mark.parametrize(("name", "rows", "accum_steps", "groups", "nearest"), BATCHES)
def test_a_batch_that_does_not_divide(name, rows, accum_steps, groups, nearest):
    text = refused(strategies.data_parallel(), name, rows=rows, accum_steps=accum_steps)
    microbatches = f" in accum_steps = {accum_steps} microbatches" if accum_steps > 1 else ""
    assert f"batch_size = {rows} does not divide{microbatches} over {groups} groups of chips" in text
    assert f"(strategy 'data_parallel' on {name}). Nearest that do: {nearest}" in text


BY_FOUR = strategies.fsdp_tensor(tensor=4)


@pytest.mark.covers("M05", "M14")
def test_a_vocabulary_of_50257_over_tensor_4_is_stored_rounded_up_and_says_so():
    bound = bind(BY_FOUR, vocab_size=50257, vocab_multiple=128)
    shapes = {row.path: row.shape for row in report.rows(bound)}
    assert shapes["params/embedding"] == (50304, 16)
    assert padding(bound) == "; vocabulary 50,257 stored as 50,304"
    assert padding(bind(BY_FOUR, vocab_multiple=16)) == ""
    text = refused(BY_FOUR, vocab_size=50257, vocab_multiple=1)
    assert "vocab = 50257 does not divide over tensor = 4. Degrees that do: 1; or store it rounded up to 50260" in text


@pytest.mark.covers("M05")
def test_two_key_heads_over_tensor_4_and_everything_else_that_does_not_fit():
    text = refused(BY_FOUR, embed_dim=24, mlp_dim=10, num_kv_heads=2)
    assert "strategy 'fsdp_tensor' on v4-8, param_rules does not fit" in text
    assert "layers/block/key: shape (1, 24, 2, 6), axes (layers, embed, kv_heads, head_dim): kv_heads = 2 does" in text
    assert "Degrees that do: 1, 2;" in text
    assert "override(strategy, {'kv_heads': None})" in text
    assert "layers/block/down: shape (1, 10, 24), axes (layers, mlp, embed): mlp = 10 does not divide" in text
    assert text.count("mlp = 10 does not divide over tensor = 4") == 1
    assert "(also layers/block/gate, layers/block/up)" in text
    assert "layers/block/query" not in text


@pytest.mark.covers("M05", "M11")
def test_a_computation_that_the_table_does_not_fit():
    stored_whole = strategies.override(BY_FOUR, param_rules={"kv_heads": None})
    text = refused(stored_whole, num_kv_heads=2)
    assert "strategy 'fsdp_tensor' on v4-8, computation: activation (embed, kv_heads, head_dim) of shape" in text
    assert "(16, 2, 4): kv_heads = 2 does not divide over tensor = 4; nearest sizes that do: 4;" in text
    assert "activation_rules={'kv_heads': None}" in text
    bind(strategies.override(stored_whole, activation_rules={"kv_heads": None}), num_kv_heads=2)


@pytest.mark.covers("M08")
def test_sharded_optimizer_state_leaves_scalars_and_vectors_whole():
    bound = bind(strategies.zero1())
    for row in report.rows(bound):
        if row.path.startswith("opt_state/"):
            assert row.replicated == (len(row.shape) == 0 or "norm" in row.path), row
