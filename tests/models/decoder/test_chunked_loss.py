"""The loss in chunks of positions against the loss of all positions together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, slices
from core.errors import UserError
from models import lora, losses
from models.agreement_subjects import MODEL, random_batches
from models.decoder import chunked_loss
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.verify import agreement
from tests.lab.subjects import bind

ROWS, LENGTH, WIDTH, VOCAB = 8, 24, 12, 44  # 41 entries and 3 of padding
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
HEAD = {
    "scale": (1 + 0.1 * RANDOM.normal(size=WIDTH)).astype(np.float32),
    "matrix": RANDOM.normal(size=(WIDTH, VOCAB)).astype(np.float32),
}
SIDE = (
    RANDOM.integers(0, 41, (ROWS, LENGTH), dtype=np.int32),
    (np.arange(LENGTH) < np.arange(13, 13 + ROWS)[:, None]).astype(np.float32),
)


def sums(head, x, side):
    """A head with a scale, bounded logits and a sharded vocabulary."""
    matrix = logical.constrain(head["matrix"], "embed", "vocab")
    logits = 5.0 * jnp.tanh((x * head["scale"]) @ matrix / 5.0)
    return losses.cross_entropy(logical.constrain(logits, "batch", "length", "vocab"), *side, vocab_size=41)


def computed(fn, head=HEAD, x=X):
    def loss_sum(head, x):
        out = fn(head, logical.constrain(x, "batch", "residual_length", "embed"), SIDE)
        return 0.25 * out.loss_sum, out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss_sum, argnums=(0, 1), has_aux=True))(head, x)
    return jax.device_get((out, gradients))


def apart(ours, theirs):
    """The largest difference of a leaf, relative to its largest entry."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs)


@pytest.fixture(scope="module")
def whole():
    return computed(sums)


@pytest.mark.covers("T09")
@pytest.mark.parametrize("positions", [7, 100])
def test_chunks_of_any_size_give_the_loss_and_gradients_of_all_positions(positions, whole):
    fn = functools.partial(chunked_loss.total, sums, positions=positions)
    out, gradients = computed(fn)
    assert apart(out, whole[0]) <= 1e-6
    assert apart(gradients, whole[1]) <= 1e-5
    assert apart(jax.jit(fn)(HEAD, X, SIDE), whole[0]) <= 1e-6  # without a gradient, as in evaluation


@pytest.mark.covers("T09")
@pytest.mark.parametrize("name", ["sequence_tensor", "context"])
def test_chunks_under_a_strategy(name, whole):
    """Rows, positions and the vocabulary are sharded; 24 positions are 6 on a chip, or in a shard of the residual."""
    tables = {
        "sequence_tensor": strategies.sequence_tensor(tensor=4),
        "context": strategies.context(sequence=4),
    }[name]
    bound = Partitioner(tables, slice=slices.get("v4-32"), devices=jax.devices())
    with bound.tracing():
        out, gradients = computed(functools.partial(chunked_loss.total, sums, positions=4))
    assert apart(out, whole[0]) <= 1e-6
    assert apart(gradients, whole[1]) <= 1e-5


def test_the_logits_of_all_positions_are_never_held():
    def loss_sum(fn, head, x):
        return fn(head, x, SIDE).loss_sum

    def temporary(fn):
        step = jax.jit(jax.grad(functools.partial(loss_sum, fn), argnums=(0, 1)))
        return step.lower(HEAD, X).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * ROWS * LENGTH * VOCAB
    assert temporary(sums) > logits > temporary(functools.partial(chunked_loss.total, sums, positions=2))


def test_default_chunks():
    """Equal chunks of at most 2 GiB."""
    assert chunked_loss.default_positions(2, 2048, 32000) is None
    assert chunked_loss.default_positions(4, 1024, 2**17) is None
    assert chunked_loss.default_positions(2, 8192, 128256) == 2048
    bound = Partitioner(strategies.fsdp_tensor(tensor=4), slice=slices.get("v4-32"), devices=jax.devices())
    with bound.tracing():  # a quarter of the rows and of the vocabulary on each chip
        assert chunked_loss.default_positions(8, 8192, 4 * 128256) == 2048


@pytest.mark.parametrize("chunk", [-1, 2.5, True, "8"])
def test_a_chunk_that_is_no_count_is_refused(chunk):
    with pytest.raises(UserError, match=f"loss_chunk = {chunk!r}: expected None, 0 or a number of positions"):
        dataclasses.replace(MODEL, loss_chunk=chunk)


MODELS = {
    "separate": MODEL,
    "tied": dataclasses.replace(MODEL, tied=True, logit_softcap=3.0, norm="layer", scaled_embedding=True),
    "frozen": lora.adapted(model=MODEL, rank=4, base_dtype="float32"),
}


@functools.cache
def one_device(name):
    data = list(random_batches(MODEL.vocab_size, steps=3))
    return agreement.run(bind(MODELS[name], agreement.ONE_DEVICE, data[0]), data)


@pytest.mark.covers("T09")
@pytest.mark.slow  # the cases above split in the same way
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("separate", s) for s in agreement.EXAMPLES),
        ("tied", "context"),
        ("tied", "mesh3d"),
        ("tied", "pipeline_fsdp"),
        ("tied", "pipeline_fsdp_tensor"),
        ("frozen", "fsdp"),
        ("frozen", "pipeline_fsdp"),
    ],
)
def test_three_steps_in_chunks_under_every_strategy(name, strategy):
    data = list(random_batches(MODEL.vocab_size, steps=3))
    model = dataclasses.replace(MODELS[name], loss_chunk=5)
    found = agreement.run(bind(model, agreement.EXAMPLES[strategy], data[0]), data)
    assert not agreement.exceeding(strategy, agreement.compare(found, one_device(name)))
