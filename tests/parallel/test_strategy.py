"""Tables that cannot be right are refused before a device is looked at, with the number that is right."""

import dataclasses
import math

import pytest

from core import logical, slices
from parallel import strategies, strategy
from parallel.strategies import REPLICATED, Strategy

SPLIT = {**REPLICATED, "batch": ("data", "fsdp"), "embed": "fsdp", "mlp": "tensor"}


def of(mesh_shape, *, params=None, activations=None, **options):
    return Strategy(
        name="mine",
        mesh_shape=mesh_shape,
        param_rules=SPLIT | (params or {}),
        activation_rules=SPLIT | (activations or {}),
        **options,
    )


SHIPPED = {
    "data_parallel": strategies.data_parallel(),
    "fsdp": strategies.fsdp(),
    "fsdp_tensor": strategies.fsdp_tensor(tensor=4),
}


@pytest.mark.covers("M15")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables_list_every_axis_and_nothing_else(name):
    table = SHIPPED[name]
    assert table.name == name
    for rules in (table.param_rules, table.activation_rules):
        assert set(rules) == set(logical.LOGICAL_AXES)
    assert table.stored_optimizer_rules is table.param_rules
    for slice_name in ("v4-8", "v4-32", "v5p-128"):
        shape = strategy.resolve(table, slices.get(slice_name))
        assert tuple(shape) == tuple(strategy.MESH_AXES)
        assert math.prod(shape.values()) == slices.get(slice_name).chips


def test_where_no_single_degree_helps_any_product_is_named():
    with pytest.raises(ValueError, match=r"mesh data 3 x fsdp 5 needs 15 devices.*any degrees whose product is 16"):
        strategy.resolve(of({"data": 3, "fsdp": 5}), slices.get("v4-32"))


@pytest.mark.covers("M01", "M04")
def test_every_factorisation_of_a_slice_is_a_mesh():
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
            lambda: of({"expert": 4}),
            "mesh_shape: unknown mesh axis 'expert'; expected one of stage, data, fsdp, sequence",
        ),
        (lambda: of({"data": 0}), "mesh_shape: data = 0; expected a positive number, or -1"),
        (lambda: of({"data": -1, "fsdp": -1}), "more than one -1 in .*; only one axis can take what is left"),
        (lambda: of({}, params={"mpl": "tensor"}), "param_rules: unknown logical axis 'mpl'; did you mean mlp?"),
        (lambda: of({}, activations={"batch": "dp"}), "activation_rules: batch -> unknown mesh axis 'dp'; expected"),
        (lambda: of({}, optimizer_rules={"embed": "data"}), "optimizer_rules: no row for batch, length, .*REPLICATED"),
        (lambda: of({"stage": 2}), "stage = 2, but no rule uses 'stage': those chips would repeat each other's work"),
        (lambda: of({"tensor": -1}, params={"mlp": None}, activations={"mlp": None}), "but no rule uses 'tensor'"),
    ],
)
def test_tables_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_everything_wrong_is_said_at_once():
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
