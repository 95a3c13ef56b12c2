"""Schedules of the recursive model: exploration and cycles; and float16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from core import optimizers, random_bits, step
from models import trm

ROWS, CELLS, STEPS = 6, 7, 20
MODEL = trm.TRM(
    vocab_size=6,
    num_layers=1,
    embed_dim=16,
    num_heads=2,
    h_cycles=3,
    l_cycles=4,
    num_puzzles=4,
    puzzle_multiple=1,
    prefix_length=2,
    halt_max_steps=4,
    exploration=0.0,
    dtype="float32",
)
CURRICULUM = trm.Curriculum(h_cycles=1, l_cycles=2, total_steps=STEPS, share=0.5)
GROWING = dataclasses.replace(MODEL, curriculum=CURRICULUM)
GROWING_SINGLE = dataclasses.replace(GROWING, latents="single")
SMALL = dataclasses.replace(MODEL, h_cycles=1, l_cycles=1)
ANNEALED = dataclasses.replace(SMALL, exploration=trm.Linear(start=1.0, end=0.0, total_steps=4))


def batch(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    drawn = {"inputs": (rows, CELLS), "labels": (rows, CELLS), "puzzle_ids": (rows,)}
    return {k: jnp.asarray(rng.integers(1, 4, shape), jnp.int32) for k, shape in drawn.items()}


@functools.cache
def params():
    """A halting head that is not zero, so that q depends on the states."""
    drawn = jax.jit(MODEL.init)(jax.random.key(0), batch())
    head = jax.random.normal(jax.random.key(1), drawn["~"]["halt_head"].shape)
    return {**drawn, "~": drawn["~"] | {"halt_head": head, "halt_bias": jnp.array([3.0, 0.0])}}


@functools.cache
def jitted(model):
    def loss(params, carry, key, batch):
        carry, out = model.loss(params, carry, key, random_bits.with_row_ids(batch))
        return out.loss_sum, (carry, out)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def at(model, done, *, key=0):
    """Loss, gradient, carry of the step behind `done` others, on fresh states."""
    carry = model.init_carry(batch())._replace(trained=jnp.int32(done))
    (loss, (carry, _)), grads = jitted(model)(params(), carry, jax.random.key(key), batch())
    return loss, grads, carry


def test_a_line_and_a_curriculum_by_step():
    line = trm.Linear(start=0.3, end=0.05, total_steps=100, share=0.5)
    np.testing.assert_allclose([line.at(jnp.int32(s)) for s in (0, 25, 50, 99)], [0.3, 0.175, 0.05, 0.05], rtol=1e-6)
    stages = trm.Curriculum(h_cycles=1, l_cycles=2, total_steps=50, share=0.2).stages(50, h_cycles=3, l_cycles=6)
    assert stages == [(2, 1, 2), (1, 1, 3), (1, 2, 3), (3, 2, 4), (1, 2, 5), (1, 3, 5), (41, 3, 6)]


@pytest.mark.parametrize(
    ("done", "cycles", "latents"),
    [
        pytest.param(5, (2, 3), "two", marks=pytest.mark.slow),
        pytest.param(0, (1, 2), "two", marks=pytest.mark.slow),
        pytest.param(19, (3, 4), "two", marks=pytest.mark.slow),
        (5, (2, 3), "single"),
    ],
)
def test_a_stage_is_the_model_with_its_cycles(done, cycles, latents):
    fixed = dataclasses.replace(MODEL, h_cycles=cycles[0], l_cycles=cycles[1], latents=latents)
    growing = dataclasses.replace(GROWING, latents=latents)
    loss, grads, carry = at(growing, done)
    expected_loss, expected_grads, expected = at(fixed, done)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    np.testing.assert_allclose(carry.states.z_h, expected.states.z_h, atol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-5), grads, expected_grads
    )  # other order of sums
    assert int(carry.trained) == done + 1


def test_a_curriculum_and_an_annealed_exploration_are_other_programs():
    """Neither is a flag that nothing reads: each changes what is traced, and the first what is done at a step."""

    def program(model):
        return str(jax.make_jaxpr(model.loss)(params(), model.init_carry(batch()), jax.random.key(0), batch()))

    plain, growing, annealed = program(MODEL), program(GROWING), program(ANNEALED)
    assert " cond[" in growing
    assert " cond[" not in plain
    assert len({annealed, program(SMALL), program(dataclasses.replace(SMALL, exploration=0.5))}) == 3
    assert float(at(GROWING_SINGLE, 0)[0]) != float(at(GROWING_SINGLE, 5)[0])


def test_early_cycles_are_left_out_and_the_last_is_masked():
    """No condition stands around what has a gradient: its sums over chips would stand inside of it."""

    def loss(params):
        return GROWING.loss(params, GROWING.init_carry(batch()), jax.random.key(0), batch())[1].loss_sum

    def primitives(jaxpr, inside=()):
        for equation in jaxpr.eqns:
            yield equation.primitive.name, inside
            for inner in jaxprs_in_params(equation.params):
                yield from primitives(inner, (*inside, equation.primitive.name))

    conditions = [
        inside for name, inside in primitives(jax.make_jaxpr(jax.grad(loss))(params()).jaxpr) if name == "cond"
    ]
    assert sorted(inside.count("cond") for inside in conditions) == [0, 1]  # outer cycles, and inner ones in them


def test_exploration_fades():
    """At probability one no row may halt at its first step, though all want to; at zero all do."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def halted(done, key):
        carry = ANNEALED.init_carry(batch())._replace(trained=done)
        return ANNEALED.loss(params(), carry, key, random_bits.with_row_ids(batch()))[0].halted

    keys = jax.vmap(jax.random.key)(np.arange(20))
    share = [np.mean(halted(jnp.int32(done), keys)) for done in (0, 2, 4, 9)]
    assert share[0] == 0
    assert 0.3 < share[1] < 0.7
    assert share[2] == share[3] == 1


def test_the_carry_counts_the_steps_of_training():
    model = SMALL
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-3)).for_model(model, batch())
    state = step.create(model, optimizer, params(), batch())
    run = jax.jit(step.train_step(model, optimizer, seed=0))
    for number in range(1, 4):
        state, _ = run(state, batch(number))
        assert int(state.carry.trained) == int(state.step) == number


def test_evaluation_takes_all_cycles():
    one, other = (str(jax.make_jaxpr(m.evaluate)(params(), jax.random.key(0), batch())) for m in (GROWING, MODEL))
    assert one == other


def test_flops_of_a_curriculum_are_those_of_what_it_does():
    """Early calls as its stages have them: (outer - 1) x (inner + 1); the last cycle in full."""
    full = MODEL.training_flops(CELLS, rows=ROWS, steps=STEPS)
    assert full == MODEL.flops_per_row(CELLS) * ROWS * STEPS
    call = MODEL.flops_per_row(CELLS, early=1) - MODEL.flops_per_row(CELLS, early=0)
    stages = CURRICULUM.stages(STEPS, h_cycles=3, l_cycles=4)
    left_out = sum(n * (2 * 5 - (outer - 1) * (inner + 1)) for n, outer, inner in stages)
    assert GROWING.training_flops(CELLS, rows=ROWS, steps=STEPS) == pytest.approx(full - left_out * call * ROWS)
    assert left_out > 0


def test_a_rehearsal_keeps_a_curriculum_that_fits():
    sizes = dict.fromkeys(("heads", "embed", "head_dim", "length", "residual_length", "vocab", "puzzles"), 1)
    small = dataclasses.replace(GROWING, curriculum=trm.Curriculum(h_cycles=3, l_cycles=4, total_steps=9)).shrink(sizes)
    assert (small.curriculum.h_cycles, small.curriculum.l_cycles) == (2, 2)


@pytest.mark.slow
def test_float16_has_gradients_close_to_those_of_float32():
    """The loss is a sum over rows, divided in float32 behind the backward pass: a large batch makes nothing vanish."""
    half = dataclasses.replace(SMALL, dtype="float16")
    (_, grads, carry), (_, expected, _) = at(half, 0), at(SMALL, 0)
    assert carry.states.z_h.dtype == jnp.float16
    for name in ("qkv", "gate_up", "down"):
        got, want = (np.asarray(g["layers/block"][name]) for g in (grads, expected))
        assert got.dtype == np.float32
        assert np.all(np.isfinite(got))
        assert np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trm.Linear(start=0, end=1, total_steps=0), "Linear: total_steps = 0: expected at least 1"),
        (lambda: trm.Curriculum(total_steps=9, share=0.0), r"Curriculum: share = 0.0: expected a number in"),
        (lambda: trm.Curriculum(total_steps=9, l_cycles=0), "expected at least 1"),
        (
            lambda: dataclasses.replace(MODEL, curriculum=dataclasses.replace(CURRICULUM, l_cycles=5)),
            "the curriculum starts with l_cycles = 5, above the model's 4",
        ),
        (lambda: dataclasses.replace(GROWING, latents="many"), "does not support a curriculum"),
        (
            lambda: dataclasses.replace(MODEL, exploration=trm.Linear(start=1.5, end=0, total_steps=9)),
            "expected a probability",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
