"""Logical axes: recording while a model is traced, conversion by a table, and errors."""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from core import logical
from core.logical import Axes
from core.parameters import ParamSpec

RULES = {**dict.fromkeys(logical.LOGICAL_AXES), "batch": ("data", "fsdp"), "mlp": "tensor", "embed": "fsdp"}


@pytest.fixture(scope="module")
def mesh():
    grid = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def traced_spec(mesh, shape, *names, rules=RULES):
    """The layout that `constrain` asks for, read from the jaxpr."""
    with jax.set_mesh(mesh), logical.sharding_rules(rules, rules):
        jaxpr = jax.make_jaxpr(lambda x: logical.constrain(x, *names))(jax.ShapeDtypeStruct(shape, jnp.float32))
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    return equation.params["sharding"].spec


ROWS = {"data", "fsdp"}


@pytest.mark.parametrize(
    ("stored", "computed", "manual", "kept"),
    [
        ("fsdp", "fsdp", ROWS, "fsdp"),
        (("fsdp", "data"), "fsdp", ROWS, "fsdp"),
        (("fsdp", "data"), ("fsdp", "data"), {"data"}, "data"),
        (("data", "fsdp"), "fsdp", ROWS, None),  # the shards of a chip would not be successive
        ("fsdp", ("data", "fsdp"), {"fsdp"}, None),  # as with both axes manual
        ("fsdp", ("data", "fsdp"), ROWS, None),
        (None, "fsdp", ROWS, None),
        ("tensor", "tensor", {*ROWS, "tensor"}, None),  # shards no rows
        ("fsdp", "fsdp", (), None),
    ],
)
def test_exchanged_parameters_stay_sharded_as_their_activations(stored, computed, manual, kept):
    tables = ({**RULES, "expert": stored}, {**RULES, "expert": computed})
    assert logical.kept_spec(Axes(("expert", "norm"), exchanged=True), *tables, manual) == PartitionSpec(kept, None)
    assert logical.kept_spec(Axes(("expert", "norm")), *tables, manual) == PartitionSpec(None, None)


def test_exchanged_parameters_need_a_layer_that_exchanges():
    with pytest.raises(ValueError, match=r"logical\.named, '\*': exchanged = True needs logical\.param"):
        logical.named(lambda: None, {"*": ParamSpec(("expert", "embed"), exchanged=True)})


@pytest.mark.covers("M11", "M15")
def test_a_table_turns_names_into_a_spec(mesh):
    assert logical.partition_spec(Axes(("batch", None, "mlp")), RULES) == PartitionSpec(
        ("data", "fsdp"), None, "tensor"
    )
    assert logical.partition_spec(Axes(("layers", "head_dim")), RULES) == PartitionSpec(None, None)
    kept = logical.partition_spec(Axes(("batch", "mlp")), RULES, keep=lambda axis: axis != "data")
    assert kept == PartitionSpec("fsdp", "tensor")
    assert traced_spec(mesh, (4, 6, 2), "batch", "length", "mlp") == PartitionSpec(("data", "fsdp"), None, "tensor")


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ({"batch": ("fsdp", "expert"), "expert": "expert"}, ("expert", "fsdp")),
        ({"batch": ("fsdp", "expert")}, (None, ("fsdp", "expert"))),
        ({"batch": "fsdp", "expert": "tensor"}, ("tensor", "fsdp")),
        ({"batch": None, "expert": "expert"}, ("expert", None)),
        ({"batch": "fsdp", "expert": "expert", "expert_batch": None}, ("expert", None)),
    ],
)
def test_rows_beside_experts_have_the_axes_that_experts_do_not_use(rules, want):
    found = logical.partition_spec(Axes(("expert", "expert_batch", None)), rules)
    assert found == PartitionSpec(*want, None)


def test_constrain_is_the_identity_without_a_strategy():
    x = jnp.ones((3, 5))
    assert logical.constrain(x, "batch", "mlp") is x
    assert logical.activation_spec("batch", "mlp") is None


@pytest.mark.covers("M11")
@pytest.mark.parametrize("order", [("fsdp", "tensor"), ("tensor", "fsdp")])
def test_a_jitted_function_follows_the_tables_in_force(mesh, order):
    """One function, one mesh, two tables: traced once for each."""
    traces = []

    @jax.jit
    def spread(x):
        traces.append(None)
        return logical.constrain(2 * x, "batch", None)

    for axis in (*order, *order, None):
        rules = {**RULES, "batch": axis}
        with jax.set_mesh(mesh), logical.sharding_rules(rules, RULES):
            assert spread(jnp.ones((4, 6))).sharding.spec == (PartitionSpec(axis) if axis else PartitionSpec())
    assert len(traces) == 3


def test_constrain_is_the_same_call_under_vmap_and_inside_a_manual_region(mesh):
    def per_stage(x):  # [B, F]
        return logical.constrain(x, "batch", "mlp")

    with jax.set_mesh(mesh), logical.sharding_rules({**RULES, "batch": "fsdp"}, RULES):
        x = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
        jaxpr = jax.make_jaxpr(jax.vmap(per_stage, spmd_axis_name="data"))(x)
        (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
        assert equation.params["sharding"].spec == PartitionSpec("data", "fsdp", "tensor")

        seen = []

        def manual(x):
            seen.append(logical.activation_spec("batch", "mlp"))
            return logical.constrain(x, "batch", "mlp")

        spec = PartitionSpec("tensor")
        whole = jax.shard_map(manual, in_specs=spec, out_specs=spec, axis_names={"tensor"})
        values = jnp.arange(24.0).reshape(4, 6)
        np.testing.assert_array_equal(jax.jit(whole)(values), values)
        assert seen[0] == PartitionSpec("fsdp", None)  # tensor is manual there, so it takes no part


@pytest.mark.covers("M05")
@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((4, 6), ("batch", "embedd"), r"unknown logical axis 'embedd'; did you mean embed\?"),
        ((4, 6), ("batch",), r"1 names \('batch',\) for an array of shape \(4, 6\)"),
        ((6, 6), ("batch", None), r"shape \(6, 6\): batch = 6 does not divide over .*= 4; .*: 4, 8"),
        ((4, 6), ("batch", "embed"), r"array \(batch, embed\): mesh axis 'fsdp' is used twice, by 'batch' and by 'emb"),
    ],
)
def test_constrain_refuses(mesh, shape, names, message):
    with jax.set_mesh(mesh), logical.sharding_rules(RULES, RULES), pytest.raises(ValueError, match=message):
        logical.constrain(jnp.ones(shape), *names)


def test_a_table_without_a_row_is_refused():
    with pytest.raises(ValueError, match=r"array \(batch, mlp\): the table has no row for logical axis 'mlp'"):
        logical.partition_spec(Axes(("batch", "mlp")), {"batch": None})


def zeros(shape, dtype):
    return jnp.zeros(shape, dtype)


def initialize(function):
    return lambda rng: hk.transform(function).init(rng)


KEY = jax.random.key(0)


class Dense(hk.Module):
    def __call__(self):
        w = logical.param("w", (3, 5), ("embed", "mlp"), zeros, compute_dtype=jnp.bfloat16)
        return w, logical.param("b", (5,), ("mlp",), zeros)


def test_axes_are_recorded_at_every_trace_and_equal_the_shapes():
    init = initialize(lambda: Dense(name="ffn")())
    for _ in range(2):  # a cached trace would record nothing the second time
        shapes, specs = logical.abstract_init(init, KEY)
        assert {k: v.shape for k, v in shapes["ffn"].items()} == {"w": (3, 5), "b": (5,)}
        assert specs == {"ffn": {"w": ParamSpec(("embed", "mlp")), "b": ParamSpec(("mlp",))}}
        assert logical.axes_of(specs) == {"ffn": {"w": Axes(("embed", "mlp")), "b": Axes(("mlp",))}}
    assert str(Axes(("embed", None))) == "(embed, -)"


def test_a_parameter_is_stored_wide_and_computed_narrow():
    network = hk.transform(lambda: Dense()())
    params = network.init(KEY)
    assert jax.tree.map(lambda a: a.dtype, params) == {"dense": {"w": jnp.float32, "b": jnp.float32}}
    w, b = network.apply(params, None)
    assert (w.dtype, b.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.covers("M05")
def test_parameters_are_refused_by_name():
    def of(shape, axes):
        return initialize(lambda: logical.param("w", shape, axes, zeros))

    with pytest.raises(ValueError, match=r"parameter ~/w: unknown logical axis 'head'; did you mean heads\?"):
        logical.abstract_init(of((2,), ("head",)), KEY)
    with pytest.raises(ValueError, match=r"parameter ~/w: 1 axes \('embed',\) for shape \(2, 3\)"):
        logical.abstract_init(of((2, 3), ("embed",)), KEY)

    def unnamed():
        logical.param("named", (2,), ("embed",), zeros)
        hk.Linear(4, name="head")(jnp.ones((1, 3)))

    with pytest.raises(
        ValueError, match=r"named axes: head/b \[4\], head/w \[3, 4\]; make them with logical.param"
    ) as error:
        logical.abstract_init(initialize(unnamed), KEY)
    assert "named [2]" not in str(error.value)


def test_a_model_freezes_parameters_and_stores_them_narrow():
    def init(rng):
        return logical.frozen(initialize(lambda: Dense(name="ffn")())(rng), ["ffn/w"], "bfloat16")

    shapes, specs = logical.abstract_init(init, KEY)
    assert specs["ffn"]["w"] == ParamSpec(("embed", "mlp"), "matrix", trainable=False, dtype="bfloat16")
    assert specs["ffn"]["b"] == ParamSpec(("mlp",))
    params = init(KEY)
    assert jax.tree.map(lambda a: a.dtype, params) == {"ffn": {"w": jnp.bfloat16, "b": jnp.float32}}
    assert jax.tree.map(lambda a: a.dtype, shapes) == jax.tree.map(lambda a: a.dtype, params)
    w, _ = hk.transform(lambda: Dense(name="ffn")()).apply(params, None)
    assert w.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"frozen = \('head/\*',\): no parameter matches 'head/\*'; .* ffn/w"):
        logical.frozen(params, ["head/*"])


NAMES = {"mlp/up/w": ("embed", "mlp"), "*/w": ("mlp", "embed"), "*b": ("embed",)}


def test_stock_modules_get_the_axes_of_the_first_pattern_that_matches():
    class MLP(hk.Module):
        def __call__(self, x):
            x = hk.Linear(6, with_bias=False, name="up")(x)
            return hk.Linear(3, name="down")(x) + logical.param("shift", (3,), ("norm",), zeros).astype(x.dtype)

    net = hk.transform(logical.named(lambda x: MLP(name="mlp")(x), NAMES))
    x = jnp.ones((2, 3), jnp.bfloat16)
    shapes, specs = logical.abstract_init(net.init, KEY, x)
    assert specs == {
        "mlp": {"shift": ParamSpec(("norm",))},
        "mlp/up": {"w": ParamSpec(("embed", "mlp"))},
        "mlp/down": {"w": ParamSpec(("mlp", "embed")), "b": ParamSpec(("embed",))},
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    params = net.init(KEY, x)
    assert net.apply(params, None, x).dtype == jnp.bfloat16


def test_weights_of_stock_modules_are_cast_and_then_laid_out(mesh):
    net = hk.without_apply_rng(
        hk.transform(logical.named(lambda x: hk.Linear(6, name="up")(x), {"up/w": ("embed", "mlp"), "up/b": ("mlp",)}))
    )
    x = jnp.ones((4, 8), jnp.bfloat16)
    params = net.init(KEY, x)
    with jax.set_mesh(mesh), logical.sharding_rules({**RULES, "embed": None}, RULES):
        text = str(jax.make_jaxpr(net.apply)(params, x))
    assert re.search(r"bf16\[8,6\] = convert_element_type.*\n.*bf16\[8,6\] = sharding_constraint", text), text


STATE = r"{}.* has Haiku state, such as the means of .* Normalize over one row at a time \(hk\.LayerNorm"


@pytest.mark.parametrize(
    ("names", "module", "message"),
    [
        (
            {"*/w": ("embed", "mpl")},
            lambda x: hk.Linear(6)(x),
            r"logical\.named, '\*/w': unknown logical axis 'mpl'; did you mean mlp",
        ),
        ({"*": ("mlp",)}, lambda x: hk.Linear(6)(x), r"linear/w has shape \(3, 6\), but its axes are \(mlp\)"),
        ({"*": ("norm",)}, lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True), STATE.format("batch_norm")),
        ({"*": ("norm",)}, lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=False), STATE.format("batch_norm")),
        ({"*": ("norm",)}, lambda x: hk.ExponentialMovingAverage(0.9)(x), STATE.format("exponential_moving_average/")),
        (
            {"*/w": (None,) * 4},
            lambda x: hk.nets.ResNet18(5)(jnp.ones((2, 8, 8, 3)), is_training=False),
            STATE.format("initial_batchnorm"),
        ),
    ],
    ids=["axis", "rank", "state in training", "state in evaluation", "average", "ResNet"],
)
def test_stock_modules_are_refused_with_the_fix(names, module, message):
    with pytest.raises(ValueError, match=message):
        logical.abstract_init(hk.transform(logical.named(module, names)).init, KEY, jnp.ones((2, 3)))


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setattr(logical, "_declared", {})
    logical.declare("patches", "patches of an image")
    logical.declare("rows_of_a_table", "rows of a table", mesh_axis="tensor")


@pytest.mark.usefixtures("declared")
def test_a_declared_axis_without_a_row_is_replicated_or_shards_over_its_mesh_axis():
    logical.declare("patches", "patches of an image")  # a module may be imported twice
    assert logical.partition_spec(Axes(("batch", "patches")), RULES) == PartitionSpec(("data", "fsdp"), None)
    own = {**RULES, "patches": "tensor"}
    assert logical.partition_spec(Axes(("batch", "patches")), own) == PartitionSpec(("data", "fsdp"), "tensor")
    assert logical.row(RULES, "rows_of_a_table") == "tensor"
    assert logical.row(dict.fromkeys(RULES), "rows_of_a_table") is None
    assert logical.row({**RULES, "rows_of_a_table": None}, "rows_of_a_table") is None
    logical.check_names(["patches", None], where="x")
    with pytest.raises(ValueError, match="x: unknown logical axis 'patchs'; did you mean patches"):
        logical.check_names(["patchs"], where="x")
    without = {name: axes for name, axes in RULES.items() if name != "mlp"}
    with pytest.raises(ValueError, match="the table has no row for logical axis 'mlp'"):
        logical.partition_spec(Axes(("mlp",)), without)


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize(
    ("name", "meaning", "says"),
    [
        ("patches", "something else", "'patches' already means 'patches of an image'"),
        ("batch", "mine", "'batch' already means 'rows of the global batch'"),
        ("Two words", "mine", "expected a lower-case identifier and its meaning"),
        ("mine", "", "expected a lower-case identifier and its meaning"),
    ],
)
def test_an_axis_has_one_meaning(name, meaning, says):
    with pytest.raises(ValueError, match=says):
        logical.declare(name, meaning)


@pytest.mark.usefixtures("declared")
def test_an_axis_is_sharded_like_another_one():
    logical.declare("latent", "numbers of a compressed key", like="embed")
    logical.declare("latent", "numbers of a compressed key", like="embed")  # as a second import does
    assert logical.row(RULES, "latent") == RULES["embed"]
    assert logical.row({**RULES, "latent": None}, "latent") is None
    for options, says in (
        ({"like": "mlp"}, "'latent' is .*like='embed'.*now .*like='mlp'"),
        ({"like": "embed", "mesh_axis": "tensor"}, "declare it once, or equally"),
    ):
        with pytest.raises(ValueError, match=says):
            logical.declare("latent", "numbers of a compressed key", **options)
    with pytest.raises(ValueError, match="mesh_axis = 'tensor' and like = 'embed': give one of them"):
        logical.declare("other", "mine", like="embed", mesh_axis="tensor")
    with pytest.raises(ValueError, match="like of 'other': unknown logical axis 'embd'; did you mean embed"):
        logical.declare("other", "mine", like="embd")


def test_an_unknown_axis_says_how_to_declare_it():
    with pytest.raises(
        ValueError, match=r"'ffn'; expected one of batch, .*: logical\.declare\('ffn', 'what it counts'\)"
    ):
        logical.check_names(["ffn"], where="x")
