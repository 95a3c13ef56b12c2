"""Adafactor, Lion and Muon: their formulas, each layer of a stack by itself, and the axes of what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, parameters
from core.logical import Axes

LAYERS = 3
SHAPES = {
    "~": {"embedding": ((12, 8), ("vocab", "embed")), "final_norm": ((8,), ("norm",))},
    "layers/block": {
        "query": ((LAYERS, 8, 4, 2), ("layers", "embed", "heads", "head_dim")),
        "output": ((LAYERS, 4, 2, 8), ("layers", "heads", "head_dim", "embed")),
        "up": ((LAYERS, 8, 20), ("layers", "embed", "mlp")),
        "mlp_norm": ((LAYERS, 8), ("layers", "norm")),
    },
}
AXES = {m: {n: Axes(axes) for n, (_, axes) in leaves.items()} for m, leaves in SHAPES.items()}
RATE = optimizers.constant(0.5)
MAKE = {
    "adafactor": lambda **o: optimizers.adafactor(learning_rate=RATE, min_factored=4, **o),
    "lion": lambda **o: optimizers.lion(learning_rate=RATE, **o),
    "muon": lambda **o: optimizers.muon(learning_rate=RATE, **o),
}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {
        m: {n: rng.standard_normal(shape).astype(np.float32) for n, (shape, _) in leaves.items()}
        for m, leaves in SHAPES.items()
    }


def train(optimizer, params, grads):
    state = optimizer.init(params)
    update = jax.jit(optimizer.transformation.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def unstacked(tree):
    """Every layer as a module of its own: what the papers mean."""
    apart = {f"layer_{i}/block": {n: a[i] for n, a in tree["layers/block"].items()} for i in range(LAYERS)}
    return {"~": tree["~"]} | apart


UNSTACKED = {p.replace("layers/*", "layer_*"): t[1:] for p, t in optimizers.MATRICES.items()}
APART = {"adafactor": {"matrices": UNSTACKED}, "lion": {}, "muon": {"matrices": UNSTACKED}}  # for unstacked layers


@pytest.mark.covers("T07")
@pytest.mark.parametrize("name", MAKE)
def test_a_layer_of_a_stack_is_trained_as_if_it_were_alone(name):
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    stacked = train(MAKE[name](weight_decay=0.1), params, grads)
    apart = train(MAKE[name](weight_decay=0.1, **APART[name]), unstacked(params), [unstacked(g) for g in grads])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), unstacked(stacked), apart)


def test_two_stacks_may_differ_in_depth():
    optimizer = MAKE["adafactor"](stacked=("encoder/*", "decoder/*"))
    params = {"encoder/block": {"w": jnp.ones((2, 8, 8))}, "decoder/block": {"w": jnp.ones((5, 8, 8))}}
    state = optimizer.init(params)
    updates, _ = optimizer.transformation.update(params, state, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def one_update(optimizer, params, grads):
    return optimizer.transformation.update(grads, optimizer.init(params), params)[0]


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
    kept = [a.shape for a in jax.tree.leaves(optimizer.init(params))]
    assert not [shape for shape in kept if sorted(shape) == sorted(SHAPES["layers/block"][name][0])]


def test_muon_makes_each_layers_matrix_nearly_orthogonal_and_leaves_the_rest_to_adam():
    updates = one_update(MAKE["muon"](**PLAIN), random_tree(0), random_tree(1))
    block = updates["layers/block"]
    for matrices in (block["query"].reshape(-1, 8, 8), block["output"].reshape(-1, 8, 8), block["up"]):
        for matrix in matrices:
            singular = np.linalg.svd(matrix / (0.5 * 0.2 * np.sqrt(max(matrix.shape))), compute_uv=False)
            assert 0.3 < singular.min() <= singular.max() < 1.3
    for leaf in (updates["~"]["embedding"], updates["~"]["final_norm"], block["mlp_norm"]):
        np.testing.assert_allclose(np.abs(leaf), 0.5, rtol=1e-5)  # Adam's first step is a sign


@pytest.mark.parametrize("name", MAKE)
def test_frozen_layers_get_no_state(name):
    params = random_tree(0)
    optimizer = MAKE[name](frozen=("layers/block/up", "layers/*norm"))
    state = optimizer.init(params)
    assert not [a.shape for a in jax.tree.leaves(state) if 20 in a.shape]
    updates, _ = optimizer.transformation.update(random_tree(1), state, params)
    assert not np.any(updates["layers/block"]["up"])
    assert np.all(updates["layers/block"]["query"])


@pytest.mark.parametrize("name", MAKE)
def test_every_leaf_of_the_state_has_the_axes_of_its_dimensions(name):
    """Sizes are told apart by the axis: every named dimension of a leaf has the size of that axis in its parameter."""
    shapes = {
        m: {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, (s, _) in leaves.items()} for m, leaves in SHAPES.items()
    }
    optimizer = MAKE[name]()
    named = optimizers.state_axes(optimizer, shapes, AXES)
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
    shapes = {
        m: {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, (s, _) in leaves.items()} for m, leaves in SHAPES.items()
    }
    optimizer = MAKE["adafactor"]()
    named = optimizers.state_axes(optimizer, shapes, AXES)
    leaves = jax.tree_util.tree_leaves_with_path(named, is_leaf=lambda a: isinstance(a, Axes))
    found = {parameters.path_name(path[-3:]): axes.names for path, axes in leaves}
    assert found["v_row/layers/block/query"] == found["v_col/layers/block/output"] == ("layers", "embed")
    assert found["v_col/layers/block/query"] == found["v_row/layers/block/output"] == ("layers", "heads")


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ({"layers/*/up": "lii"}, r"matrices\['layers/\*/up'\] = 'lii': expected a letter for each dimension"),
        ({"layers/*/up": "bio"}, r"= 'bio': expected .* such as 'lio'"),
        ({"layers/*/up": "io"}, r"layers/block/up has shape \(3, 8, 20\), and 'io' names 2 dimensions"),
        ({"stack/*/up": "lio"}, r"no parameter matches; the parameters are .*layers/block/up"),
    ],
)
def test_letters_that_make_no_matrix_are_refused(matrices, message):
    with pytest.raises(ValueError, match=message):
        MAKE["muon"](matrices=matrices).init(random_tree(0))


def test_adafactor_takes_a_model_of_other_shapes_unless_its_matrices_are_given():
    params = {"layers/block": {"query": jnp.ones((3, 8, 8))}}
    MAKE["adafactor"]().init(params)
    with pytest.raises(ValueError, match=r"query has shape \(8, 8\), and 'ioo' names 3 dimensions"):
        MAKE["adafactor"](matrices={"layers/*/query": "lioo"}).init(params)


def test_patterns_that_are_not_there_are_left_out():
    assert parameters.present(random_tree(0), ("layers/*", "nothing")) == ["layers/*"]


def test_paths_of_any_tree_read_alike():
    tree = {"~": {"embedding": 0}, "layers/block": {"query": (1,)}, "outer/~/inner": {"w": 2}}
    paths = [parameters.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["layers/block/query/0", "outer/inner/w", "embedding"]
