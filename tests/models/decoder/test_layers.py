"""Decoders whose layers have different mixers and feed-forwards."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical
from core.errors import UserError
from models.agreement_subjects import random_batches
from models.decoder import rotary, transformer
from models.decoder.experts import Experts
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Part, Result, Sum
from models.families import _latent, granite
from models.mixers.block_sparse import BlockSparse
from models.mixers.gated_delta import GatedDelta
from models.mixers.s5 import S5
from tests.models.drawn import drawn

VOCAB = 59
BATCH = jax.tree.map(jnp.asarray, next(random_batches(VOCAB, steps=1, rows=2)))
PLAIN = transformer.Transformer(
    vocab_size=VOCAB, num_layers=4, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=2, dtype="float32"
)
SHALLOW = dataclasses.replace(PLAIN, num_layers=2)
ALTERNATING = dataclasses.replace(
    PLAIN,
    mixer=(*[Attention(window=8)] * 3, Attention()),
    feed_forward=(Mlp(), Experts(num_experts=4, top_k=2, load_balance_coef=0.1)),
)


DELTA = GatedDelta(key_heads=2, value_heads=2, key_dim=4, value_dim=4)


@dataclasses.dataclass(frozen=True)
class Summed(Part):
    """A feed-forward without a norm of its own, whose penalty is added to the loss."""

    name = "summed"

    def __call__(self, decoder, x, call):
        return Result(x, sums=jnp.sum(x.astype(jnp.float32) ** 2))

    def empty_sums(self):
        return jnp.zeros(())


@functools.cache
def params_of(model):
    """Initial parameters of which none is zero, not even scales and biases that start at zero."""
    return with_noise(jax.jit(model.init)(jax.random.key(0), BATCH))


@functools.cache
def drawn_params(model):
    """Parameters of about the same sizes, where values that a model starts with do not matter."""
    return with_noise(drawn(model.init, BATCH))


def with_noise(params):
    noise = lambda a: np.random.default_rng(a.size).normal(size=a.shape, scale=0.1).astype(a.dtype)  # noqa: E731
    return jax.tree.map(lambda a: a + noise(a), params)


@functools.cache
def logits_of(model):
    """The logits of a model as one compiled function for all tests."""
    return jax.jit(model.logits)


def check_generation(model, params, *, first=5, empty=2, atol=2e-5):
    """Logits after a prompt and after each id that follows, from states, are those of the full pass.

    `empty` slots before the rows have ids that must not matter.
    """
    ids = BATCH["inputs"][:, :12]
    batch = {name: a[:, :12] for name, a in BATCH.items()} | {
        "segment_ids": jnp.ones_like(ids),
        "positions": jnp.broadcast_to(jnp.arange(12), ids.shape),
    }
    padding, extend, found = jnp.full(len(ids), empty, jnp.int32), jax.jit(model.extend), []
    slots, cache = jnp.pad(ids, ((0, 0), (empty, 0)), constant_values=3), model.empty_cache(len(ids), 12 + empty)
    for start, end in [(0, empty + first), *((i, i + 1) for i in range(empty + first, empty + 12))]:
        logits, cache = extend(params, cache, slots[:, start:end], jnp.int32(start), padding)
        found.append(logits)
    full = jax.jit(model.logits)(params, batch)[:, first - 1 :]
    np.testing.assert_allclose(jnp.stack(found, axis=1), full, atol=atol)


@pytest.mark.slow  # test_experts.py has quick tests of its parts
def test_layers_alternate_between_feed_forwards():
    params = params_of(ALTERNATING)
    assert {"layers/block_0", "layers/block_1"} <= set(params)
    assert params["layers/block_0"]["gate"].shape == (2, 16, 24)
    assert params["layers/block_1"]["gate"].shape == (2, 4, 16, 24)
    out = jax.jit(lambda p: ALTERNATING.loss(p, (), None, BATCH)[1])(params)
    imbalance = out.metrics["experts/imbalance"]
    assert 1 <= imbalance.total / imbalance.weight <= 2  # a mean over the layers that have experts


@pytest.mark.slow
def test_layers_that_alternate_generate_what_the_full_pass_says():
    check_generation(ALTERNATING, params_of(ALTERNATING))


def test_layers_with_different_windows_have_their_parameters_in_the_same_arrays():
    near, far = Attention(window=8, rope_theta=100.0), Attention()
    made = dataclasses.replace(PLAIN, mixer=(near, near, far))
    assert (made.group, len(made.layer_kinds)) == (1, 3)
    assert [kind.mixers for kind in made.layer_kinds] == [(near,), (near,), (far,)]
    assert [one.theta for one in made.rotations] == [PLAIN.rope_theta, 100.0]
    assert jax.eval_shape(made.init, jax.random.key(0), BATCH) == jax.eval_shape(PLAIN.init, jax.random.key(0), BATCH)
    mixed = dataclasses.replace(PLAIN, mixer=(near, S5(states=8), far, S5(states=8)))
    assert (mixed.group, len(mixed.layer_kinds)) == (2, 4)
    assert [kind.module for kind in mixed.layer_kinds] == ["block_0", "block_1"] * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wider(Attention):
    """Attention with a setting on which parameters might depend, and one that is no hashable value."""

    more: int = 0

    def settings(self, decoder):
        return {**super().settings(decoder), "attention.more": [self.more]}


def test_a_kind_of_attention_with_more_settings_is_another_part():
    made = dataclasses.replace(PLAIN, mixer=(Wider(more=3, window=8), Attention()))
    assert made.group == 2
    assert made.settings()["attention.more"] == [3]
    assert dataclasses.replace(PLAIN, mixer=(Wider(more=3, window=8), Wider(more=3))).group == 1


def test_each_layer_attends_through_its_own_window():
    params = drawn_params(SHALLOW)
    found = {
        name: logits_of(dataclasses.replace(SHALLOW, mixer=mixer))(params, BATCH)
        for name, mixer in {
            "all": Attention(),
            "wide": Attention(window=BATCH["inputs"].shape[1]),
            "local": Attention(window=2),
            "first": (Attention(window=2), Attention()),
            "last": (Attention(), Attention(window=2)),
        }.items()
    }
    np.testing.assert_allclose(found["wide"], found["all"], atol=1e-5)
    names = [name for name in found if name != "wide"]
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert np.abs(found[one] - found[other]).max() > 1e-3, (one, other)


def test_a_layer_without_feed_forward():
    model = dataclasses.replace(PLAIN, num_layers=2, feed_forward=(None, Mlp()))
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    assert set(params["layers/block_0"]) == {"query", "key", "value", "output", "attention_norm"}
    assert (
        model.flops_per_token(8) == PLAIN.flops_per_token(8) / 2 - 6 * 3 * 16 * 24 + 6 * 16 * 128 / 2
    )  # half the layers, one without, whole head


PLANNER = 462_468_098  # parameters of the planner of the original, which the preset leaves out
REDUNDANT = 36 * (
    2 * 384 * 1536 + 2 * 384
)  # of each layer: two matrices that nothing reads, two vectors more than lambda


@pytest.mark.covers("N08", "N09")
@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "original"), [(32_000, 978_997_250), (50_257, 1_007_040_002)])
def test_the_long_context_preset_has_the_size_of_its_original(vocab_size, original):
    model = transformer.preset("valkyrie-long", vocab_size=vocab_size, vocab_multiple=1)
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == original - PLANNER - REDUNDANT


def test_equal_layers_repeat_after_one():
    same = dataclasses.replace(PLAIN, mixer=(Attention(), Attention()), feed_forward=(Mlp(),))
    assert same.settings() == PLAIN.settings()
    assert same.group == 1


def test_first_layers_take_the_place_of_those_of_the_pattern():
    sparse, windowed = Experts(num_experts=4, top_k=2), Attention(window=8)
    model = dataclasses.replace(
        PLAIN, num_layers=7, mixer=(windowed, Attention()), feed_forward=sparse, first_feed_forward=(Mlp(),) * 3
    )
    kinds = [model.layer_kind(layer) for layer in range(7)]
    assert [kind.feed_forward for kind in kinds] == [Mlp()] * 3 + [sparse] * 4
    assert [kind.mixers[0].window for kind in kinds] == [8, None, 8, None, 8, None, 8]
    assert [kind.is_first for kind in kinds] == [True] * 3 + [False] * 4
    assert (model.group, model.first_group, model.num_first_layers) == (1, 1, 3)
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    assert params["first_layers/block"]["down"].shape == (3, 24, 16)
    assert params["layers/block"]["down"].shape == (4, 4, 24, 16)
    small = model.shrink(dict.fromkeys(("kv_heads", "layers", "embed", "mlp", "heads", "head_dim", "expert"), 2))
    assert (small.num_layers, small.num_first_layers) == (3, 1)


def test_a_small_form_keeps_the_rounded_ratio_of_a_width_to_that_of_the_decoder():
    widths = [None, 24, 40, 48, 71, 12, 2]  # of a decoder of 24: ratios 1, 1, 5/3, 2, 2.96, 1/2 and 1/12
    parts = tuple(map(Mlp, widths))
    model = dataclasses.replace(PLAIN, num_layers=14, first_feed_forward=parts, feed_forward=parts)
    small = model.shrink(dict.fromkeys(logical.all_axes(), 3))
    assert small.mlp_dim == 48
    want = tuple(map(Mlp, [None, 48, 96, 96, 144, 48, 48]))
    assert (small.first_feed_forward, small.feed_forward) == (want, want)


def test_the_width_of_the_feed_forwards_is_a_setting():
    def width(*parts, **changes):
        return dataclasses.replace(PLAIN, feed_forward=parts, **changes).settings().get("mlp_dim")

    assert (width(Mlp()), width(Mlp(mlp_dim=24)), width(Mlp(mlp_dim=40))) == (24, 24, 40)
    assert width(Mlp(), Mlp(mlp_dim=40)) == (24, 40) * (PLAIN.num_layers // 2)
    assert width(None, Mlp(mlp_dim=40)) == 40
    assert width(Mlp(), first_feed_forward=(Mlp(mlp_dim=48),)) == (48, *(24,) * (PLAIN.num_layers - 1))
    assert width(None) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixer": "attention"}, r"mixer = 'attention': expected a mixer such as @s5\.S5\(\)"),
        ({"mixer": Sum((Attention(), Attention()))}, "a layer has two parts called 'attention'"),
        (
            {"mixer": Sum((Attention(), BlockSparse()))},
            "attention and block_sparse of one layer would share their matrices, such as 'query'",
        ),
        (
            {"mixer": Attention(), "feed_forward": BlockSparse()},
            "attention and feed_forward of one layer would share their matrices, such as 'query'",
        ),
        (
            {"mixer": DELTA, "feed_forward": DELTA},
            "gated_delta and feed_forward of one layer would share their matrices, such as 'delta_query'",
        ),
        *(
            ({"feed_forward": both}, "parts called 'feed_forward' have different settings, .* also needs a `norm`")
            for both in ((Summed(), DELTA), (DELTA, Summed()))
        ),
        ({"feed_forward": (S5(states=8), BlockSparse()), "mixer": S5(states=8), "keeps_states": True}, "feed_forward"),
        ({"tied": "False"}, "Transformer.tied = 'False': expected one of False, True"),
        ({"mixer": (Attention(), None)}, r"mixer = .*: expected a mixer"),
        ({"mixer": ()}, r"mixer = \(\): expected a mixer"),
        ({"feed_forward": (Mlp(), "moe")}, r"'moe'\): expected a part such as @experts\.Experts\(\), or None"),
        (
            {"feed_forward": (Experts(num_experts=2, top_k=1), Experts(num_experts=4, top_k=1))},
            "parts called 'experts' have different settings, but share sums",
        ),
        ({"feed_forward": (Mlp(), None, Mlp())}, "num_layers = 4 is not a multiple of 3, .* nearest: 3, 6"),
        ({"first_feed_forward": Mlp()}, r"first_feed_forward = Mlp\(mlp_dim=None\): expected a tuple of parts"),
        ({"first_feed_forward": (Mlp(),) * 4}, "first_feed_forward has 4 entries, and num_layers = 4: expected fewer"),
        (
            {"first_feed_forward": (Mlp(),), "feed_forward": (Mlp(), None)},
            "num_layers = 4 is not a multiple of 2 after 1 first layer, .* nearest: 3, 5",
        ),
        (
            {"first_feed_forward": (Experts(num_experts=2, top_k=1),)},
            "experts has losses or metrics, .* give these layers another first_mixer or first_feed_forward",
        ),
    ],
)
def test_wrong_patterns_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        *((Attention, wrong) for wrong in ({"window": 0}, {"window": 2.5}, {"rope_theta": math.inf})),
        *((Attention, wrong) for wrong in ({"rope_theta": "x"}, {"scale": -0.125}, {"scale": math.nan})),
        *((Attention, wrong) for wrong in ({"softcap": 0.0}, {"qk_norm": 1}, {"rotary_fraction": 1.5})),
        *((Attention, wrong) for wrong in ({"head_dim": 0}, {"head_dim": 8.0}, {"num_kv_heads": 0})),
        *((BlockSparse, wrong) for wrong in ({"softcap": 0.0}, {"qk_norm": "layer"}, {"block": 0}, {"seed": -1})),
    ],
)
def test_wrong_values_of_attention_are_errors(part, wrong):
    with pytest.raises(UserError, match=rf"{part.__name__}\.{next(iter(wrong))} = "):
        part(**wrong)


def test_layers_with_different_scores_have_their_parameters_in_the_same_arrays():
    scaled = Attention(scale=0.5)
    made = dataclasses.replace(PLAIN, mixer=(scaled, Attention(softcap=3.0)))
    assert (made.group, len(made.layer_kinds)) == (1, 2)
    assert [one.length for one in made.rotations] == [0.5**0.5, (PLAIN.head_width**-0.5) ** 0.5]
    same = dataclasses.replace(PLAIN, mixer=Attention(scale=PLAIN.head_width**-0.5))
    assert same.settings() == PLAIN.settings()
    assert dataclasses.replace(PLAIN, mixer=(Attention(qk_norm=True), Attention())).group == 2


def test_layers_without_rotary_embedding_have_their_parameters_in_the_same_arrays():
    still, half = Attention(rotary_fraction=0.0), Attention(rotary_fraction=0.5)
    made = dataclasses.replace(PLAIN, mixer=(still, half))
    assert (made.group, len(made.layer_kinds)) == (1, 2)
    assert [(one.width, one.length) for one in made.rotations] == [(4, 1.0)]
    assert dataclasses.replace(PLAIN, mixer=still).rotations == ()
    with pytest.raises(UserError, match=r"Attention\.rotary_fraction = 0\.4: rotates 3 of 8 dimensions"):
        dataclasses.replace(PLAIN, mixer=Attention(rotary_fraction=0.4))


def test_attention_without_rotary_embedding_does_not_depend_on_positions():
    params, later = drawn_params(SHALLOW), {**BATCH, "positions": 2 * BATCH["positions"] + 3}
    for fraction, depends in ((0.0, False), (0.5, True), (1.0, True)):
        model = dataclasses.replace(SHALLOW, mixer=Attention(rotary_fraction=fraction))
        moved = np.abs(logits_of(model)(params, later) - logits_of(model)(params, BATCH)).max()
        assert (moved > 1e-3) == depends, fraction


LOCAL = Attention(window=8, rope_theta=100.0, qk_norm=True, value_norm=True)
OWN = Attention(head_dim=12, num_kv_heads=1, values_are_keys=True, qk_norm=True, value_norm=True)
TWO_SIZES = dataclasses.replace(
    PLAIN, mixer=(LOCAL, OWN), layer_scale=True, rope_scaling=rotary.Proportional(fraction=0.5)
)


def test_layers_with_heads_of_another_size_generate_what_the_full_pass_says():
    params = drawn_params(TWO_SIZES)
    assert params["layers/block_0"]["value"].shape == (2, 16, 2, 8)
    assert params["layers/block_1"]["key"].shape == (2, 16, 1, 12)
    assert "value" not in params["layers/block_1"]
    for kind in TWO_SIZES.layer_kinds:
        made = params[f"layers/{kind.module}"]
        (part,) = kind.mixers
        assert part.work(TWO_SIZES, 4).matrices == sum(made[name][0].size for name in part.matrices if name in made)
    check_generation(TWO_SIZES, params)


SETTINGS = [{"rotary_fraction": 0.5}, {"window": 8, "softcap": 2.0}, {"scale": 0.7}, {"qk_norm": True}]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {name: value for one in SETTINGS for name, value in one.items()},
        *(pytest.param(one, marks=pytest.mark.slow) for one in SETTINGS),  # all of them together are quick
    ],
)
def test_heads_of_a_part_are_computed_as_those_of_the_decoder(settings):
    theirs = dataclasses.replace(SHALLOW, head_dim=12, num_kv_heads=1, mixer=Attention(**settings))
    ours = dataclasses.replace(SHALLOW, mixer=Attention(head_dim=12, num_kv_heads=1, **settings))
    params = drawn_params(theirs)
    np.testing.assert_array_equal(logits_of(ours)(params, BATCH), logits_of(theirs)(params, BATCH))
    assert ours.flops_per_token(16) == theirs.flops_per_token(16)
    assert jax.eval_shape(lambda: ours.empty_cache(2, 9)) == jax.eval_shape(lambda: theirs.empty_cache(2, 9))
    same = dataclasses.replace(theirs, mixer=Attention(head_dim=12, num_kv_heads=1, **settings))
    assert same.settings() == theirs.settings()
    assert same.rotations == theirs.rotations


def test_normalized_values_do_not_depend_on_their_length():
    params = drawn_params(TWO_SIZES)
    local, own = params["layers/block_0"], params["layers/block_1"]

    def logits(of_values, of_keys):
        longer = {"layers/block_0": {**local, "value": of_values * local["value"]}}
        longer |= {"layers/block_1": {**own, "key": of_keys * own["key"]}}  # which are values, too
        return logits_of(TWO_SIZES)(params | longer, BATCH)

    for lengths in ((9.0, 3.0), (3.0, 9.0)):
        np.testing.assert_allclose(logits(*lengths), logits(3.0, 3.0), atol=1e-4)


def test_a_scale_of_layers_multiplies_the_stream_and_is_frozen():
    model = dataclasses.replace(PLAIN, num_layers=1, layer_scale=True)
    params, specs = logical.abstract_init(model.init, jax.random.key(0), BATCH)
    assert not specs["layers/block"]["layer_scale"].trainable
    params = drawn_params(model)
    scale = params["layers/block"]["layer_scale"]
    one = {**params, "layers/block": {**params["layers/block"], "layer_scale": jnp.ones_like(scale)}}
    plain = dataclasses.replace(model, layer_scale=False)
    scaled, unscaled = jax.jit(model.residual)(params, BATCH), jax.jit(plain.residual)(one, BATCH)
    np.testing.assert_allclose(scaled, scale[0] * unscaled, rtol=1e-5)


@pytest.mark.parametrize("part", [Attention, BlockSparse])
@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({"num_kv_heads": 3}, {}, r"num_kv_heads = 3: Transformer\.num_heads = 2 is not a multiple of it"),
        ({"head_dim": 7}, {}, r"head_dim = 7 is odd"),
        ({"values_are_keys": True}, {"bias": "qkv"}, r"values_are_keys = True needs Transformer\.bias = 'none'"),
    ],
)
def test_heads_of_a_part_must_fit_the_decoder(part, settings, changes, says):
    with pytest.raises(UserError, match=rf"{part.__name__}\.{says}"):
        dataclasses.replace(PLAIN, mixer=(Attention(), part(**settings)), **changes)


def test_small_heads_of_a_part_differ_from_those_of_a_small_decoder():
    small = TWO_SIZES.shrink(dict.fromkeys(("kv_heads", "layers", "embed", "mlp", "heads", "head_dim"), 2))
    _, own = small.mixer
    assert (small.head_width, own.head_dim, small.num_kv_heads, own.num_kv_heads) == (8, 16, 2, 2)
    assert jax.eval_shape(small.init, jax.random.key(0), BATCH)["layers/block_1"]["key"].shape == (2, 16, 2, 16)


def test_proportional_rotation_turns_the_first_pairs_with_the_frequencies_of_the_whole_head():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 12))
    positions = jnp.arange(10).reshape(2, 5)
    whole = rotary.rotate(x, positions, theta=100.0)
    part = rotary.apply(x, rotary.tables(positions, 12, theta=100.0, scaling=rotary.Proportional(fraction=0.4)))
    turned = [0, 1, 6, 7]  # two of six pairs, i and i + 6
    np.testing.assert_allclose(part[..., turned], whole[..., turned], atol=1e-6)
    rest = [i for i in range(12) if i not in turned]
    np.testing.assert_array_equal(part[..., rest], x[..., rest])
    slower = rotary.tables(positions, 12, theta=100.0, scaling=rotary.Proportional(fraction=1.0, factor=2.0))
    linear = rotary.tables(positions, 12, theta=100.0, scaling=rotary.Linear(factor=2.0))
    np.testing.assert_array_equal(slower.sin, linear.sin)


@pytest.mark.parametrize("changes", [{"post_norm": "before"}, {"residual_scale": 0.0}, {"logit_scale": -1.0}])
def test_wrong_values_of_the_decoder_are_errors(changes):
    with pytest.raises(UserError, match=rf"Transformer\.{next(iter(changes))} = "):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_each_layer_has_its_own_scale_of_scores(positions):
    of_positions = {"positions": positions, "max_positions": 32}
    params = drawn_params(dataclasses.replace(SHALLOW, **of_positions))

    def logits(*scales):
        mixer = tuple(Attention(scale=scale) for scale in scales)
        return logits_of(dataclasses.replace(SHALLOW, mixer=mixer, **of_positions))(params, BATCH)

    usual = PLAIN.head_width**-0.5
    np.testing.assert_allclose(logits(usual, usual), logits(None), atol=1e-5)
    for scales in ((None, 1.0), (1.0, None), (1.0, 1.0)):
        assert np.abs(logits(*scales) - logits(None)).max() > 1e-3, scales


class Nameless(Part):
    pass


@dataclasses.dataclass
class Mutable(Part):
    name = "mutable"


@dataclasses.dataclass(frozen=True)
class Unnamed(Part):
    pass


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Nameless, "Nameless: a part is a frozen dataclass"),
        (Mutable, "Mutable: a part is a frozen dataclass"),
        (Unnamed, "Unnamed: a part has a name"),
    ],
)
def test_a_part_is_a_value_with_a_name(part, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(PLAIN, mixer=part())


def test_attention_in_place_of_a_feed_forward_is_rotated_too():
    model = dataclasses.replace(PLAIN, mixer=S5(states=8), feed_forward=Attention())
    assert model.rotations == PLAIN.rotations
    first = dataclasses.replace(PLAIN, mixer=S5(states=8), first_feed_forward=(Attention(),))
    assert first.rotations == PLAIN.rotations


def test_states_of_feed_forwards_without_a_norm_are_laid_out_by_their_own_parts():
    model = dataclasses.replace(PLAIN, feed_forward=(S5(states=8), DELTA))
    kinds = [type(state["feed_forward"]) for state in jax.eval_shape(lambda: model.empty_cache(2, 8))]
    assert kinds[:2] == kinds[2:]
    assert kinds[0] != kinds[1]


def test_heads_of_odd_size_need_learned_positions():
    odd = {"mixer": Attention(head_dim=5), "max_positions": 64}
    model = dataclasses.replace(PLAIN, positions="learned", **odd)
    assert jax.eval_shape(model.logits, jax.eval_shape(model.init, jax.random.key(0), BATCH), BATCH).shape[-1] == VOCAB
    with pytest.raises(UserError, match="head_dim = 5 is odd; rotary embeddings need an even size"):
        dataclasses.replace(PLAIN, **odd)


def test_a_small_form_has_long_rope_and_rotated_parts_that_fit_its_heads():
    factors = tuple(map(float, range(1, 49)))
    long = rotary.LongRope(short=factors, long=factors, original_length=8)
    multiples = dict.fromkeys(logical.all_axes(), 1)
    for mixer, width, kept in ((Attention(rotary_fraction=0.75), 128, 3), (Attention(), 96, 4)):
        model = dataclasses.replace(PLAIN, mixer=mixer, head_dim=width, rope_scaling=long)
        small = model.shrink(multiples)
        assert small.rope_scaling.short == small.rope_scaling.long == factors[:kept]
        jax.eval_shape(small.init, jax.random.key(0), BATCH)
    unused = dataclasses.replace(PLAIN, mixer=Attention(rope_theta=1e4), rope_scaling=long)
    assert unused.shrink(multiples).rope_scaling == long
    odd = dataclasses.replace(PLAIN, mixer=Attention(rotary_fraction=0.4), head_dim=80).shrink(multiples)
    assert odd.mixer.rotary_fraction == 0.5


def test_a_scale_of_logits_is_exported_exactly():
    for scale in (0.3, 0.7, 0.15, 1 / 1.7, 1 / 8, 0.1):
        written = granite.multipliers(dataclasses.replace(PLAIN, logit_scale=scale))
        assert 1 / written["logits_scaling"] == scale
    assert granite.multipliers(dataclasses.replace(PLAIN, logit_scale=1 / 1.7))["logits_scaling"] == 1.7


def test_a_decoder_with_other_attention_has_its_own_sources_in_a_folder_with_latent_attention():
    assert "query" in _latent.attention_sources(PLAIN, PLAIN.layer_kinds[0])


def test_settings_of_parts_of_one_name_are_listed_by_layer():
    layers = tuple(S5(states=states) for states in (8, 16, 8, 32))
    assert dataclasses.replace(PLAIN, mixer=layers).settings()["s5.states"] == (8, 16, 8, 32)
    assert dataclasses.replace(PLAIN, mixer=layers[:1]).settings()["s5.states"] == 8


def test_factors_of_long_rope_may_be_a_list_and_their_number_is_checked():
    made = rotary.LongRope(short=[1.0, 2.0], long=[3.0, 4.0], original_length=8)
    assert (made.short, made.long) == ((1.0, 2.0), (3.0, 4.0))
    with pytest.raises(UserError, match=r"LongRope has 2 short and 2 long factors: expected 4 of each"):
        made(jnp.ones(4), 1e4, jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(UserError, match=r"LongRope\.long = 0\.0: expected a finite number above 0"):
        rotary.LongRope(short=[1.0], long=[0.0], original_length=8)
