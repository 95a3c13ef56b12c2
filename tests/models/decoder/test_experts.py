"""Mixtures of experts against a direct computation, the properties of routing, and the errors of wrong settings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core import slices
from core.errors import UserError
from models import derivatives, lora
from models.agreement_subjects import random_batches
from models.decoder import expert_routing, experts, grouped_products, transformer
from models.decoder.expert_routing import Weights
from models.decoder.experts import Experts
from models.decoder.layers import Mlp
from parallel.compiled import compiling
from tests.models.decoder.test_layers import drawn_params

B, T, D, F, E, K = 3, 10, 8, 12, 5, 2


@pytest.fixture(scope="module")
def layer():
    """Inputs, matrices, and padding of different lengths."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    real = jnp.arange(T) < jnp.asarray([[T], [6], [9]])
    return array(B, T, D), Weights(array(D, E), array(E, D, F), array(E, D, F), array(E, F, D)), real


def run(layer, *, drops=True, activation="silu", **settings):
    x, weights, real = layer
    settings = Experts(**{"num_experts": E, "top_k": K, **settings})
    return jax.jit(lambda *arrays: expert_routing.mixture(settings, *arrays, activation=activation, drops=drops))(
        x, weights, real
    )


def every_expert(x, weights):
    """The outputs of all experts, [B, T, E, D]."""
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, weights.gate)) * jnp.einsum("btd,edf->btef", x, weights.up)
    return jnp.einsum("btef,efd->bted", hidden, weights.down)


def directly(layer, *, scores=jax.nn.softmax, normalized=True, keep=None):
    """The same layer with every expert computed for every token; `keep` [B, T, k] selects choices."""
    x, weights, real = layer
    found = scores(x @ weights.router)
    gates, chosen = jax.lax.top_k(found, K)
    gates = gates / gates.sum(-1, keepdims=True) if normalized else gates
    gates = jnp.where(real[..., None] if keep is None else keep, gates, 0.0)
    return jnp.einsum("btk,btke,bted->btd", gates, jax.nn.one_hot(chosen, E), every_expert(x, weights))


def with_gradients(form, *given):
    """The result of `form(x, weights)`, and the gradients of a weighted sum of it."""

    def everything(*given):
        y, back = jax.vjp(form, *given)
        return y, back(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    return jax.jit(everything)(*given)


@pytest.mark.covers("M19")
@pytest.mark.parametrize(
    ("capacity", "scores", "normalized"),
    [(None, "softmax", True), (E / K, "softmax", False), (E / K, "sigmoid", True)],
)
def test_both_forms_equal_the_direct_computation_with_all_gradients(layer, capacity, scores, normalized):
    direct = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[scores]

    def ours(x, weights):
        return run((x, weights, layer[2]), capacity_factor=capacity, scores=scores, normalized=normalized)[0]

    def theirs(x, weights):
        return directly((x, weights, layer[2]), scores=direct, normalized=normalized)

    found, expected = with_gradients(ours, *layer[:2]), with_gradients(theirs, *layer[:2])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6 * np.abs(other).max())
    assert not np.any(found[0][~np.asarray(layer[2])])  # padding goes to no expert


def test_groups_and_a_correction_choose_experts_and_leave_their_factors():
    rng = np.random.default_rng(4)
    shapes = {"router": (D, 6), "gate": (6, D, F), "up": (6, D, F), "down": (6, F, D), "correction": (6,)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    x, real = jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32), np.ones((B, T), bool)
    settings = {"num_experts": 6, "top_k": 2, "num_groups": 3, "top_groups": 2, "scores": "sigmoid", "scale": 1.5}

    def ours(weights):
        return run((x, weights, real), **settings, has_correction=True)[0]

    got, back = jax.vjp(ours, Weights(**arrays))
    scores = np.asarray(jax.nn.sigmoid(x @ arrays["router"]))
    corrected = (scores + np.asarray(arrays["correction"])).reshape(B, T, 3, 2)
    worst = corrected.sum(-1).argmin(-1)
    corrected = np.where(np.arange(3)[:, None] == worst[..., None, None], -np.inf, corrected).reshape(B, T, 6)
    chosen, by_scores = (np.argsort(-a, axis=-1)[..., :2] for a in (corrected, scores))
    assert np.any(chosen != by_scores)
    gates = np.take_along_axis(scores, chosen, axis=-1)
    gates = 1.5 * gates / gates.sum(-1, keepdims=True)
    outputs = np.asarray(jax.jit(every_expert)(x, Weights(**arrays)))
    want = np.einsum("btk,btke,bted->btd", gates, np.eye(6)[chosen], outputs)
    np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max())
    assert not np.any(back(np.ones_like(got))[0].correction)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_groups": 4}, "num_experts = 6 do not divide into groups of at least 2"),
        ({"num_groups": 6}, "num_experts = 6 do not divide into groups of at least 2"),
        ({"num_groups": 3, "top_groups": 4}, "top_groups = 4: expected from 2, which have top_k = 3"),
        ({"num_groups": 3, "top_groups": 1}, "top_groups = 1: expected from 2, which have top_k = 3"),
        ({"scale": 0.0}, "Experts.scale = 0.0"),
    ],
)
def test_groups_have_enough_experts(wrong, says):
    with pytest.raises(UserError, match=says):
        Experts(num_experts=6, top_k=3, **wrong)


@pytest.mark.parametrize("capacity", [None, E / K])
def test_biases_and_a_clamped_gate_equal_gpt_oss_written_out_with_all_gradients(layer, capacity):
    """Its router takes the softmax of the chosen scores alone: that of all, divided by the sum of the chosen."""
    rng = np.random.default_rng(2)
    biases = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((E,), (E, F), (E, F), (E, D)))
    given = layer[0], layer[1]._replace(biases=biases)
    gate = derivatives.ClampedGate(slope=1.5, limit=2.0)

    def ours(x, weights):
        return run((x, weights, layer[2]), capacity_factor=capacity, activation=gate)[0]

    def theirs(x, weights):
        of_router, of_gate, of_up, of_down = weights.biases
        scores, chosen = jax.lax.top_k(x @ weights.router + of_router, K)
        g = jnp.minimum(jnp.einsum("btd,edf->btef", x, weights.gate) + of_gate, 2.0)
        u = jnp.clip(jnp.einsum("btd,edf->btef", x, weights.up) + of_up, -2.0, 2.0)
        out = jnp.einsum("btef,efd->bted", g / (1 + jnp.exp(-1.5 * g)) * (u + 1), weights.down) + of_down
        gates = jnp.where(layer[2][..., None], jax.nn.softmax(scores), 0.0)
        return jnp.einsum("btk,btke,bted->btd", gates, jax.nn.one_hot(chosen, E), out)

    found, expected = with_gradients(ours, *given), with_gradients(theirs, *given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6 * np.abs(other).max())


def test_capacity_keeps_the_first_choices_of_each_row_and_counts_the_others(layer):
    x, weights, real = layer
    c = Experts(num_experts=E, top_k=K, capacity_factor=0.5).slots(T)
    chosen = np.asarray(jax.lax.top_k(x @ weights.router, K)[1])
    keep, dropped = np.zeros((B, T, K), bool), np.zeros(B)
    for b in range(B):
        taken = np.zeros(E, int)
        for t in np.flatnonzero(real[b]):
            for j, e in enumerate(chosen[b, t]):
                keep[b, t, j] = taken[e] < c
                dropped[b] += taken[e] >= c
                taken[e] += 1
    y, routing = run(layer, capacity_factor=0.5)
    np.testing.assert_allclose(y, directly(layer, keep=keep), atol=2e-5)
    np.testing.assert_array_equal(routing.dropped, dropped)
    assert 0 < dropped.sum() < K * real.sum()
    assert run(layer, capacity_factor=0.5, drops=False)[1].dropped.sum() == 0  # evaluation and generation drop nothing


def test_equal_scores_choose_the_experts_with_the_lowest_numbers(layer):
    x, weights, real = layer
    _, routing = run((x, weights._replace(router=jnp.zeros((D, E))), real))
    counts = np.asarray(real.sum(1), np.float32)
    np.testing.assert_array_equal(routing.choices, [[n, n, 0, 0, 0] for n in counts])  # three experts are empty
    np.testing.assert_allclose(routing.entropy, counts * np.log(E), rtol=1e-6)


def test_the_balancing_loss_of_a_row_has_the_unit_of_published_models(layer):
    x, weights, _ = layer
    real = jnp.ones((1, T), bool)
    _, routing = run((x[:1], weights, real))
    probabilities = np.asarray(jax.nn.softmax(x[0] @ weights.router))
    chosen = np.argsort(-probabilities, axis=-1)[:, :K]
    share = np.asarray([(chosen == e).sum() / T for e in range(E)])
    sums = routing.summed(jnp.ones((1, T)))
    np.testing.assert_allclose(sums["balance"], T * E * share @ probabilities.mean(0), rtol=1e-6)
    logits = np.asarray(x[0] @ weights.router)
    np.testing.assert_allclose(sums["z"], np.sum(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-5)


def model_of(**settings):
    sizes = {"num_layers": 2, "embed_dim": 16, "mlp_dim": 24, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 203}
    return transformer.Transformer(
        **sizes, dtype="float32", feed_forward=Experts(**{"num_experts": 4, "top_k": 2, **settings})
    )


def test_losses_are_added_and_metrics_say_where_tokens_go():
    batch = jax.tree.map(jnp.asarray, next(random_batches(203, steps=1, rows=4)))
    model = model_of(load_balance_coef=0.1, z_loss=0.01, capacity_factor=1.0, shared_mlp_dim=8)
    params = drawn_params(model)
    bare = model_of(capacity_factor=1.0, shared_mlp_dim=8)
    trained, without = jax.jit(lambda p: [m.loss(p, (), None, batch)[1] for m in (model, bare)])(params)
    means = {name: float(each.total / each.weight) for name, each in trained.metrics.items()}
    loss, cross_entropy = (float(out.loss_sum / out.weight_sum) for out in (trained, without))
    np.testing.assert_allclose(means["cross_entropy"], cross_entropy, rtol=1e-6)
    added = 0.1 * 2 * means["experts/imbalance"] + 0.01 * means["experts/z"]
    np.testing.assert_allclose(loss - cross_entropy, added, rtol=1e-5)
    assert 0 < means["experts/dropped"] < 1
    np.testing.assert_allclose(sum(means[f"experts/load_{e}"] for e in range(4)), 4, rtol=1e-6)
    assert 1 < means["experts/imbalance"] < 2
    assert 0 < means["experts/entropy"] < np.log(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide(Experts):
    name = "wide"


def test_two_kinds_of_experts_have_metrics_of_their_own():
    batch = jax.tree.map(jnp.asarray, next(random_batches(203, steps=1, rows=4)))

    def of_both(coef):
        kinds = (kind(num_experts=n, top_k=n // 2, load_balance_coef=coef) for kind, n in ((Experts, 4), (Wide, 2)))
        return dataclasses.replace(model_of(), feed_forward=tuple(kinds))

    first, second = of_both(0.1), of_both(0.0)
    params = drawn_params(first)
    trained, bare = jax.jit(lambda p: [m.loss(p, (), None, batch)[1] for m in (first, second)])(params)
    means = {name: float(each.total / each.weight) for name, each in trained.metrics.items()}
    np.testing.assert_allclose(means["cross_entropy"], bare.loss_sum / bare.weight_sum, rtol=1e-6)
    added = 0.1 * (2 * means["experts/imbalance"] + means["wide/imbalance"])
    np.testing.assert_allclose(trained.loss_sum / trained.weight_sum - means["cross_entropy"], added, rtol=1e-5)
    for name, count in (("experts", 4), ("wide", 2)):
        np.testing.assert_allclose(sum(means[f"{name}/load_{e}"] for e in range(count)), count, rtol=1e-6)
    assert "wide.num_experts" in first.settings()
    assert not [name for name in first.settings() if name.endswith("load_balance_coef")]


def test_evaluation_adds_no_losses_and_drops_nothing_so_that_padding_does_not_matter():
    ids = jax.random.randint(jax.random.key(1), (2, 32), 0, 203)

    def padded(length):
        is_real = jnp.broadcast_to(jnp.arange(length) < 16, (2, length))
        positions = jnp.broadcast_to(jnp.arange(length), is_real.shape)
        some = jnp.where(is_real, ids[:, :length], 0)
        fields = {"inputs": some, "targets": some, "segment_ids": is_real.astype(jnp.int32), "positions": positions}
        return {**fields, "weights": is_real.astype(jnp.float32)}

    model, dropless = (
        dataclasses.replace(model_of(capacity_factor=capacity, load_balance_coef=0.1), num_layers=1)
        for capacity in (0.5, None)
    )

    def computed(params, model, length):
        out = model.loss(params, (), None, padded(length), is_training=False)[1]
        assert not {"cross_entropy", "experts/dropped"} & set(out.metrics)
        return out.loss_sum, model.logits(params, padded(length))[:, :16]

    forms = (model, 16), (model, 32), (dropless, 16)
    found, longer, expected = jax.jit(lambda params: [computed(params, *form) for form in forms])(drawn_params(model))
    for other in (longer, expected):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5), found, other)


def test_flops_count_the_experts_of_a_token():
    dense = dataclasses.replace(model_of(), feed_forward=Mlp(), mlp_dim=2 * 24)
    routed = model_of()
    assert routed.flops_per_token(64) == dense.flops_per_token(64) + 6 * 2 * 16 * 4  # the router


def test_the_kernel_equals_the_product_of_groups_with_its_gradients():
    rng = np.random.default_rng(1)
    x, matrices, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((200, 16), (4, 16, 24), (200, 24))
    )
    sizes = jnp.asarray([100, 0, 60, 33])  # an empty group, and rows of no group
    in_groups = jnp.arange(200)[:, None] < jnp.sum(sizes)

    def of(product):
        def run(x, matrices):
            return jnp.where(in_groups, product(jnp.where(in_groups, x, 0.0), matrices), 0.0)

        def everything(x, matrices):
            y, back = jax.vjp(run, x, matrices)
            return y, *back(dy)

        return jax.jit(everything)(x, matrices)

    ours = of(lambda x, m: grouped_products.by_kernel(x, m, sizes, interpret=True))
    theirs = of(lambda x, m: jax.lax.ragged_dot(x, m, sizes))
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 0, 2, 0, 0, 1],  # a row at a time
        [0, 50, 3, 0, 17, 9],  # in blocks of eight, most of them with rows of the next group
        [0, 0, 0, 0, 0, 700],  # all of one group
        [0, 0, 0, 0, 0, 0],
    ],
)
@pytest.mark.parametrize(
    ("others", "dtype", "apart"),  # rows of no group; 1 ulp of 8 in bfloat16
    [
        (5, "float32", 1e-5),
        (0, "bfloat16", 0.05),
        pytest.param(0, "float32", 1e-5, marks=pytest.mark.slow),  # each value is quick with another
        pytest.param(5, "bfloat16", 0.05, marks=pytest.mark.slow),
    ],
)
def test_blocks_on_cpus_equal_the_product_of_groups_and_leave_its_gradients(sizes, others, dtype, apart):
    rng = np.random.default_rng(2)
    count = sum(sizes)
    rows = count + others
    x, matrices, dy = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, 16), (6, 16, 24), (rows, 24))
    )
    dy = dy.at[count:].set(0.0)

    def of(product):
        y = jax.jit(product)(x, matrices, jnp.asarray(sizes))
        back = jax.vjp(lambda x, matrices: product(x, matrices, jnp.asarray(sizes)), x, matrices)[1]
        return y[:count], back(dy)

    ours, theirs = of(grouped_products.by_blocks), of(jax.lax.ragged_dot)
    assert ours[0].dtype == theirs[0].dtype == dtype
    np.testing.assert_allclose(ours[0].astype("f4"), theirs[0].astype("f4"), atol=apart)
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])


def test_on_cpus_blocks_are_for_products_without_a_gradient():
    given = jnp.ones((8, 16)), jnp.ones((6, 16, 24)), jnp.full(6, 1)

    def lowered(function):
        return jax.jit(function).lower(*given).compile().as_text()

    def loss(x, matrices, sizes):
        return jnp.sum(grouped_products.grouped_product(x, matrices, sizes) ** 2)

    assert "while(" in lowered(grouped_products.grouped_product)
    assert "while(" not in lowered(jax.grad(loss, (0, 1)))


@pytest.mark.slow  # compiles for half a minute
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [2048, 1100])
def test_the_kernel_compiles_with_wide_matrices(dtype, rows):
    mesh = Mesh(np.asarray(compiling.devices_of(slices.get("v4-8"))).ravel()[:1], ("chip",))

    def gradients(x, matrices, sizes):
        y, back = jax.vjp(lambda x, matrices: grouped_products.grouped_product(x, matrices, sizes), x, matrices)
        return back(y)

    given = (((rows, 2048), dtype), ((4, 2048, 1536), dtype), ((4,), jnp.int32))
    shapes = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, PartitionSpec())) for each in given]
    lowered = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 3  # the product and its two gradients
    lowered.compile()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_experts": 4, "top_k": 5}, "Experts.top_k = 5, but num_experts = 4: expected from 1 to 4"),
        ({"num_experts": 0, "top_k": 1}, "Experts.num_experts = 0: expected an integer of at least 1"),
        ({"num_experts": 4, "top_k": 2, "shared_gate": True}, "there is no shared expert: set shared_mlp_dim"),
        ({"num_experts": 4, "top_k": 2, "separate_norms": True}, "there is no shared expert: set shared_mlp_dim"),
        ({"num_experts": 4, "top_k": 2, "capacity_factor": 0.0}, "expected a number above 0, or None for no limit"),
        (
            {"num_experts": 4, "top_k": 2, "capacity_factor": "1"},
            "Experts.capacity_factor = '1': expected a number above 0, or None",
        ),
        (
            {"num_experts": 4, "top_k": 2, "capacity_factor": True},
            "Experts.capacity_factor = True: expected a number above 0, or None",
        ),
        ({"num_experts": 4, "top_k": 2, "scores": "tanh"}, "expected one of softmax, sigmoid"),
        (
            {"num_experts": 4, "top_k": 2, "load_balance_coef": -1.0},
            "Experts.load_balance_coef = -1.0: expected a finite number of at least 0",
        ),
        (
            {"num_experts": 4, "top_k": 2, "z_loss": None},
            "Experts.z_loss = None: expected a finite number of at least 0",
        ),
        ({"num_experts": 4, "top_k": 2, "mlp_dim": 0}, "Experts.mlp_dim = 0: expected an integer of at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(UserError) as caught:
        Experts(**settings)
    assert says in str(caught.value)


def test_experts_have_biases_of_their_own_and_no_adapters():
    with pytest.raises(UserError, match=r"these experts have no biases.*has_biases = True"):
        dataclasses.replace(model_of(), bias="all")
    assert dataclasses.replace(model_of(has_biases=True), bias="all").bias == "all"
    with pytest.raises(UserError, match=r"separate_norms = True needs Transformer\.norm = 'rms', and it is 'layer'"):
        dataclasses.replace(model_of(shared_mlp_dim=8, separate_norms=True), norm="layer")
    with pytest.raises(UserError, match="this decoder has no gate"):
        dataclasses.replace(model_of(clamped_gate=derivatives.ClampedGate()), gated=False)
    with pytest.raises(UserError, match=r"ClampedGate\.limit = 0"):
        derivatives.ClampedGate(limit=0)
    with pytest.raises(UserError, match=r"gate, up, down are matrices of experts.*'query', 'key', 'value', 'output'"):
        lora.adapted(model=model_of())
    assert lora.adapted(model=model_of(), targets=("query", "value")).lora is not None


def test_settings_of_training_are_changed_in_a_copy():
    changed = experts.trained(model=model_of(), capacity_factor=1.25, load_balance_coef=0.02)
    assert changed.feed_forward == Experts(num_experts=4, top_k=2, capacity_factor=1.25, load_balance_coef=0.02)
    assert changed.settings() == model_of().settings()
    with pytest.raises(UserError, match=r"experts\.trained\.model is Transformer without experts"):
        experts.trained(model=dataclasses.replace(model_of(), feed_forward=Mlp()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_weighted_choices_is_that_of_jax(dtype):
    def plain(parts, gates):
        return jnp.sum(parts.astype(jnp.float32) * gates[..., None], axis=2).astype(parts.dtype)

    rng = np.random.default_rng(0)
    parts, gates, d = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 5, K, D), (2, 5, K), (2, 5, D)))
    results = [jax.vjp(one, parts.astype(dtype), gates) for one in (expert_routing._weighted, plain)]
    (out, back), (want, back_of_jax) = results
    np.testing.assert_array_equal(out, want)
    for got, expected in zip(back(d.astype(dtype)), back_of_jax(d.astype(dtype)), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-6)


def test_rows_that_the_kernel_leaves_undefined_reach_no_gradient(monkeypatch):
    """Pallas's interpreter fills them with NaN; the last two tokens are padding."""
    monkeypatch.setattr(
        grouped_products, "grouped_product", functools.partial(grouped_products.by_kernel, interpret=True)
    )
    gate, keys = derivatives.ClampedGate(), jax.random.split(jax.random.key(0), 5)
    settings = Experts(num_experts=2, top_k=1, has_biases=True, clamped_gate=gate)
    x, real = jax.random.normal(keys[0], (1, 8, 8)), jnp.arange(8)[None] < 6
    matrices = [jax.random.normal(key, (2, 8, 8)) for key in keys[2:]]
    biases = (jnp.zeros(2), *(jnp.zeros((2, 8)),) * 3)
    weights = Weights(jax.random.normal(keys[1], (8, 2)), *matrices, biases)

    def loss(weights):
        found, *_ = expert_routing.mixture(settings, x, weights, real, activation=gate, drops=False)
        return jnp.sum(found[real] ** 2)

    gradients = jax.jit(jax.grad(loss))(weights)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    assert np.any(jax.tree.leaves(gradients.biases)[1])
