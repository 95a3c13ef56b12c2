"""Adafactor, Lion and Muon: their formulas, separate layers of a stack, and the axes of their state."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, parameters, stack
from core.logical import Axes
from core.parameters import ParamSpec

LAYERS = 3
SHAPES = {
    "~": {"embedding": (12, 8), "final_norm": (8,)},
    "layers/block": {
        "query": (LAYERS, 8, 4, 2),
        "output": (LAYERS, 4, 2, 8),
        "up": (LAYERS, 8, 20),
        "mlp_norm": (LAYERS, 8),
    },
}
OF_A_LAYER = {
    "query": ParamSpec(("embed", "heads", "head_dim")),
    "output": ParamSpec(("heads", "head_dim", "embed"), in_dims=2),
    "up": ParamSpec(("embed", "mlp")),
    "mlp_norm": ParamSpec(("norm",)),
}
SPECS = {
    "~": {"embedding": ParamSpec(("vocab", "embed")), "final_norm": ParamSpec(("norm",))},
    "layers/block": {name: spec.in_stack("layers") for name, spec in OF_A_LAYER.items()},
}
RATE = optimizers.constant(0.5)
MAKE = {
    "adafactor": lambda **o: optimizers.adafactor(learning_rate=RATE, min_factored=4, **o),
    "lion": lambda **o: optimizers.lion(learning_rate=RATE, **o),
    "muon": lambda **o: optimizers.muon(learning_rate=RATE, **o),
}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {
        m: {n: rng.standard_normal(shape).astype(np.float32) for n, shape in leaves.items()}
        for m, leaves in SHAPES.items()
    }


def train(optimizer, params, grads, specs):
    optimizer = optimizer.bound(specs)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.transformation.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for g in grads:
        params, state = step(params, state, g)
    return params


def unstacked(tree):
    """Every layer as a module of its own: what the papers mean."""
    apart = {f"layer_{i}/block": {n: a[i] for n, a in tree["layers/block"].items()} for i in range(LAYERS)}
    return {"~": tree["~"]} | apart


@pytest.mark.covers("T07")
@pytest.mark.parametrize("name", MAKE)
def test_a_layer_of_a_stack_is_trained_as_if_it_were_alone(name):
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    optimizer = MAKE[name](weight_decay=0.1)
    stacked = train(optimizer, params, grads, SPECS)
    by_itself = {"~": SPECS["~"]} | {f"layer_{i}/block": OF_A_LAYER for i in range(LAYERS)}
    apart = train(optimizer, unstacked(params), [unstacked(g) for g in grads], by_itself)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), unstacked(stacked), apart)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_stacks_may_differ_in_depth_and_hold_experts(name):
    """Each expert of each layer is trained as if it were alone; the axis of experts is not that of the layers."""
    w, one = ParamSpec(("embed", "mlp")), np.random.default_rng(0).standard_normal((2, 3, 4, 6))
    specs = {
        "encoder": {"w": w.in_stack("layers"), "experts": w.in_stack("layers", "expert")},
        "decoder": {"w": w.in_stack("layers"), "experts": w.in_stack("expert")},
    }
    params = {"encoder": {"w": one[:, 0], "experts": one}, "decoder": {"w": one[0], "experts": one[0]}}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    updates = one_update(MAKE[name](**PLAIN), params, params, specs)
    alone = {f"{i}{j}": {"w": jnp.asarray(one[i, j], jnp.float32)} for i in range(2) for j in range(3)}
    wanted = one_update(MAKE[name](**PLAIN), alone, alone, {module: {"w": w} for module in alone})
    whole = np.stack([[wanted[f"{i}{j}"]["w"] for j in range(3)] for i in range(2)])
    want = {"encoder": {"w": whole[:, 0], "experts": whole}, "decoder": {"w": whole[0], "experts": whole[0]}}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), updates, want)


def one_update(optimizer, params, grads, specs=SPECS):
    optimizer = optimizer.bound(specs)
    return jax.jit(lambda g, p: optimizer.transformation.update(g, optimizer.init(p), p)[0])(grads, params)


PLAIN = {"clip_norm": None, "weight_decay": 0.0}


def test_lion_takes_the_sign_and_decays_all_but_norms():
    params, grads = random_tree(0), random_tree(1)
    updates = one_update(MAKE["lion"](clip_norm=None, weight_decay=0.1), params, grads)
    want = -0.5 * (np.sign(grads["~"]["embedding"]) + 0.1 * params["~"]["embedding"])
    np.testing.assert_allclose(updates["~"]["embedding"], want, rtol=1e-6)
    np.testing.assert_allclose(updates["~"]["final_norm"], -0.5 * np.sign(grads["~"]["final_norm"]))


def test_adafactor_divides_by_the_factored_moment_of_each_layer():
    params, grads = random_tree(0), random_tree(1)
    updates = one_update(MAKE["adafactor"](**PLAIN), params, grads)["layers/block"]["up"]
    for layer, update in enumerate(updates):
        g, p = grads["layers/block"]["up"][layer], params["layers/block"]["up"][layer]
        rows, columns = np.mean(g**2, 1), np.mean(g**2, 0)
        scaled = g / np.sqrt(np.outer(rows, columns) / rows.mean())
        scaled /= max(1.0, np.sqrt(np.mean(scaled**2)))
        np.testing.assert_allclose(update, -0.5 * scaled * np.sqrt(np.mean(p**2)), rtol=1e-4)


@pytest.mark.covers("T07")
@pytest.mark.parametrize(("name", "side"), [("query", (1, 2)), ("output", (0, 1))])
def test_adafactor_factors_attention_weights_with_heads_joined(name, side):
    """Heads of width 2 and 4 of them are narrower than `min_factored`, and one side of 8 together."""
    params, grads = random_tree(0), random_tree(1)
    optimizer = optimizers.adafactor(learning_rate=RATE, min_factored=8, **PLAIN)
    updates = one_update(optimizer, params, grads)["layers/block"][name]
    for layer, update in enumerate(updates):
        g, p = grads["layers/block"][name][layer], params["layers/block"][name][layer]
        other = tuple({0, 1, 2} - set(side))
        joined, alone = np.mean(g**2, other, keepdims=True), np.mean(g**2, side, keepdims=True)
        scaled = g / np.sqrt(joined * alone / joined.mean())
        scaled /= max(1.0, np.sqrt(np.mean(scaled**2)))
        np.testing.assert_allclose(update, -0.5 * scaled * np.sqrt(np.mean(p**2)), rtol=1e-4)
    kept = [a.shape for a in jax.tree.leaves(jax.eval_shape(optimizer.bound(SPECS).init, params))]
    assert not [shape for shape in kept if sorted(shape) == sorted(SHAPES["layers/block"][name])]


def test_muon_makes_each_layers_matrix_nearly_orthogonal_and_leaves_the_rest_to_adam():
    updates = one_update(MAKE["muon"](**PLAIN), random_tree(0), random_tree(1))
    block = updates["layers/block"]
    for matrices in (block["query"].reshape(-1, 8, 8), block["output"].reshape(-1, 8, 8), block["up"]):
        for matrix in matrices:
            singular = np.linalg.svd(matrix / (0.5 * 0.2 * np.sqrt(max(matrix.shape))), compute_uv=False)
            assert 0.3 < singular.min() <= singular.max() < 1.3
    for leaf in (updates["~"]["embedding"], updates["~"]["final_norm"], block["mlp_norm"]):
        np.testing.assert_allclose(np.abs(leaf), 0.5, rtol=1e-5)  # Adam's first step is a sign


def test_names_are_replaced_by_pattern():
    names = ["decoder/0/w", "decoder/1/w", "head/w"]
    renames = {"decoder/1/*": "last/*", "decoder/*/w": "layers/w/*"}
    assert list(parameters.renamed(names, renames, where="RENAMES").values()) == ["layers/w/0", "last/w", "head/w"]
    for wrong, message in {
        ("decoder/*", "layers"): r"RENAMES: 'decoder/\*' and 'layers' have different numbers of '\*'",
        ("tail/*", "head/*"): r"RENAMES: nothing is named 'tail/\*'; the names are decoder/0/w, decoder/1/w, head/w",
        ("decoder/0/w", "head/w"): "RENAMES: several names become head/w",
    }.items():
        with pytest.raises(ValueError, match=message):
            parameters.renamed(names, dict([wrong]), where="RENAMES")


@pytest.mark.parametrize("name", MAKE)
def test_frozen_layers_get_no_state(name):
    params = random_tree(0)
    block = SPECS["layers/block"]
    frozen = {leaf: block[leaf].frozen("float32") for leaf in ("up", "mlp_norm")}
    optimizer = MAKE[name]().bound({**SPECS, "layers/block": {**block, **frozen}})
    state = jax.jit(optimizer.init)(params)
    assert not [a.shape for a in jax.tree.leaves(state) if 20 in a.shape]
    updates, _ = jax.jit(optimizer.transformation.update)(random_tree(1), state, params)
    assert not np.any(updates["layers/block"]["up"])
    assert np.all(updates["layers/block"]["query"])


@pytest.mark.parametrize("name", MAKE)
def test_every_leaf_of_the_state_has_the_axes_of_its_dimensions(name):
    """Sizes are told apart by the axis: every named dimension of a leaf has the size of that axis in its parameter."""
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, random_tree(0)))
    optimizer = MAKE[name]().bound(SPECS)
    named = optimizers.state_axes(optimizer, shapes)
    sizes = {"layers": 3, "vocab": 12, "embed": 8, "norm": 8, "heads": 4, "head_dim": 2, "mlp": 20}
    state = jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, shapes))
    leaves = jax.tree.leaves(named, is_leaf=lambda a: isinstance(a, Axes))
    for (path, leaf), axes in zip(state, leaves, strict=True):
        assert len(axes.names) == len(leaf.shape), path
        joined = {"heads": sizes["heads"] * sizes["head_dim"]} if name == "adafactor" else {}
        of_axis = [n in (sizes[a], joined.get(a)) for a, n in zip(axes.names, leaf.shape, strict=True) if a]
        assert all(of_axis), (path, axes)
        if leaf.size > 3 * LAYERS:  # more than counters, placeholders and Newton-Schulz coefficients
            assert None not in axes.names, (path, leaf.shape, axes)


def test_moments_of_joined_heads_are_split_as_heads():
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, random_tree(0)))
    named = optimizers.state_axes(MAKE["adafactor"]().bound(SPECS), shapes)
    leaves = jax.tree_util.tree_leaves_with_path(named, is_leaf=lambda a: isinstance(a, Axes))
    found = {parameters.path_name(path[-3:]): axes.names for path, axes in leaves}
    assert found["v_row/layers/block/query"] == found["v_col/layers/block/output"] == ("layers", "embed")
    assert found["v_col/layers/block/query"] == found["v_row/layers/block/output"] == ("layers", "heads")


def test_muon_is_refused_for_a_model_without_matrices():
    with pytest.raises(ValueError, match=r"no parameter is a matrix; .* embedding \(embedding\), final_norm \(norm\)"):
        MAKE["muon"]().bound({"~": SPECS["~"]})


class Foreign:
    """A model with parameters of other names than ours."""

    def init(self, rng, batch):
        return hk.transform(self._params).init(rng)

    def _params(self):
        init = hk.initializers.RandomNormal(1.0)
        logical.param("lookup", (12, 8), ("vocab", "embed"), init)
        logical.param("kernel", (4, 2, 8), ("heads", "head_dim", "embed"), init, in_dims=2)
        logical.param("gain", (8,), ("norm",), init)
        logical.param("shift", (8,), ("embed",), init)
        logical.param("rotation", (8, 8), ("embed", None), init, trainable=False)


@pytest.mark.covers("T07")
def test_parameters_of_any_name_are_treated_by_their_kind():
    model = Foreign()
    params = jax.jit(lambda key: model.init(key, {}))(jax.random.key(0))
    grads = jax.tree.map(jnp.zeros_like, params)
    decays = optimizers.adamw(learning_rate=RATE, weight_decay=0.1).for_model(model, {})
    ratios = jax.tree.map(lambda u, p: float(np.mean(u / p)), one_update(decays, params, grads, decays.specs), params)
    want = {"lookup": -0.05, "kernel": -0.05, "gain": 0.0, "shift": 0.0, "rotation": 0.0}
    assert ratios["~"] == pytest.approx(want)
    muon = MAKE["muon"](**PLAIN).for_model(model, {})
    updates = one_update(muon, params, params, muon.specs)["~"]
    singular = np.linalg.svd(updates["kernel"].reshape(8, 8) / (0.5 * 0.2 * np.sqrt(8)), compute_uv=False)
    assert 0.3 < singular.min() <= singular.max() < 1.3
    np.testing.assert_allclose(np.abs(updates["lookup"]), 0.5, rtol=1e-5)  # Adam's first step is a sign
    assert not np.any(updates["rotation"])
    kept = jax.tree.leaves(jax.eval_shape(muon.init, params))
    assert (8, 8) not in [a.shape for a in kept]  # only that of the constant
    gradient = jax.grad(lambda p: sum(jnp.sum(a) for a in jax.tree.leaves(muon.trainable(p))))(params)
    assert not np.any(gradient["~"]["rotation"])


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (ParamSpec(("vocab", "embed")), "embedding"),
        (ParamSpec(("embed", "vocab")), "embedding"),
        (ParamSpec(("vocab",)), "bias"),
        (ParamSpec(("norm",)), "norm"),
        (ParamSpec(("layers", "norm"), stacked=1), "norm"),
        (ParamSpec(("layers", "mlp"), stacked=1), "bias"),
        (ParamSpec(()), "bias"),
        (ParamSpec(("vocab", None), kind="table"), "table"),
        (ParamSpec(("embed", None), trainable=False), "constant"),
        (ParamSpec(("embed", None), kind="matrix", trainable=False), "matrix"),
        (ParamSpec((None, "embed", "heads", "head_dim"), stacked=1), "matrix"),
    ],
    ids=str,
)
def test_the_kind_follows_from_the_axes(spec, kind):
    assert spec.kind == kind


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "matrx"}, "kind = 'matrx': expected one of matrix, embedding, norm, bias, table, constant"),
        ({"kind": "constant"}, "kind = 'constant', but trainable = True: give trainable=False alone"),
        ({"in_dims": 2}, "2 dimensions besides stacked = 0, in_dims = 2: expected in_dims from 1 to 1"),
        ({"in_dims": 0}, "in_dims = 0: expected in_dims from 1 to 1"),
        ({"stacked": 1, "kind": "matrix"}, "with 1 dimension besides stacked = 1, in_dims = 1: expected another kind"),
        ({"stacked": 3}, "stacked = 3: expected from 0 to 2"),
    ],
)
def test_a_spec_that_fits_no_parameter_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ParamSpec(("embed", "mlp"), **options)


def test_paths_of_any_tree_read_alike():
    tree = {"~": {"embedding": 0}, "layers/block": {"query": (1,)}, "outer/~/inner": {"w": 2}}
    paths = [parameters.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["layers/block/query/0", "outer/inner/w", "embedding"]


def test_a_path_has_the_names_of_stack_modules_and_parameter():
    class Inner(hk.Module):
        def __init__(self, name=None):
            super().__init__(name)
            self.linear = hk.Linear(3, name="linear")

        def __call__(self, x):
            return self.linear(x) * logical.param("gain", (3,), ("embed",), jnp.ones)

    def block(x, side):
        return Inner("inner")(x) + logical.param("offset", (3,), ("embed",), jnp.ones)

    def head(x, side):
        return jnp.sum(Inner("inner")(x) @ logical.param("out", (3, 2), ("embed", None), jnp.ones))

    def model(x):
        x = x @ logical.param("table", (3, 3), (None, "embed"), jnp.ones)
        x = stack.layer_stack(block, 2, name="first")(Inner("inner")(x))
        return stack.layer_stack(block, 2, tail=stack.haiku_tail(head, x))(x)

    named = logical.named(model, {"*/w": (None, "embed"), "*/b": ("embed",)})
    params, _ = logical.abstract_init(hk.transform(named).init, jax.random.key(0), jnp.ones((4, 3)))
    modules = ("inner", "first/inner", "layers/inner", "tail/inner")
    expected = {f"{module}/{name}" for module in modules for name in ("linear/w", "linear/b", "gain")}
    assert set(parameters.names(params)) == expected | {"table", "first/offset", "layers/offset", "tail/out"}
