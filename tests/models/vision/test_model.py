"""A decoder that sees images: choices equal what they hide, segments stay apart, layouts agree."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from core import model_settings
from core.errors import UserError
from core.parameters import path_name
from models import lora
from models.agreement_subjects import OPTIMIZER
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Sum
from models.decoder.planner_config import Planner
from models.mixers.block_sparse import BlockSparse
from models.mixers.s5 import S5
from models.ttt import TTTConfig
from models.ttt.mixer import TTTMixer
from models.vision.model import PARTS, Placed, VisionLanguageModel, part_of
from models.vision.selector import METHODS, Chosen
from parallel.verify import agreement
from tests.models.drawn import drawn
from tests.models.vision import subjects


def evaluation(model):
    return jax.jit(lambda params, batch: model.evaluate(params, jax.random.key(0), batch))


class Soft(NamedTuple):
    """A model, its parameters and a batch, with compiled functions of parameters and batches."""

    model: Any
    params: Any
    batch: Any
    evaluated: Any
    logits: Any


@pytest.fixture(scope="module")
def soft():
    model, batch = subjects.model("soft"), subjects.batch(rows=4)
    return Soft(model, drawn(model.init, batch), batch, evaluation(model), jax.jit(model.logits))


def test_hidden_patches_count_for_nothing(soft):
    """Slots for all patches, of which all but K are hidden, give the loss of slots for K patches."""
    found, want = (soft.evaluated(soft.params, b) for b in (soft.batch, subjects.with_slots(soft.batch)))
    np.testing.assert_allclose(found.loss_sum, want.loss_sum, rtol=2e-6)
    assert (found.extras["chosen"] == want.extras["chosen"]).all()
    assert found.extras["chosen"].reshape(4, 2, -1).sum(-1).tolist() == [[subjects.CHOSEN] * 2] * 4


@pytest.mark.slow  # the same is quick above for attention in both directions
@pytest.mark.parametrize("images", [1, 2])
def test_hidden_patches_count_for_nothing_where_attention_is_causal(images):
    """Words come before each image; the logits of words are those with slots for all patches."""
    model = subjects.model("soft", causal=True)
    wide, narrow = (subjects.asked(slots, images=images) for slots in (subjects.PATCHES, subjects.CHOSEN))
    params = drawn(model.init, wide[0])
    found, want = (np.asarray(jax.jit(model.logits)(params, batch))[:, words] for batch, words in (narrow, wide))
    np.testing.assert_allclose(found, want, atol=2e-6 * np.abs(want).max())
    chosen = [evaluation(model)(params, batch).extras["chosen"] for batch, _ in (narrow, wide)]
    assert (chosen[0] == chosen[1]).all()


def positions(batch, chosen, *, images, shift, causal):
    """The positions that the decoder reads in a batch, of images with the patches `chosen`."""
    rows = len(batch["inputs"])
    slots = batch["slots"].reshape(rows, images, -1)
    given = Chosen(jax.numpy.array(chosen), None, jax.numpy.zeros(()))
    visual = jax.numpy.zeros((rows, slots[0].size, 1))
    read, *_ = Placed.of(batch, slots).decoded(batch, visual, given, shift=shift, causal=causal)
    return read["positions"].tolist()


@pytest.mark.parametrize("causal", [True, False])
def test_a_patch_has_the_position_of_its_place_after_all_patches_of_earlier_images(causal):
    batch, _ = subjects.asked(subjects.CHOSEN, images=2, rows=1)
    own = [0, 1, 2, 3, 4, 5, 18, 19, 22, 26, 29, 30, 36, 37, 38, 39]
    chosen = [[0, 1, 2, 3], [2, 6, 9, 10]] * 2
    assert positions(batch, chosen, images=4, shift=12, causal=causal) == [own + own]
    everything = [[0, 1, 2, 3]] * 4
    assert positions(batch, everything, images=4, shift=0, causal=causal) == batch["positions"].tolist()


@pytest.mark.parametrize("causal", [True, False])
def test_positions_are_counted_by_the_number_of_images_of_a_segment(causal):
    """A segment of two images, and one of a single image, which follows text; no third image."""
    segments = [1] * 7 + [2] * 6 + [0]
    batch = {
        "slots": np.array([[0, 1, 2, 3, 8, 9, -1, -1]]),
        "inputs": np.zeros((1, 14), np.int32),
        "segment_ids": np.array([segments]),
        "positions": np.array([[*range(7), *range(6), 0]], np.int32),
        "until": np.array([[5] * 6 + [6] + [11] * 5 + [12, 13]]),
    }
    found = positions(batch, [[0, 4], [1, 3], [2, 4], [0, 1]], images=4, shift=3, causal=causal)
    assert found == [[0, 4, 6, 8, 10, 11, 12, 0, 3, 5, 6, 7, 8, 0]]


def computed(jaxpr, result):
    """The equations of a jaxpr on which a result depends."""
    needed, found = {result}, []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            found.append(eqn)
            needed |= {v for v in eqn.invars if isinstance(v, jax.extend.core.Var)}
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_positions_are_picked_without_products_which_tpus_round_to_bfloat16(causal):
    """A TPU's product of float32 keeps 8 bits, and an image may have more than 256 patches."""

    def places(indices, visual):
        slots = batch["slots"].reshape(1, 4, -1)
        given = Chosen(indices, None, jax.numpy.zeros(()))
        read, inserted, _ = Placed.of(batch, slots).decoded(batch, visual, given, shift=1000, causal=causal)
        return read["positions"], inserted.values

    batch, _ = subjects.asked(subjects.CHOSEN, images=2, rows=1)
    visual = np.zeros((1, 16, 1), np.float32)
    jaxpr = jax.make_jaxpr(places)(np.zeros((4, 4), np.int32), visual).jaxpr
    positions, values = ([str(eqn) for eqn in computed(jaxpr, out)] for out in jaxpr.outvars)
    assert positions
    assert not [text for text in positions if "dot_general" in text]
    assert [text for text in values if "dot_general" in text]


@pytest.mark.parametrize(("kind", "images"), [("learned", 2), ("rotary", 1)])
def test_rows_whose_images_need_more_positions_than_the_decoder_has_are_refused(kind, images):
    """Two images of a row may be in one segment, where learned positions above the table would be read as its last."""
    batch = subjects.batch(subjects.CHOSEN, rows=1)  # two images of 16 patches, of which 4 are chosen
    length = batch["inputs"].shape[1]
    for most, fits in ((length + 12 * images, True), (length + 12 * images - 1, False)):
        limited = dataclasses.replace(subjects.DECODER, max_positions=most, positions=kind)
        model = subjects.model("center", decoder=limited)
        if fits:
            jax.eval_shape(model.init, jax.random.key(0), batch)
            continue
        with pytest.raises(UserError, match=f"all patches of {images} images? have {most + 1} positions.*{most}"):
            jax.eval_shape(model.init, jax.random.key(0), batch)


def test_a_row_and_its_segments_depend_on_nothing_else(soft):
    """Another image in the second segment and other rows change neither the choice nor the answer of the first."""
    batch = soft.batch
    images, words = batch["images"].copy(), batch["inputs"].copy()
    images[1:], images[0, 1] = 255 - images[1:], 255 - images[0, 1]
    words[1:, -2], words[0, -2] = 7, 8
    other = {**batch, "images": images, "inputs": words}
    size = subjects.PATCHES + subjects.QUESTION + subjects.ANSWER
    first, again = (np.asarray(jax.jit(soft.logits)(soft.params, b))[0] for b in (batch, other))
    np.testing.assert_array_equal(first[:size], again[:size])
    assert np.abs(first[size:] - again[size:]).max() > 1e-3
    chosen = [soft.evaluated(soft.params, b).extras["chosen"][0, : subjects.PATCHES] for b in (batch, other)]
    assert (chosen[0] == chosen[1]).all()


def test_the_question_is_seen_by_the_image_and_the_answer_by_nobody_before(soft):
    """A patch sees the question after it; no position sees the answer before its own."""
    batch = soft.batch
    last = subjects.PATCHES + subjects.QUESTION  # of the first segment: its answer
    before = np.asarray(jax.jit(soft.logits)(soft.params, batch))[:, :last]
    answer, question = batch["inputs"].copy(), batch["inputs"].copy()
    answer[:, last], question[:, last - 1] = 5, 5
    np.testing.assert_array_equal(
        np.asarray(jax.jit(soft.logits)(soft.params, {**batch, "inputs": answer}))[:, :last], before
    )
    changed = np.asarray(jax.jit(soft.logits)(soft.params, {**batch, "inputs": question}))[:, :last]
    assert np.abs(changed - before).max(axis=-1).min() > 0


def test_a_frozen_tower_has_no_backward_pass():
    """It is frozen by name, or because the decoder has adapters."""
    adapted = lora.adapted(model=subjects.DECODER, rank=2)
    backward = subjects.TOWER.flops(is_frozen=False) - subjects.TOWER.flops(is_frozen=True)
    for decoder, freeze, spared in ((subjects.DECODER, (), 0), (subjects.DECODER, ("vision",), 1), (adapted, (), 1)):
        tower = subjects.model(decoder=decoder, freeze=freeze).flops_per_token(40) - decoder.flops_per_token(40)
        np.testing.assert_allclose(tower * 40, subjects.TOWER.flops(is_frozen=False) - spared * backward)


def test_frozen_parts_have_no_trainable_parameter():
    model = subjects.model(freeze=("vision", "decoder"))
    data = subjects.batch(rows=16)
    program = agreement.bind(model, OPTIMIZER, agreement.ONE_DEVICE, data, axes=subjects.AXES)
    found = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(program.param_specs):
        found.setdefault(part_of(path_name(path)), set()).add((spec.trainable, spec.dtype))
    trained, frozen = {(True, "float32")}, {(False, "bfloat16")}
    assert found == {"vision": frozen, "decoder": frozen, "connector": trained, "selector": trained}
    assert set(found) == set(PARTS)


def trained(example, method):
    decoder = dataclasses.replace(subjects.DECODER, num_layers=4, num_heads=8, num_kv_heads=4)
    tower = dataclasses.replace(subjects.TOWER, num_layers=4, embed_dim=32, num_heads=8)
    model = subjects.model(method, decoder=decoder, vision=tower, freeze=("vision",), frozen_dtype="float32")
    data = [subjects.batch(subjects.CHOSEN, seed=seed) for seed in range(2)]
    return agreement.run(agreement.bind(model, OPTIMIZER, example, data[0], axes=subjects.AXES), data)


@functools.cache
def on_one_device(method):
    return trained(agreement.ONE_DEVICE, method)


@pytest.mark.covers("N11")
@pytest.mark.slow  # 16 devices
@pytest.mark.parametrize("name", agreement.EXAMPLES)
def test_layouts_agree_or_are_refused(name):
    """Gumbel noise depends on rows alone; the choice of a patch is equal under every layout."""
    example, method = agreement.EXAMPLES[name], "gumbel"
    if name == "context_ring":
        with pytest.raises(UserError, match="keys that travel around a ring"):
            trained(example, method)
        return
    if "pipeline" in name or "overlapped" in name:  # these compute no gradient of the side, which has biases of keys
        with pytest.raises(UserError, match=r"depends on parameters \(\[0\].prefix.key_bias\)"):
            trained(example, method)
        method = "center"
    found = agreement.compare(trained(example, method), on_one_device(method))
    # The second moment of the gain is the square of one sum over all patches, which cancels: 342 ulp measured.
    assert set(agreement.exceeding(name, found)) <= {"opt_state"}
    assert found["opt_state"].ulp < 1000


def test_inserted_vectors_are_refused_around_a_ring():
    """A tower without layers attends to nothing."""
    tower = dataclasses.replace(subjects.TOWER, num_layers=0, embed_dim=32)
    model = subjects.model("center", vision=tower, causal=True)
    with pytest.raises(UserError, match="inserted vectors, such as those of images, have no place in rows whose keys"):
        agreement.bind(
            model, OPTIMIZER, agreement.EXAMPLES["context_ring"], subjects.batch(subjects.CHOSEN), axes=subjects.AXES
        )


@pytest.mark.slow  # `soft` is in the quick tests above
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers(method):
    """`all` needs slots for all patches; the others also choose."""
    model = subjects.model(method)
    batch = subjects.batch(subjects.PATCHES if method == "all" else subjects.CHOSEN, rows=2)
    params = drawn(model.init, batch)
    carry, _ = jax.jit(lambda p, b: model.loss(p, model.init_carry(b), jax.random.key(0), b))(params, batch)
    assert (carry["step"] == 1) if model.selector.is_learned else carry == ()
    evaluated = evaluation(dataclasses.replace(model, kinds=("what", "where")))
    out = evaluated(params, {**batch, "kind": np.array([0, 1])})
    assert np.isfinite(out.loss_sum)
    number = {"all": subjects.PATCHES, "blind": 0}.get(method, subjects.CHOSEN)
    assert out.extras["chosen"].reshape(2, 2, -1).sum(-1).tolist() == [[number] * 2] * 2
    assert [float(out.metrics[k].weight) for k in ("exact", "exact_what", "exact_where")] == [2, 1, 1]


def test_the_settings_of_another_selector_differ():
    ours, theirs = subjects.model("soft"), subjects.model("gumbel")
    assert model_settings.differing_settings(theirs, ours) == {"selector.method": ("gumbel", "soft")}
    assert not model_settings.differing_settings(dataclasses.replace(ours, selector=None), ours)


def test_images_of_another_size_and_unknown_parts_are_refused(soft):
    model, batch = soft.model, soft.batch
    with pytest.raises(UserError, match="images of 12x12x3 uint8; the vision tower needs 16x16x3 uint8"):
        model.init(jax.random.key(0), {**batch, "images": batch["images"][:, :, 2:14, 2:14]})
    with pytest.raises(UserError, match="freeze: tower: expected some of vision, connector"):
        VisionLanguageModel(decoder=subjects.DECODER, vision=subjects.TOWER, freeze=("tower",))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"mixer": (Attention(), Sum((Attention(), S5(states=8))))}, "s5"),
        ({"mixer": BlockSparse()}, "block_sparse"),
        ({"mixer": TTTMixer(TTTConfig(inner="mlp", num_heads=4, head_dim=8))}, "ttt_mlp"),
        ({"feed_forward": (Mlp(), S5(states=8))}, "s5"),
        ({"planner": Planner(chunk=4), "mixer": S5(states=8)}, "planner, s5"),
    ],
)
def test_a_decoder_that_cannot_attend_both_ways_is_refused(changes, found):
    decoder = dataclasses.replace(subjects.DECODER, **changes)
    with pytest.raises(UserError, match=f"decoder has {found}: only attention can attend both ways"):
        subjects.model(decoder=decoder)
