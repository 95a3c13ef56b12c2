"""The selector: maps by hand, gradients of hard choices, and independence of the rest of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.vision import selector
from models.vision.selector import Selector
from tests.models.drawn import drawn
from tests.models.vision import subjects


def test_maps_of_texture_by_hand():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    entropy, edges = selector.texture_maps(jnp.asarray(images), 2)
    gray = np.pad(images / 255 @ [0.299, 0.587, 0.114], ((0, 0), (1, 1), (1, 1)), mode="edge")
    across, down = np.zeros((2, 8, 8)), np.zeros((2, 8, 8))
    for y in range(8):
        for x in range(8):
            near = gray[:, y : y + 3, x : x + 3]
            side = np.array([1, 2, 1])
            across[:, y, x] = (near[:, :, 2] @ side - near[:, :, 0] @ side) / 8
            down[:, y, x] = (near[:, 2] @ side - near[:, 0] @ side) / 8
    magnitude = np.sqrt(across**2 + down**2 + 1e-6)
    np.testing.assert_allclose(edges, magnitude.reshape(2, 2, 4, 2, 4).mean((2, 4)).reshape(2, 4), rtol=1e-4)
    r, g, b = (images[..., i] / 255 for i in range(3))
    layers = [r, g, b, r - g, b - (r + g) / 2, across, down, magnitude]
    means = np.stack([a.reshape(2, 2, 4, 2, 4).mean((2, 4)).reshape(2, 4) for a in layers], -1)
    where = np.array([[y, x, np.hypot(x, y)] for y in (-0.5, 0.5) for x in (-0.5, 0.5)])
    channels = np.concatenate([means, np.broadcast_to(where, (2, 4, 3))], -1)
    p = np.exp(channels) / np.exp(channels).sum(-1, keepdims=True)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_the_soft_bias_hides_all_but_the_best_as_the_temperature_falls():
    scores = jnp.asarray([[0.3, -1.0, 2.0, 0.5, 0.1]])
    for temperature in (1.0, 1e-3):
        found = selector.soft_bias(scores, 2, jnp.asarray(temperature))
        want = -np.logaddexp(0, -(np.asarray(scores, np.float64) - 0.4) / temperature)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-30)
    assert (np.asarray(found)[0] > -1).tolist() == [False, False, True, True, False]
    assert np.asarray(selector.hard_choice(scores, 2)).tolist() == [[0, 0, 1, 1, 0]]


def test_the_temperature_falls_geometrically_and_stays():
    made = Selector(num_chosen=2, temperature=(1.0, 0.25), temperature_steps=10)
    found = [float(made.temperature_at(jnp.asarray(step))) for step in (0, 5, 10, 1000)]
    np.testing.assert_allclose(found, [1, 0.5, 0.25, 0.25], rtol=1e-6)


def test_center_takes_the_patches_next_to_the_middle():
    made = Selector(num_chosen=4, method="center")
    how = {"rows": jnp.arange(2), "num_patches": 16, "step": jnp.zeros(()), "is_training": True}
    assert made.choose(None, slots=4, **how).indices.tolist() == [[5, 6, 9, 10]] * 2


def test_a_blind_selector_hides_every_patch():
    made = Selector(num_chosen=4, method="blind")
    how = {"rows": jnp.arange(2), "num_patches": 16, "step": jnp.zeros(()), "is_training": True}
    found = made.choose(None, slots=4, **how)
    assert (found.bias <= -1e9).all()
    assert not found.hard.any()


def test_soft_with_slots_for_the_chosen_patches_is_straight_through_until_the_temperature_is_at_its_last_value():
    scores = jax.random.normal(jax.random.key(0), (2, 16))
    how = {"rows": jnp.arange(2), "num_patches": 16, "slots": 4, "is_training": True}

    def chosen(method, scores, step):
        return Selector(num_chosen=4, method=method, temperature_steps=10).choose(scores, step=jnp.asarray(step), **how)

    def weighed(method, scores, step):
        return jnp.sum(chosen(method, scores, step).bias * jnp.arange(8.0).reshape(2, 4))

    def gradient(method, step):
        return jax.grad(lambda s: weighed(method, s, step))(scores)

    for step in (0, 9, 10):
        jax.tree.map(
            np.testing.assert_array_equal, chosen("soft", scores, step), chosen("straight_through", scores, step)
        )
    np.testing.assert_array_equal(gradient("soft", 9), gradient("straight_through", 9))
    assert np.abs(gradient("soft", 9)).max() > 0.1
    assert np.abs(gradient("straight_through", 10)).max() > 0.1
    assert np.abs(gradient("soft", 10)).max() == 0


@pytest.mark.covers("N11")
@pytest.mark.parametrize(
    ("method", "slots"),
    [
        ("soft", 16),
        *(pytest.param(m, n, marks=pytest.mark.slow) for m in ("gumbel", "straight_through") for n in (4, 16)),
    ],
)
def test_scores_have_a_gradient_under_a_frozen_decoder(method, slots):
    shallow = {
        "decoder": dataclasses.replace(subjects.DECODER, num_layers=1),
        "vision": dataclasses.replace(subjects.TOWER, num_layers=1),
    }
    model, batch = subjects.model(method, freeze=("vision", "decoder"), **shallow), subjects.batch(slots, rows=2)
    params = drawn(model.init, batch)
    trained = {name: {k: v for k, v in leaves.items() if "selector" in k} for name, leaves in params.items()}

    def loss(trained):
        whole = {name: {**leaves, **trained.get(name, {})} for name, leaves in params.items()}
        return model.loss(whole, model.init_carry(batch), jax.random.key(1), batch, is_training=True)[1].loss_sum

    both = jax.jit(jax.value_and_grad(loss))
    grads = both(trained)[1]["~"]
    assert all(np.isfinite(g).all() for g in grads.values())
    small = [name for name, g in grads.items() if not np.abs(g).max() > 1e-7]
    assert [name for name in small if not name.endswith("salience_bias")] == []  # z removes what all patches share
    if method == "soft":
        rng = np.random.default_rng(0)
        way = {"~": {k: rng.normal(size=g.shape).astype(np.float32) for k, g in grads.items()}}
        size = 3e-3 / np.sqrt(sum(np.sum(w**2) for w in way["~"].values()))
        ahead, back = (
            float(both({**trained, **jax.tree.map(lambda a, w, s=s: a + s * size * w, {"~": trained["~"]}, way)})[0])
            for s in (1, -1)
        )
        along = sum(float(np.sum(np.asarray(g) * way["~"][k])) for k, g in grads.items()) * size
        np.testing.assert_allclose((ahead - back) / 2, along, rtol=0.03)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "best"}, "method = 'best': expected one of straight_through"),
        ({"num_chosen": 0}, "num_chosen = 0: expected at least 1"),
        ({"temperature": (1.0, 0.0)}, "two numbers above 0"),
    ],
)
def test_wrong_settings_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        Selector(**{"num_chosen": 2, **changes})


def test_more_patches_than_there_are_and_wrong_slots_are_refused():
    made = Selector(num_chosen=17)
    with pytest.raises(UserError, match="num_chosen = 17 is above 16, the patches of an image"):
        made.check(num_patches=16, slots=16)
    with pytest.raises(UserError, match="leave 5 positions for an image, and the selector 'soft' needs 4, the chosen"):
        dataclasses.replace(made, num_chosen=4).check(num_patches=16, slots=5)
