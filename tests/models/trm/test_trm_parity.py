"""The attention variant of the Tiny Recursive Model against its PyTorch reference, number by number.

The fixture holds what the unmodified reference computed in float32 (SamsungSAILMontreal/TinyRecursiveModels, revision
e7b6871, torch 2.13 on a CPU): weights, intermediate states, six steps with a carry that halts row by row, gradients,
four optimizer steps with their average, and an evaluation. A digest of a tensor t is [norm, sum, sum t_i cos(i)].
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, step
from core.types import IGNORED
from models import losses, trm
from models.decoder import rotary
from models.trm import halting, net

FIXTURE = np.load(pathlib.Path(__file__).parents[1] / "fixtures" / "trm_parity.npz")
MODEL = trm.TRM(
    vocab_size=11,
    embed_dim=64,
    num_heads=2,
    h_cycles=2,
    l_cycles=2,
    num_puzzles=5,
    puzzle_multiple=1,
    halt_max_steps=4,
    exploration=0.0,
    dtype="float32",
)
ORDER = [str(name).removeprefix("inner.") for name in FIXTURE["attn/param_order"]]
METRICS = [str(name) for name in FIXTURE["meta/metric_order"]]
LAYER = "L_level.layers.{}."
BATCHES = {
    name: {
        "inputs": jnp.asarray(FIXTURE[f"in/{name}/inputs"], jnp.int32),
        "labels": jnp.asarray(FIXTURE[f"in/{name}/labels"], jnp.int32),
        "puzzle_ids": jnp.asarray(FIXTURE[f"in/{name}/puzzle_identifiers"], jnp.int32),
    }
    for name in "AB"
}


READ = set()  # what `fixture` was asked for
ELSEWHERE = {"mid/rope_cos", "mid/rope_sin", "bf16/step1/logits"}  # what tests of their own compare


def fixture(key):
    READ.add(key)
    return FIXTURE[f"attn/{key}"]


def to_ours():
    """Our parameters; matrices turned from [out, in] to [in, ...]."""

    def get(name):
        return fixture(f"param/inner.{name}")

    def both(name, shape):
        return np.stack([get(LAYER.format(i) + name + ".weight").T.reshape(shape) for i in range(2)])

    params = {
        "~": {
            "embedding": get("embed_tokens.embedding_weight"),
            "unembedding": get("lm_head.weight").T,
            "halt_head": get("q_head.weight").T,
            "halt_bias": get("q_head.bias"),
            "h_init": fixture("buffer/inner.H_init"),
            "l_init": fixture("buffer/inner.L_init")[None],
            "puzzle_table": fixture("buffer/inner.puzzle_emb.weights"),
        },
        "layers/block": {
            "qkv": both("self_attn.qkv_proj", (64, 3, 2, 32)),
            "output": both("self_attn.o_proj", (2, 32, 64)),
            "gate_up": both("mlp.gate_up_proj", (64, 2, 256)),
            "down": both("mlp.down_proj", (256, 64)),
        },
    }
    return jax.tree.map(jnp.asarray, params)


def to_theirs(params):
    """Their trained tensors by name, in their layout."""
    params = jax.device_get(params)
    root, block = params["~"], params["layers/block"]
    named = {
        "embed_tokens.embedding_weight": root["embedding"],
        "lm_head.weight": root["unembedding"].T,
        "q_head.weight": root["halt_head"].T,
        "q_head.bias": root["halt_bias"],
    }
    for i in range(2):
        layer = LAYER.format(i)
        named[layer + "self_attn.qkv_proj.weight"] = block["qkv"][i].reshape(64, 192).T
        named[layer + "self_attn.o_proj.weight"] = block["output"][i].reshape(64, 64).T
        named[layer + "mlp.gate_up_proj.weight"] = block["gate_up"][i].reshape(64, 512).T
        named[layer + "mlp.down_proj.weight"] = block["down"][i].T
    return named


def digests(params):
    """[12, 3] in their order."""

    def one(tensor):
        t = np.asarray(tensor, np.float64).ravel()
        return [np.linalg.norm(t), t.sum(), (t * np.cos(np.arange(t.size))).sum()]

    named = to_theirs(params)
    return np.array([one(named[name]) for name in ORDER])


def apart(ours, theirs):
    """Largest difference over the largest entry, or over 1."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.max(np.abs(ours - theirs)) / max(1.0, np.max(np.abs(theirs)))


def digests_apart(params, theirs):
    """Largest difference of a digest over the norm of its tensor."""
    return np.max(np.abs(digests(params) - theirs) / np.maximum(theirs[:, :1], 1e-30))


def rate(peak):
    return optimizers.warmup_floor(peak=peak, warmup_steps=2, total_steps=10, floor=0.1)


TABLE_RATE = rate(5e-2)


def optimizer():
    dense = optimizers.adam_atan2(learning_rate=rate(1e-2), weight_decay=0.1)
    table = optimizers.with_table(dense=dense, learning_rate=TABLE_RATE, weight_decay=0.1)
    return optimizers.averaged(optimizer=table, decay=0.9)


GATES = {
    "embeddings": 1e-6,
    "first": 2e-5,
    "states": 1e-4,
    "logits 2": 1e-4,
    "logits 3": 5e-4,
    "q": 2e-3,
    "loss": 1e-4,
    "metrics": 1e-4,
    "halting": 0.0,
    "rates": 1e-6,
    "gradients": 2e-4,
    "params": 3e-4,
    "average": 3e-5,
    "table": 1e-7,
    "predictions": 0.0,
}


class Found(dict):
    """Worst measurement by name; `failed` are those beyond their gate."""

    def add(self, name, value):
        self[name] = max(self.get(name, 0.0), float(np.nan_to_num(value, nan=np.inf)))

    def failed(self):
        return {name: value for name, value in self.items() if value > GATES[name]}


def metric_vector(sums):
    return np.array([float(sums["accuracy"].weight), *(float(sums[m].total) for m in METRICS[1:])])


def frozen_steps(model, found, *, steps):
    """Weights stay, the carry goes on, batches alternate; gradients are those of the summed loss of each step."""

    def loss_sum(params, carry, batch):
        carry, out = model.loss(params, carry, jax.random.key(0), batch)
        outputs = model._heads(model._cast(params, batch), carry.states)
        return out.loss_sum, (carry, out, outputs)

    params, carry = to_ours(), model.init_carry(BATCHES["A"])
    run = jax.jit(jax.value_and_grad(loss_sum, has_aux=True))
    for number in range(1, steps + 1):
        (loss, (carry, out, outputs)), grads = run(params, carry, BATCHES["AB"[(number - 1) % 2]])
        here = f"frozen/step{number}"
        found.add("loss", apart(loss, fixture(f"{here}/loss")))
        found.add("metrics", apart(metric_vector(out.metrics), fixture(f"{here}/metrics")))
        for ours, theirs in ((carry.halted, "halted"), (carry.steps, "steps"), (out.extras["puzzle_table"], "cur_ids")):
            found.add("halting", np.any(np.asarray(ours) != fixture(f"{here}/{theirs}")))
        found.add("q", apart(outputs.q_halt, fixture(f"{here}/q_halt_logits")))
        found.add("q", apart(outputs.q_continue, fixture(f"{here}/q_continue_logits")))
        if number <= 3:
            found.add("first" if number == 1 else f"logits {number}", apart(outputs.logits, fixture(f"{here}/logits")))
        if number <= 2:
            for ours, theirs in ((carry.states.z_h, "z_H"), (carry.states.z_l[0], "z_L")):
                found.add("first" if number == 1 else "states", apart(ours, fixture(f"{here}/{theirs}")))
            found.add("gradients", digests_apart(grads, fixture(f"{here}/grad_digest")))
            compare_gradients(grads, np.asarray(out.extras["puzzle_table"]), here, found)


def compare_gradients(grads, ids, here, found):
    theirs = to_theirs(grads)
    for name in ORDER[:4]:
        found.add("gradients", apart(theirs[name], fixture(f"{here}/grad/inner.{name}")))
    trained = np.sqrt(sum(np.sum(np.square(g)) for g in theirs.values()))
    found.add("gradients", abs(trained / fixture(f"{here}/grad_global_norm") - 1))
    by_row = np.zeros((5, 64))
    np.add.at(by_row, ids, fixture(f"{here}/grad/local_puzzle_emb"))
    found.add("gradients", apart(grads["~"]["puzzle_table"], by_row))


def train_steps(model, found, *, steps, chosen):
    """Whole training steps: sign of the table, AdamATan2, average."""
    chosen = chosen.for_model(model, BATCHES["A"])
    state = step.create(model, chosen, to_ours(), BATCHES["A"])
    run = jax.jit(step.train_step(model, chosen, seed=0))
    for number in range(1, steps + 1):
        state, metrics = run(state, BATCHES["AB"[(number - 1) % 2]])
        here = f"train/step{number}"
        found.add("loss", apart(3 * metrics["loss"], fixture(f"{here}/loss")))
        found.add("metrics", apart(metric_vector(metrics), fixture(f"{here}/metrics")))
        found.add("rates", abs(metrics["learning_rate"] / fixture(f"{here}/lr") - 1))
        found.add("rates", abs(TABLE_RATE(jnp.int32(number - 1)) / fixture(f"{here}/lr_emb") - 1))
        found.add("halting", np.any(np.asarray(state.carry.halted) != fixture(f"{here}/halted")))
        found.add("halting", np.any(np.asarray(state.carry.steps) != fixture(f"{here}/steps")))
        found.add("table", apart(state.params["~"]["puzzle_table"], fixture(f"{here}/puzzle_emb")))
        found.add("params", digests_apart(state.params, fixture(f"{here}/param_digest")))
        averaged = chosen.evaluated(state.params, state.opt_state)
        found.add("average", digests_apart(averaged, fixture(f"{here}/ema_digest")))


def evaluation(model, found):
    params = to_ours()
    outputs = jax.jit(model.predict)(params, BATCHES["A"])
    out = jax.jit(model.evaluate)(params, jax.random.key(0), BATCHES["A"])
    found.add("q", apart(outputs.logits, fixture("eval/logits")))
    found.add("q", apart(outputs.q_halt, fixture("eval/q_halt_logits")))
    found.add("predictions", np.any(np.argmax(outputs.logits, -1) != fixture("eval/preds")))
    found.add("loss", apart(out.loss_sum, fixture("eval/loss")))
    found.add("metrics", apart(metric_vector(out.metrics), fixture("eval/metrics")))
    assert model.halt_max_steps == fixture("eval/n_steps")


def intermediate(model, found):
    """Row 0, first 24 positions, of the first step."""

    @jax.jit
    def run(params, batch):
        weights = model._cast(params, batch)
        x, start = model._embed(weights, batch), model._fresh(weights, batch)
        inject = start.z_l[0] + (start.z_h + x)
        cycle = net._cycle(functools.partial(model._net, weights.layers), start, x, model.recursion)
        return x, model._net(weights.layers[:1], inject), model._net(weights.layers, inject), cycle.z_h

    x, first, z_l, z_h = run(to_ours(), BATCHES["A"])
    found.add("embeddings", apart(x[0, :24], fixture("mid/input_embeddings")))
    found.add("first", apart(first[0, :24], fixture("mid/block0_call0")))
    found.add("first", apart(z_l[0, :24], fixture("mid/z_L_call0")))
    found.add("first", apart(z_h[0, :24], fixture("mid/z_H_cycle0")))


@pytest.mark.covers("N12")
def test_every_number_of_the_reference():
    found = Found()
    READ.clear()
    intermediate(MODEL, found)
    frozen_steps(MODEL, found, steps=6)
    evaluation(MODEL, found)
    train_steps(MODEL, found, steps=4, chosen=optimizer())
    assert not found.failed()
    assert set(found) == set(GATES)
    there = {key.removeprefix("attn/") for key in FIXTURE.files if key.startswith("attn/")}
    assert there == READ | ELSEWHERE | {"param_order"}


def test_rotary_angles():
    at = np.array([0, 1, 16, 96])
    ones = jnp.concatenate([jnp.ones((1, 97, 1, 16)), jnp.zeros((1, 97, 1, 16))], axis=-1)
    turned = rotary.rotate(ones, jnp.arange(97)[None], theta=1e4)[0, at, 0]
    np.testing.assert_allclose(turned[:, :16], fixture("mid/rope_cos")[:, :16], atol=1e-5)
    np.testing.assert_allclose(turned[:, 16:], fixture("mid/rope_sin")[:, 16:], atol=1e-5)


def test_bfloat16_is_as_far_as_bfloat16_is():
    narrow = dataclasses.replace(MODEL, dtype="bfloat16")
    once = dataclasses.replace(narrow, halt_max_steps=1)  # evaluation of one step is a step
    logits = jax.jit(once.predict)(to_ours(), BATCHES["A"]).logits
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(logits.astype(jnp.float32), fixture("bf16/step1/logits"), atol=0.1)


def test_log_stablemax_and_its_gradient():
    x = jnp.asarray(FIXTURE["unit/stablemax/x"])
    np.testing.assert_allclose(losses.log_stablemax(x, vocab_size=7), FIXTURE["unit/stablemax/logp"], atol=2e-6)
    for dtype in (jnp.float32, jnp.bfloat16):
        hard = jnp.array([1.0, 0.0, 1e4, -1e4, -1.0, 2.0], dtype)
        grads = jax.jit(jax.jacobian(lambda a: losses.log_stablemax(a, vocab_size=6)))(hard)
        assert np.all(np.isfinite(np.asarray(grads, np.float32)))
    slope = jax.grad(lambda a: losses.log_stablemax(jnp.array([0.0, 5.0]).at[0].add(a), vocab_size=2)[0])(0.0)
    assert float(slope) == pytest.approx(1 - 1 / 7)  # s'(0) / s(0) - s'(0) / sum s, with s' = 1 on both sides


# Single changes to what the model does, each of which a number of the fixture must refuse.


def tiled_prefix(monkeypatch):
    def embed(self, weights, data, original=trm.TRM._embed):
        x = original(self, weights, data)
        return x.at[:, : self.prefix_length].set(x[:, :1])

    monkeypatch.setattr(trm.TRM, "_embed", embed)


def no_scale_of_the_embedding(monkeypatch):
    embed = trm.TRM._embed
    monkeypatch.setattr(trm.TRM, "_embed", lambda self, w, data: embed(self, w, data) / 8)


def interleaved_rotary(monkeypatch):
    def interleaved(x, positions, *, theta, original=rotary.rotate):
        order = np.arange(x.shape[-1]).reshape(-1, 2).T.ravel()
        return original(x[..., order], positions, theta=theta)[..., np.argsort(order)]

    monkeypatch.setattr(rotary, "rotate", interleaved)


def gate_and_up_swapped(monkeypatch):
    block = net.attention_block
    monkeypatch.setattr(
        net, "attention_block", lambda w, x, **o: block({**w, "gate": w["up"], "up": w["gate"]}, x, **o)
    )


def carry_starts_at_zero(monkeypatch):
    refill = halting.refill
    zero = functools.partial(jax.tree.map, jnp.zeros_like)
    monkeypatch.setattr(halting, "refill", lambda carry, batch, fresh: refill(carry, batch, zero(fresh)))


def gradient_through_every_cycle(monkeypatch):
    monkeypatch.setattr(net.jax.lax, "stop_gradient", lambda a: a)


def mean_over_tokens(monkeypatch):
    score = halting.score

    def wrong(outputs, labels, **options):
        right = score(outputs, labels, **options)
        count = jnp.sum(labels != IGNORED, axis=-1)
        return right._replace(token_loss=right.token_loss * count * labels.shape[0] / jnp.sum(count))

    monkeypatch.setattr(halting, "score", wrong)


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [
        pytest.param(tiled_prefix, "first", marks=pytest.mark.slow),
        pytest.param(no_scale_of_the_embedding, "first", marks=pytest.mark.slow),
        (interleaved_rotary, "first"),
        pytest.param(gate_and_up_swapped, "first", marks=pytest.mark.slow),
        pytest.param(carry_starts_at_zero, "first", marks=pytest.mark.slow),
        pytest.param(gradient_through_every_cycle, "gradients", marks=pytest.mark.slow),
        pytest.param(mean_over_tokens, "gradients", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_model_is_refused(change, seen_in, monkeypatch):
    change(monkeypatch)
    found = Found()
    if seen_in == "first":
        logits = jax.jit(dataclasses.replace(MODEL, halt_max_steps=1).predict)(to_ours(), BATCHES["A"]).logits
        found.add("first", apart(logits, fixture("frozen/step1/logits")))
    else:
        frozen_steps(MODEL, found, steps=1)
    assert seen_in in found.failed()


@pytest.mark.slow  # a wrong rotary embedding is quick
def test_softmax_is_refused():
    found = Found()
    frozen_steps(dataclasses.replace(MODEL, probabilities="softmax"), found, steps=1)
    assert {"loss", "gradients"} <= set(found.failed())


@pytest.mark.slow
def test_another_epsilon_is_refused():
    found = Found()
    train_steps(dataclasses.replace(MODEL, norm_eps=1e-6), found, steps=4, chosen=optimizer())
    assert {"params", "table"} & set(found.failed())


@pytest.mark.parametrize("wrong", ["adamw", pytest.param("decay of every row", marks=pytest.mark.slow)])
def test_a_wrong_optimizer_is_refused(wrong, monkeypatch):
    found, chosen = Found(), optimizer()
    if wrong == "adamw":
        peak = rate(1e-2)
        chosen = optimizers.averaged(
            optimizer=optimizers.with_table(dense=optimizers.adamw(learning_rate=peak), learning_rate=peak), decay=0.9
        )
    else:
        monkeypatch.setattr("core.optimizers.rules._rows", lambda name, extras: jnp.arange(5))
    train_steps(MODEL, found, steps=2, chosen=chosen)
    assert {"params", "table"} & set(found.failed())
