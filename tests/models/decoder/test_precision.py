"""The precision of each computation, read from the program of a training step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from core import optimizers, step
from models.decoder.transformer import Transformer
from models.trm import TRM

MODEL = Transformer(
    vocab_size=48, num_layers=2, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=2, attention="plain"
)
SPEC = {k: jax.ShapeDtypeStruct((2, 6), jnp.int32) for k in ("inputs", "targets", "segment_ids", "positions")}
SPEC["weights"] = jax.ShapeDtypeStruct((2, 6), jnp.float32)
DELICATE = {"exp", "log", "rsqrt", "sqrt", "logistic", "reduce_sum", "cos", "sin"}
OPTIMIZER = optimizers.adamw(learning_rate=optimizers.constant(1e-3)).for_model(MODEL, SPEC)


def equations(jaxpr):
    """Every equation, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.fixture(scope="module")
def traced():
    zeros = lambda: {k: jnp.zeros(s.shape, s.dtype) for k, s in SPEC.items()}  # noqa: E731
    state = jax.eval_shape(lambda: step.create(MODEL, OPTIMIZER, MODEL.init(jax.random.key(0), zeros()), zeros()))
    return jax.make_jaxpr(step.train_step(MODEL, OPTIMIZER, seed=0), return_shape=True)(state, SPEC)


@pytest.mark.covers("T02")
def test_matrix_products_are_narrow(traced):
    products = [e for e in equations(traced[0].jaxpr) if e.primitive.name == "dot_general"]
    narrow = [e for e in products if all(v.aval.dtype == jnp.bfloat16 for v in e.invars)]
    forward_and_backward = 3 * (4 + 3 + 1)  # four projections, three of the feed-forward layer, one unembedding
    assert len(narrow) >= forward_and_backward
    wide = [[v.aval.shape for v in e.invars] for e in products if e not in narrow]
    assert not [shapes for shapes in wide if (16, 24) in shapes or (24, 16) in shapes]  # none of the weights'


@pytest.mark.covers("T02")
def test_state_softmax_norms_and_loss_are_wide(traced):
    program, (state, metrics) = traced
    floats = [a for a in jax.tree.leaves((state.params, state.opt_state)) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert {a.dtype for a in floats} == {jnp.dtype("float32")}
    assert {m.dtype for m in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
    narrow = {
        e.primitive.name
        for e in equations(program.jaxpr)
        if e.primitive.name in DELICATE and e.invars[0].aval.dtype == jnp.bfloat16
    }
    assert narrow <= {"logistic"}  # of SwiGLU: a gate, not a sum


SMALL_TRM = TRM(vocab_size=7, embed_dim=16, num_heads=2, num_layers=1, h_cycles=1, l_cycles=1, prefix_length=1)
PUZZLES = {k: jax.ShapeDtypeStruct((2, 6), jnp.int32) for k in ("inputs", "labels")}
PUZZLES["puzzle_ids"] = jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.covers("T02")
@pytest.mark.parametrize(
    ("model", "spec", "tables"),
    [(MODEL, SPEC, 1), (dataclasses.replace(MODEL, tied=True), SPEC, 1), (SMALL_TRM, PUZZLES, 2)],
)
def test_gradients_of_tables_are_summed_wide(model, spec, tables):
    """A table of tokens or puzzles: the gradients of a row's occurrences are added up in float32."""

    def loss(params, batch):
        return model.loss(params, model.init_carry(batch), jax.random.key(0), batch)[1].loss_sum

    params = jax.eval_shape(model.init, jax.random.key(0), spec)
    program = jax.make_jaxpr(jax.grad(loss))(params, spec)
    sums = [e for e in equations(program.jaxpr) if e.primitive.name == "scatter-add"]
    assert len(sums) == tables
    assert {e.outvars[0].aval.dtype for e in sums} == {jnp.dtype("float32")}
