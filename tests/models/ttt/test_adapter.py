"""The adapter: its start is the base, the base keeps its bits, and gates decide what is read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical
from core.errors import UserError
from models.agreement_subjects import random_batches
from models.decoder.transformer import Transformer
from models.ttt import adapter, gates
from parallel import strategies
from parallel.verify import agreement
from tests.lab.subjects import bind

BASE = Transformer(
    vocab_size=96,
    num_layers=2,
    embed_dim=32,
    mlp_dim=48,
    num_heads=8,
    num_kv_heads=4,
    dtype="float32",
    vocab_multiple=32,
)
MODEL = adapter.adapted(base=BASE, head_dim=4, num_heads=4, settings={"mini_batch": 4}, chunk=8, base_dtype="float32")
STRATEGIES = ["fsdp", "fsdp_tensor", "tensor", "zero1"]
STRATEGIES += ["sequence_tensor", "context", "context_ring", "pipeline", "pipeline_fsdp"]
GATED = dataclasses.replace(MODEL, gate=gates.Reconstruction(calibration=4))


def batch(rows=16):
    return next(random_batches(BASE.vocab_size, steps=1, rows=rows))


@pytest.fixture(scope="module")
def fresh():
    return jax.jit(MODEL.init)(jax.random.key(0), batch())


@pytest.fixture(scope="module")
def params(fresh):
    """Away from the start, at which the adapter adds 0."""
    ours = fresh["adapter"]
    return {**fresh, "adapter": {**ours, "output": 0.3 * jax.random.normal(jax.random.key(1), ours["output"].shape)}}


@functools.partial(jax.jit, static_argnums=0)
def loss(model, params, carry, batch):
    return model.loss(params, carry, jax.random.key(0), batch)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(model, params, batch):
    return model.evaluate(params, None, batch)


def base_loss(params, batch):
    """The cross-entropy of the base, chunk by chunk."""
    total = 0.0
    for begin in range(0, 24, 8):
        part = {name: jnp.asarray(value[:, begin : begin + 8]) for name, value in batch.items()}
        total += BASE.loss(params, (), None, part)[1].loss_sum
    return total


@pytest.mark.covers("N04")
def test_at_the_start_update_is_skip_and_skip_is_the_base(fresh):
    found = evaluate(MODEL, fresh, batch())
    np.testing.assert_array_equal(found.extras["loss_update"], found.extras["loss_skip"])
    np.testing.assert_allclose(found.loss_sum, jax.jit(base_loss)(fresh, batch()), rtol=1e-5)
    np.testing.assert_allclose(np.sum(found.extras["loss_skip"]), found.loss_sum, rtol=1e-6)
    assert found.extras["tokens"].shape == (16, 3)


@pytest.mark.covers("N04")
def test_only_the_adapter_is_trainable():
    _, specs = logical.abstract_init(MODEL.init, jax.random.key(0), batch())
    assert {module: {s.trainable for s in leaves.values()} for module, leaves in specs.items()} == {
        module: {module == "adapter"} for module in specs
    }


@pytest.mark.slow
def test_the_base_keeps_its_bits():
    found = agreement.run(bind(GATED, agreement.ONE_DEVICE, batch()), random_batches(BASE.vocab_size, steps=2))
    assert {module for module, leaves in found.params.items() for n in leaves if changed(found, module, n)} == {
        "adapter"
    }


def changed(trajectory, module, name):
    return not np.array_equal(trajectory.params[module][name], trajectory.fresh[module][name])


def trained(example, carry, layers):
    base = dataclasses.replace(BASE, num_layers=layers)
    model = dataclasses.replace(GATED, base=base, carry=carry, gating_scale=True)
    return agreement.run(bind(model, example, batch()), random_batches(BASE.vocab_size, steps=3))


@functools.cache
def on_one_device(carry, layers):
    return trained(agreement.ONE_DEVICE, carry, layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("carry", ["none", "document"])
def test_training_with_a_gate_agrees_with_one_device(name, carry):
    layers = 4 if name.startswith("pipeline") else BASE.num_layers  # one for each stage
    found = agreement.compare(trained(agreement.EXAMPLES[name], carry, layers), on_one_device(carry, layers))
    print(f"{name}, {carry}: at most {max(difference.ulp for difference in found.values()):.0f} ulp")
    # Inner models start near zero, and the norm of their outputs divides rounding errors by their size: up to 1,805
    # spacings were measured. A leaf that is wrong by 1 % differs by 80,000.
    assert max(difference.ulp for difference in found.values()) < 4000, found


def test_no_activations_of_the_base_are_kept(params):
    def of_adapter(ours):
        return MODEL.loss({**params, "adapter": ours}, (), None, batch())[1].loss_sum

    kept = jax.eval_shape(lambda ours: jax.vjp(of_adapter, ours)[1], params["adapter"])
    layers, widths = BASE.num_layers, {BASE.mlp_dim, 16 * 3}
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    assert shapes
    assert not [shape for shape in shapes if shape[:1] == (layers,) and set(shape[1:]) & widths]


def test_weights_go_on_in_a_document_and_nowhere_else(params):
    given = batch()
    other = {**given, "inputs": given["inputs"].copy()}
    other["inputs"][:, 0] = (given["inputs"][:, 0] + 1) % BASE.vocab_size
    for carry, same in (("none", True), ("document", False)):
        model = dataclasses.replace(MODEL, carry=carry)
        ours, theirs = (evaluate(model, params, b).extras for b in (given, other))
        np.testing.assert_array_equal(ours["loss_skip"][:, 1:], theirs["loss_skip"][:, 1:])
        equal = np.array_equal(ours["loss_update"][:, 1], theirs["loss_update"][:, 1])
        assert equal == same
        assert np.any(ours["loss_update"][:, 0] != theirs["loss_update"][:, 0])


@pytest.mark.covers("N05")
def test_gates_choose_between_the_losses_and_go_on_over_batches(params):
    given = batch()
    found = evaluate(MODEL, params, given).extras
    state, out = loss(GATED, params, GATED.init_carry(given), given)
    decisions = chosen(GATED.gate, found)
    assert 0 < decisions[4:].sum() < decisions[4:].size
    want = np.where(decisions.reshape(16, 3), found["loss_update"], found["loss_skip"]).sum()
    np.testing.assert_allclose(out.metrics["cross_entropy"].total, want, rtol=1e-5)
    assert out.metrics["update_rate"].total == decisions.sum()
    halves = [{name: value[part] for name, value in given.items()} for part in (slice(0, 8), slice(8, 16))]
    middle, _ = loss(GATED, params, GATED.init_carry(given), halves[0])
    after, _ = loss(GATED, params, middle, halves[1])
    assert int(after["chunks"]) == int(state["chunks"]) == 48
    np.testing.assert_allclose(after["threshold"], state["threshold"], rtol=1e-5)


def chosen(gate, found):
    values = jnp.asarray(found["step_0"]).reshape(-1)
    signals = gates.Signals(values, values, values, values)
    real = jnp.asarray(found["tokens"]).reshape(-1) > 0
    numbers = jnp.arange(len(values))
    return np.asarray(gates.decide_rows(gate, gate.init(), signals, real, jax.random.key(0), numbers=numbers)[1])


# Chunks of a document are one after the other, which is the harder case for the numbers that chance is drawn from.
@pytest.mark.parametrize("carry", [pytest.param("none", marks=pytest.mark.slow), "document"])
def test_decisions_by_chance_do_not_depend_on_accumulation(carry, params):
    model = dataclasses.replace(MODEL, gate=gates.Random(0.5), carry=carry)
    given = {**batch(), "row_ids": np.arange(16)}
    halves = [jax.tree.map(lambda a, part=part: a[part], given) for part in (slice(0, 8), slice(8, 16))]
    whole, *parts = (loss(model, params, (), each)[1] for each in (given, *halves))
    for name in ("update_rate", "reconstruction"):
        totals = [part.metrics[name].total for part in parts]
        np.testing.assert_allclose(whole.metrics[name].total, sum(totals), rtol=1e-5)
        assert totals[0] != totals[1]
    np.testing.assert_allclose(whole.loss_sum, sum(part.loss_sum for part in parts), rtol=1e-5)
    assert not model.couples_rows


def test_one_decision_from_the_mean_of_all_rows_couples_them():
    coupled = dataclasses.replace(MODEL, gate=gates.LossThreshold(5.0), per_batch=True)
    with pytest.raises(UserError, match="the loss of AdaptedDecoder couples them"):
        bind(coupled, agreement.EXAMPLES["data_parallel"], batch(), accum_steps=2)
    for gate, per_batch in ((gates.LossThreshold(5.0), False), (gates.UPDATE, True), (gates.Random(), True)):
        assert not dataclasses.replace(MODEL, gate=gate, per_batch=per_batch).couples_rows


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1 / 16])
def test_a_gate_by_loss_and_one_for_all_rows_skip(params, scale):
    given = batch() | {"weights": batch()["weights"] * scale}
    found = evaluate(MODEL, params, given).extras
    for gate, per_batch, rows in (
        (gates.LossThreshold(5.0), False, found["loss_skip"] / found["tokens"] > 5.0),
        (gates.Constant(False), False, np.zeros((16, 3), bool)),
        (gates.LossThreshold(100.0), True, np.zeros((16, 3), bool)),
    ):
        model = dataclasses.replace(MODEL, gate=gate, per_batch=per_batch)
        decided = jax.jit(model.decided)(params, gate.init(), jax.random.key(0), given)[1]
        np.testing.assert_array_equal(decided["updates"], rows)
        want = np.where(rows, found["loss_update"], found["loss_skip"])
        np.testing.assert_allclose(decided["losses"], want, rtol=1e-5)


@pytest.mark.slow
def test_losses_of_drawn_positions_are_those_of_supervised_ones(params):
    given = batch()
    model = dataclasses.replace(MODEL, loss_positions=3)
    outs = [loss(model, params, (), {**given, "row_ids": rows})[1] for rows in (np.arange(16), np.arange(16) + 16)]
    all_ = loss(MODEL, params, (), given)[1]
    expected = np.minimum(given["weights"].reshape(16, 3, 8).sum(axis=2), 3).sum()
    assert outs[0].weight_sum == outs[1].weight_sum == expected
    means = [float(out.metrics["cross_entropy"].total / out.weight_sum) for out in (*outs, all_)]
    assert means[0] != means[1]
    np.testing.assert_allclose(means[:2], means[2], rtol=0.1)
    same = jax.jit(functools.partial(model.loss, is_training=False))(params, (), jax.random.key(0), given)[1]
    np.testing.assert_allclose(same.loss_sum, all_.loss_sum, rtol=1e-6)


@pytest.mark.slow
def test_hidden_states_of_the_batch_replace_the_base(params):
    given = batch()
    cut = {name: value.reshape(48, 8) for name, value in given.items()}
    cut["positions"] = cut["positions"] - np.where(
        cut["segment_ids"] == cut["segment_ids"][:, :1], cut["positions"][:, :1], 0
    )
    hidden = np.asarray(BASE.hidden(params, cut)).reshape(16, 24, 32)
    ours = evaluate(MODEL, params, {**given, "hidden": hidden})
    np.testing.assert_allclose(ours.loss_sum, evaluate(MODEL, params, given).loss_sum, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk": 10}, "chunk = 10: expected a multiple of the 4 tokens of a mini-batch"),
        ({"loss_positions": 9}, "loss_positions = 9: expected from 1 to the chunk, 8"),
        ({"carry": "row"}, "expected one of none, document"),
        ({"base": dataclasses.replace(BASE, max_positions=4)}, "positions of the base are limited; expected at most 4"),
        ({"base_dtype": "int8"}, "expected 'bfloat16' or 'float32'"),
        ({"reconstruction_weight": -1.0}, "at least 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(MODEL, **change)


@pytest.mark.parametrize("setting", ["num_heads", "base_rate", "head_dim"])
def test_a_zero_is_not_taken_for_the_default(setting):
    with pytest.raises(UserError, match=rf"TTTConfig\.{setting} = 0"):
        adapter.adapted(base=BASE, **{setting: 0})


@pytest.mark.parametrize(
    ("chunk", "mini_batch", "loss_positions", "limit", "small"),
    [
        (512, 16, 128, None, (64, 16, 64)),
        (24, 8, None, None, (16, 8, None)),
        (8, 4, 3, 8, (8, 4, 3)),
        (96, 24, 96, 96, (64, 16, 64)),
        (100, 10, 70, 100, (64, 8, 64)),
    ],
)
def test_small_models_of_any_chunk_are_legal(chunk, mini_batch, loss_positions, limit, small):
    made = dataclasses.replace(
        MODEL,
        base=dataclasses.replace(BASE, max_positions=limit),
        layer=dataclasses.replace(MODEL.layer, mini_batch=mini_batch),
        chunk=chunk,
        loss_positions=loss_positions,
    ).shrink(dict.fromkeys(("kv_heads", "layers", "embed", "mlp", "heads", "head_dim", "expert"), 2))
    assert (made.chunk, made.layer.mini_batch, made.loss_positions) == small
    assert 128 % made.chunk == 0  # the positions of a smoke run


@pytest.mark.parametrize(
    ("options", "heads", "rate"),
    [
        ({"head_dim": 8}, 4, 1.0),
        ({"head_dim": 12, "inner": "mlp"}, 2, 0.1),
        ({}, 1, 1.0),  # heads of 64 in a width of 32
        ({"head_dim": 8, "num_heads": 3, "base_rate": 0.7}, 3, 0.7),
    ],
)
def test_heads_fill_the_width_of_the_base_and_rates_are_those_of_the_inner_model(options, heads, rate):
    layer = adapter.adapted(base=BASE, **options).layer
    assert (layer.num_heads, layer.base_rate) == (heads, rate)


def test_rows_that_chunks_do_not_divide_are_refused_before_anything_is_compiled():
    with pytest.raises(UserError, match="chunk = 16 does not divide the 24 positions of a row"):
        bind(dataclasses.replace(MODEL, chunk=16), agreement.Example("v5e-1", strategies.data_parallel()), batch())
