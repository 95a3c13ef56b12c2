"""Gradients from saved values are those of `jax.vjp`, and a pipeline keeps no more bytes than `remat` names."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import stack
from models.agreement_subjects import random_batches
from models.decoder import transformer
from models.decoder.layers import Attention
from models.decoder.transformer import REMAT
from parallel import derivative_rules
from parallel.derivative_rules import Trained
from parallel.pipeline import deferred, residuals

MODEL = transformer.Transformer(
    vocab_size=50, num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=6, dtype="float32"
)
WINDOWS = dataclasses.replace(MODEL, mixer=(Attention(window=5), Attention()))
ROWS, LENGTH = 2, 24
# In a position of one layer, by checkpoint name. Attention without a kernel does not save its weighted values.
NUMBERS = {"x": 16, "norm": 2, "query": 24, "key": 12, "value": 12, "attended": 16, "gate": 24, "up": 24}
SAVED = {
    "full": ("x", "norm"),
    "halves": ("x", "norm", "attended"),
    "attention": ("x", "norm", "query", "key", "value"),
    "attention_on_host": ("x", "norm", "query", "key", "value"),
    "attention_and_input_on_host": ("x", "norm", "query", "key", "value"),
    "input_on_host": ("x", "norm"),
    "attention_and_up": ("x", "norm", "query", "key", "value", "attended", "up"),
    "attention_and_mlp": ("x", "norm", "query", "key", "value", "gate", "up"),
    "projections": ("x", "norm", "query", "key", "value", "attended", "gate", "up"),
}
ON_HOST = {"attention_on_host": 3, "attention_and_input_on_host": 4, "input_on_host": 1}  # arrays of a layer
CASES = [(MODEL, remat) for remat in REMAT] + [(WINDOWS, "attention")]
QUICK = [(MODEL, "full"), (WINDOWS, "attention")]  # the second one saves and computes again


def one_layer(model):
    """The arguments of `residuals.of_layers` for a layer of a model, with random arrays."""
    found = {}

    def runner(fn, stacked, x, side, tail):
        layer_fn, weights, fixed = derivative_rules.differentiated(fn, stacked)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), fixed._replace(params=weights))
        found.update(fn=layer_fn, layer=layer, x=x, side=side)
        return stack.scan_runner(fn, stacked, x, side, tail)

    def loss(batch):
        return model.loss(model.init(jax.random.key(0), batch), (), jax.random.key(1), batch, is_training=True)

    with stack.use_runner(runner):
        jax.eval_shape(loss, next(iter(random_batches(model.vocab_size, steps=1, rows=ROWS))))
    rng = np.random.default_rng(0)

    def made(a):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.key(2)
        return jnp.asarray(0.3 * rng.normal(size=a.shape) if a.dtype == jnp.float32 else np.ones(a.shape), a.dtype)

    leaves, structure = jax.tree.flatten(found["layer"].params)
    arrays = {name: jax.tree.map(made, found[name]) for name in ("layer", "x", "side")}
    return arrays | {"fn": found["fn"], "trained": Trained(structure, (True,) * len(leaves))}


@pytest.mark.parametrize(
    ("model", "remat"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_both_forms_of_the_backward_pass_give_the_gradients_of_a_layer(model, remat):
    given = one_layer(dataclasses.replace(model, remat=remat))
    fn, layer, x, side, trained = (given[name] for name in ("fn", "layer", "x", "side", "trained"))
    saving = residuals.of_layers(**given)
    split = deferred.of_layers(saving, layer, side)
    dy = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    @functools.partial(jax.jit, static_argnums=0)
    def every_form(kind, layer, x, side, dy):
        def plain(picked, x):
            return fn.plain(layer._replace(params=trained.fill(picked)), x, side, kind)[0]

        y, vjp = jax.vjp(plain, trained.pick(layer.params), x)
        found, _, saved = saving.forward(kind, layer, x, side)
        vectors, dx, waiting = split.first(kind, layer, saved, side, (dy, ()))
        parts = vectors, split.second(kind, layer, saved, side, waiting), dx
        return (y, vjp(dy)), (found, saving.backward(kind, layer, saved, side, (dy, ()))), parts

    for kind in dict.fromkeys(fn.kinds):
        wanted, found, (vectors, matrices, dx) = every_form(kind, layer, x, side, dy)
        same = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5))
        same(found, wanted)
        dw, wanted_dx = wanted[1]
        assert [a.ndim < 2 for a in dw] == [a is not None for a in vectors] == [a is None for a in matrices]
        same(([b if a is None else a for a, b in zip(vectors, matrices, strict=True)], dx), (dw, wanted_dx))


def elements(shapes):
    return sum(math.prod(a.shape) for a in shapes)


@pytest.mark.parametrize("remat", SAVED)
def test_what_remat_names_is_saved_and_no_weight_is_saved_or_waits(remat):
    given = one_layer(dataclasses.replace(MODEL, remat=remat))
    saving = residuals.of_layers(**given)
    split = deferred.of_layers(saving, given["layer"], given["side"])
    assert all(a.shape[0] == ROWS for a in (*saving.shapes, *split.shapes))
    assert elements(saving.shapes) == ROWS * LENGTH * sum(map(NUMBERS.get, SAVED[remat]))
    on_host = [a for a in saving.shapes if a.memory_space == jax.memory.Space.Host]
    assert len(on_host) == ON_HOST.get(remat, 0)
    if remat == "projections":
        # Gradients of the outputs of products, and the weighted values, which attention computes again.
        of_products = ("query", "key", "value", "attended", "gate", "up", "down", "mixed")
        assert elements(split.shapes) == ROWS * LENGTH * sum(
            map((NUMBERS | {"down": 16, "mixed": 24}).get, of_products)
        )
