"""Invalid tables are refused before any device is used, with the correct number."""

import dataclasses
import math

import jax
import pytest
from jax.sharding import PartitionSpec

from core import identity, logical, slices
from parallel import partitioner, strategies, strategy
from parallel.strategies import REPLICATED, Strategy
from parallel.verify.agreement import EXAMPLES

SPLIT = {**REPLICATED, "batch": ("data", "fsdp"), "embed": "fsdp", "mlp": "tensor"}


def of(mesh_shape, *, params=None, activations=None, **options):
    return Strategy(
        name="mine",
        mesh_shape=mesh_shape,
        param_rules=SPLIT | (params or {}),
        activation_rules=SPLIT | (activations or {}),
        **options,
    )


@pytest.mark.covers("M15")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_shipped_table_is_named_after_what_makes_it_and_fills_its_slice(name):
    table, slice_ = EXAMPLES[name].strategy, slices.get(EXAMPLES[name].slice)
    assert table.name == name.removesuffix("_ring")  # an argument of the same constructor
    constructor = table.name.removesuffix("_overlapped")
    assert getattr(strategies, constructor).__name__ == constructor
    shape = strategy.resolve(table, slice_)
    assert tuple(shape) == tuple(axis for axis in strategy.MESH_AXES if axis != "expert" or "experts" in name)
    assert math.prod(shape.values()) == slice_.devices


def test_only_zero1_stores_optimizer_state_otherwise_than_parameters():
    other = [n for n, e in EXAMPLES.items() if e.strategy.stored_optimizer_rules is not e.strategy.param_rules]
    assert other == ["zero1"]


@pytest.mark.covers("M01", "M04")
def test_every_factorization_of_a_slice_is_a_mesh():
    for data in (1, 2, 4, 8, 16):
        for fsdp in (d for d in (1, 2, 4, 8, 16) if 16 % (data * d) == 0):
            want = {"stage": 1, "data": data, "fsdp": fsdp, "sequence": 1, "tensor": 16 // (data * fsdp)}
            assert strategy.resolve(of(want), slices.get("v4-32")) == want
            assert strategy.resolve(of(want | {"tensor": -1}), slices.get("v4-32")) == want


@pytest.mark.covers("M05")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of({"model": 4}), "mesh_shape: unknown mesh axis 'model'; call it 'tensor'"),
        (
            lambda: of({"ring": 4}),
            "unknown mesh axis 'ring'; expected one of stage, data, fsdp, expert, sequence, tensor, or an axis of",
        ),
        (
            lambda: of({}, own_mesh_axes={"fsdp": "data"}),
            "own_mesh_axes: 'fsdp'; expected a lower-case identifier other",
        ),
        (
            lambda: of({}, own_mesh_axes={"ring": "fdsp"}),
            "own_mesh_axes: ring after 'fdsp'; expected one of stage, data",
        ),
        (lambda: of({"data": 0}), "mesh_shape: data = 0; expected a positive integer, or -1"),
        (lambda: of({"tensor": "4"}), "mesh_shape: tensor = '4'; expected a positive integer"),
        (lambda: of({"tensor": 4.0}), "mesh_shape: tensor = 4.0; expected a positive integer"),
        (lambda: of({"tensor": True}), "mesh_shape: tensor = True; expected a positive integer"),
        (lambda: of({}, dcn_shape={"data": -1}), r"dcn_shape: data = -1; expected a positive integer(?!,)"),
        (lambda: of({}, params={"embed": 3}), "param_rules: embed -> 3; expected None, a mesh axis, or a tuple"),
        (lambda: of({}, params={"embed": ("fsdp", "fsdp")}), "embed -> .'fsdp', 'fsdp'. names a mesh axis twice"),
        (
            lambda: Strategy(name="x", mesh_shape={}, param_rules=None, activation_rules={}),
            "param_rules = None; expected",
        ),
        (lambda: of({"data": -1, "fsdp": -1}), "more than one -1 in .*; only one axis can take the remaining chips"),
        (lambda: of({}, params={"mpl": "tensor"}), "param_rules: unknown logical axis 'mpl'; did you mean mlp?"),
        (lambda: of({}, activations={"batch": "dp"}), "activation_rules: batch -> unknown mesh axis 'dp'; expected"),
        (lambda: of({}, optimizer_rules={"embed": "data"}), "optimizer_rules: no row for batch, length, .*REPLICATED"),
        (lambda: of({"stage": 2}), "stage = 2, but no rule uses 'stage': its chips would do the same work"),
        (lambda: of(None), "mesh_shape = None; expected degrees of mesh axes, such as {'fsdp': -1}"),
        (
            lambda: of({"tensor": -1}, params={"mlp": None}, activations={"mlp": None}),
            "no rule uses 'tensor': its chips",
        ),
        (lambda: of({}, dcn_shape={"stage": 2}), "dcn_shape: stage = 2, but no rule uses 'stage': its chips"),
    ],
)
def test_tables_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        of({"dp": 2, "fsdp": 0}, params={"headz": None}, activations={"mlp": "mp"})
    text = str(error.value)
    assert text.startswith("strategy 'mine':")
    assert all(word in text for word in ("'dp'", "fsdp = 0", "'headz'", "did you mean heads", "'mp'"))


def test_override_replaces_rows_and_checks_again():
    whole = strategies.override(strategies.fsdp_tensor(tensor=4), param_rules={"kv_heads": None})
    assert whole.param_rules["kv_heads"] is None
    assert whole.activation_rules["kv_heads"] == "tensor"
    assert dataclasses.replace(whole, name="x").param_rules["heads"] == "tensor"
    with pytest.raises(ValueError, match="unknown mesh axis 'tensors'"):
        strategies.override(whole, activation_rules={"mlp": "tensors"})


def test_one_mapping_replaces_rows_of_all_tables(monkeypatch):
    """A declared axis is replicated by the tables of the library until one of them places it."""
    monkeypatch.setattr(logical, "_declared", {})
    with pytest.raises(
        ValueError, match=r"unknown logical axis 'depth'; .*logical\.declare\('depth', 'what it counts'\)"
    ):
        strategies.override(strategies.fsdp(), {"depth": "tensor"})
    logical.declare("depth", "planes of an image")
    logical.declare("expert", "experts of a mixture")
    weights = logical.Axes(("depth", "embed", None))
    for example in EXAMPLES.values():
        for table in (example.strategy.param_rules, example.strategy.activation_rules):
            assert logical.partition_spec(weights, table)[0] is None
    weights = logical.Axes(("expert", "embed", None))
    placed = strategies.override(strategies.fsdp_tensor(tensor=2), {"expert": "tensor"}, activation_rules={"mlp": None})
    assert logical.partition_spec(weights, placed.param_rules) == PartitionSpec("tensor", "fsdp", None)
    assert logical.partition_spec(weights, placed.activation_rules) == PartitionSpec("tensor", None, None)
    assert (placed.param_rules["mlp"], placed.activation_rules["mlp"]) == ("tensor", None)
    sharded = strategies.override(strategies.zero1(), {"expert": "data"})
    assert sharded.stored_optimizer_rules["expert"] == sharded.param_rules["expert"] == "data"
    with pytest.raises(ValueError, match="unknown logical axis 'experts'; did you mean expert"):
        strategies.override(placed, {"experts": "tensor"})
    with pytest.raises(ValueError, match="mesh axis 'tensor' is used twice, by 'expert' and by 'mlp'"):
        logical.partition_spec(logical.Axes(("expert", "embed", "mlp")), placed.param_rules)


def test_experts_and_axes_of_ones_own_have_their_place_in_the_mesh():
    rows = {"batch": ("fsdp", "ring", "expert")}
    tables = of({"ring": 2, "expert": 2, "fsdp": -1}, activations=rows, own_mesh_axes={"ring": "fsdp"})
    shape = {"stage": 1, "data": 1, "fsdp": 4, "ring": 2, "expert": 2, "sequence": 1, "tensor": 1}
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-32"), devices=jax.devices())
    assert list(bound.shape.items()) == list(shape.items())
    assert dict(bound.mesh.shape) == shape
    assert bound.row_shards == 16
    without_degree = of({"fsdp": -1}, activations={"batch": ("fsdp", "expert")})
    assert strategy.resolve(without_degree, slices.get("v4-32"))["expert"] == 1
    with pytest.raises(ValueError, match="ring = 2, but no rule uses 'ring'"):
        of({"ring": 2}, own_mesh_axes={"ring": "fsdp"})
    assert "own_mesh_axes" not in identity.of(strategies.fsdp())  # records of programs are found by it


@pytest.mark.parametrize(
    ("shape", "dcn_shape", "text"),
    [
        ({"data": 2, "fsdp": 16, "tensor": 1}, {"data": 2}, "data 2 (DCN) x fsdp 16"),
        ({"data": 4, "fsdp": -1}, {}, "data 4 x fsdp -1"),
        ({"data": 1, "fsdp": 1}, {}, "1 chip"),
    ],
)
def test_a_mesh_as_text(shape, dcn_shape, text):
    assert strategy.mesh_text(shape, dcn_shape=dcn_shape) == text
