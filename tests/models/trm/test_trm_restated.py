"""An independent implementation of the Tiny Recursive Model in numpy and float64: values and gradients.

What has no gradient is restated by two sets of parameters: `early` for the calls that are constants to the backward
pass, `late` for the others. A gradient is then a difference of values in `late`, leaf by leaf.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import random_bits
from core.types import IGNORED
from models import trm

ROWS, CELLS = 5, 7


def small(**fields):
    sizes = {"vocab_size": 6, "embed_dim": 16, "num_heads": 2, "num_layers": 2, "num_puzzles": 4, "puzzle_multiple": 1}
    recursion = {"prefix_length": 2, "h_cycles": 2, "l_cycles": 3, "halt_max_steps": 1, "dtype": "float32"}
    return trm.TRM(**{**sizes, **recursion, **fields})


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    labels = rng.integers(1, 6, (ROWS, CELLS))
    labels[:, 2] = np.where(rng.random(ROWS) < 0.5, IGNORED, labels[:, 2])
    return {
        "inputs": jnp.asarray(rng.integers(0, 6, (ROWS, CELLS)), jnp.int32),
        "labels": jnp.asarray(labels, jnp.int32),
        "puzzle_ids": jnp.asarray([0, 1, 2, 3, 1], jnp.int32),
    }


def lively(model):
    """Parameters of which none is zero, the table's and the halting head's neither."""
    rng = np.random.default_rng(3)

    def drawn(path, leaf):
        fan_in = {"unembedding": 0, "halt_head": 0}.get(path[-1].key, 1)
        width = leaf.shape[fan_in] if leaf.ndim > 1 else 1
        return jnp.asarray(rng.normal(0, 1 / math.sqrt(width), leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(drawn, jax.eval_shape(model.init, jax.random.key(0), batch()))


def rms(a, axis=-1):
    return a / np.sqrt(np.mean(a**2, axis=axis, keepdims=True) + 1e-5)


def glu(a, gate_up, down):
    gate, up = a @ gate_up[:, 0], a @ gate_up[:, 1]
    return (gate / (1 + np.exp(-gate)) * up) @ down


def turned(a, theta=1e4):
    """[B, T, H, K] with the halves of each head turned by position."""
    half = a.shape[-1] // 2
    angles = np.outer(np.arange(a.shape[1]), theta ** (-np.arange(half) / half))[:, None]  # [T, 1, K / 2]
    first, second = a[..., :half], a[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attended(a, qkv, output, rope):
    q, k, v = np.moveaxis(np.einsum("btd,dchk->btchk", a, qkv), 2, 0)
    if rope:
        q, k = turned(q), turned(k)
    scores = np.exp(np.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1]))
    return np.einsum("bhts,bshk,hkd->btd", scores / scores.sum(-1, keepdims=True), v, output)


def applied(model, block, a):
    """All layers."""
    for i in range(model.num_layers):
        w = {name: leaf[i] for name, leaf in block.items()}
        if model.mixer == "mlp":
            across = a.transpose(0, 2, 1)  # [B, D, T]
            a = rms(across + glu(across, w["token_gate_up"], w["token_down"])).transpose(0, 2, 1)
        else:
            a = rms(a + attended(a, w["qkv"], w["output"], rope=model.positions == "auto"))
        a = rms(a + glu(a, w["gate_up"], w["down"]))
    return a


def embedded(model, root, data):
    prefix = np.zeros((ROWS, model.prefix_length, model.embed_dim))
    prefix[:, 0] = root["puzzle_table"][data["puzzle_ids"]]
    x = np.concatenate([prefix, root["embedding"][data["inputs"]]], axis=1)
    if model.positions == "learned":
        x = (x + root["positions"]) / math.sqrt(2)
    return math.sqrt(model.embed_dim) * x


def restated(model, late, data, *, early=None):
    """States and logits after one step from fresh states."""
    early = late if early is None else early
    xs = {True: embedded(model, late["~"], data), False: embedded(model, early["~"], data)}
    nets = {has: functools.partial(applied, model, p["layers/block"]) for has, p in ((True, late), (False, early))}
    y = np.broadcast_to(early["~"]["h_init"], xs[True].shape)
    z = [np.broadcast_to(row, y.shape) for row in early["~"].get("l_init", ())]
    for cycle in range(model.h_cycles):
        is_last = cycle == model.h_cycles - 1
        for i in range(model.l_cycles):
            has = is_last and (model.gradient == "last_cycle" or i == model.l_cycles - 1)
            if model.latents == "single":
                y = nets[has](y + xs[has])
            else:
                z[i % len(z)] = nets[has](sum(z) + (y + xs[has]))
        y = nets[is_last](y) if model.latents == "single" else nets[is_last](y + sum(z))
    return y, z, y[:, model.prefix_length :] @ late["~"]["unembedding"]


def losses_of(root, y, logits, labels):
    """Token loss and halting loss, summed over rows, and which rows are right."""
    s = np.where(logits >= 0, logits + 1, 1 / (1 - np.minimum(logits, 0)))
    p = np.take_along_axis(s / s.sum(-1, keepdims=True), np.maximum(labels, 0)[..., None], -1)[..., 0]
    known = labels != IGNORED
    right = np.all((logits.argmax(-1) == labels) | ~known, axis=-1)
    q = y[:, 0] @ root["halt_head"][:, 0] + root["halt_bias"][0]
    token = np.sum(-np.log(p) * known / known.sum(-1, keepdims=True))
    return token, np.sum(np.log1p(np.exp(np.where(right, -q, q)))), right


def exact(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


CASES = [
    {"mixer": "mlp"},
    pytest.param({"mixer": "mlp", "latents": "single"}, marks=pytest.mark.slow),
    pytest.param({"mixer": "mlp", "latents": "many"}, marks=pytest.mark.slow),
    pytest.param({"mixer": "mlp", "positions": "learned"}, marks=pytest.mark.slow),
    {"latents": "single"},
    {"latents": "many", "positions": "learned"},
]


@pytest.mark.covers("N12")
@pytest.mark.parametrize("fields", CASES, ids=lambda fields: " ".join(fields.values()))
def test_a_step_is_its_restatement(fields):
    model, data = small(**fields), batch()
    params = lively(model)
    y, z, logits = restated(model, exact(params), data)
    run = jax.jit(lambda p, d: model.loss(p, model.init_carry(d), jax.random.key(0), random_bits.with_row_ids(d)))
    carry, out = run(params, data)
    np.testing.assert_allclose(carry.states.z_h, y, atol=3e-4)  # a step magnifies rounding; a fault gives 1e-2 and more
    assert len(carry.states.z_l) == {"two": 1, "single": 0, "many": 3}[model.latents]
    for ours, theirs in zip(carry.states.z_l, z, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)
    token, halt, right = losses_of(exact(params)["~"], y, logits, np.asarray(data["labels"]))
    assert float(out.metrics["lm_loss"].total) == pytest.approx(token, rel=1e-5)
    assert float(out.metrics["q_halt_loss"].total) == pytest.approx(halt, rel=1e-5)
    assert float(out.loss_sum) == pytest.approx(token + 0.5 * halt, rel=1e-5)
    assert float(out.metrics["exact_accuracy"].total) == right.sum()


def slope(model, params, data, *, leaf, direction):
    """The loss's change along a direction in one leaf, by differences; early calls keep the parameters they have."""
    leaves, structure = jax.tree.flatten(params)

    def loss(step):
        moved = [*leaves[:leaf], leaves[leaf] + step * direction, *leaves[leaf + 1 :]]
        late = jax.tree.unflatten(structure, moved)
        y, _, logits = restated(model, late, data, early=params)
        token, halt, _ = losses_of(late["~"], y, logits, np.asarray(data["labels"]))
        return token + 0.5 * halt

    return (loss(1e-5) - loss(-1e-5)) / 2e-5


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"mixer": "mlp", "gradient": "last_cycle", "latents": "many"}, marks=pytest.mark.slow),
        {"mixer": "attention", "gradient": "last_calls"},
        pytest.param({"mixer": "mlp", "gradient": "last_calls", "latents": "single"}, marks=pytest.mark.slow),
        {"mixer": "mlp", "gradient": "last_calls", "latents": "many"},
    ],
    ids=lambda fields: " ".join(fields.values()),
)
def test_the_gradient_is_that_of_the_late_calls_only(fields):
    model, data = small(num_layers=1, **fields), batch()
    params = lively(model)
    found = jax.jit(jax.grad(lambda p: model.loss(p, model.init_carry(data), jax.random.key(0), data)[1].loss_sum))(
        params
    )
    rng = np.random.default_rng(1)
    for i, (path, grad) in enumerate(jax.tree_util.tree_leaves_with_path(exact(found))):
        name, direction = jax.tree_util.keystr(path), rng.normal(0, 1 / math.sqrt(grad.size), grad.shape)
        want = slope(model, exact(params), data, leaf=i, direction=direction)
        size = np.linalg.norm(grad) / math.sqrt(grad.size)
        assert abs(np.sum(grad * direction) - want) <= 1e-3 * size + 1e-7, name
        assert (size == 0) == ("_init" in name), name
