"""A batch of images beside text: each field is laid out by its own axes, and trains as on one device."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from core import logical, optimizers, slices, stack
from core.batches import Field
from core.types import LossOutput
from parallel import agreement, strategies
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules

ROWS, LENGTH, HEIGHT, WIDTH, CHANNELS, VOCAB, EMBED = 8, 6, 5, 7, 3, 12, 16
SPEC = {
    "images": Field((ROWS, HEIGHT, WIDTH, CHANNELS), np.float32, ("batch", None, None, None)),
    "inputs": Field((ROWS, LENGTH), np.int32, ("batch", "length")),
    "targets": Field((ROWS, LENGTH), np.int32, ("batch", "length")),
    "brightness": Field((ROWS,), np.float32, ("batch",)),
}
BY_TWO = strategies.context(sequence=2)


@dataclasses.dataclass(frozen=True)
class Captions:
    """Adds a projected image to every token."""

    def init(self, rng, batch):
        return hk.transform(self._sums).init(rng, batch)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry, hk.transform(self._sums).apply(params, rng, batch)

    def _sums(self, batch):
        init = hk.initializers.RandomNormal(0.2)
        table = logical.param("table", (VOCAB, EMBED), ("vocab", "embed"), init)
        patch = logical.param("patch", (HEIGHT * WIDTH * CHANNELS, EMBED), (None, "embed"), init)
        light = batch["images"] * batch["brightness"][:, None, None, None]
        image = light.reshape(light.shape[0], -1) @ patch  # [B, D]
        x = logical.constrain(table[batch["inputs"]] + image[:, None], "batch", "length", None)  # [B, T, D]
        picked = jnp.take_along_axis(jax.nn.log_softmax(x @ table.T), batch["targets"][..., None], axis=-1)
        return LossOutput(-picked.sum(), jnp.float32(picked.size), {})


def batches():
    rng = np.random.default_rng(0)
    return [
        {
            "images": rng.normal(size=SPEC["images"].shape).astype(np.float32),
            "inputs": rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32),
            "targets": rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32),
            "brightness": rng.uniform(0.5, 1.0, ROWS).astype(np.float32),
        }
        for _ in range(2)
    ]


def program(tables, slice_name, *, model=Captions(), **options):
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2), eps=1e-4)
    bound = Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return bound.program(model, optimizer, SPEC, seed=0, **options)


@pytest.fixture(scope="module")
def alone():
    return agreement.run(program(strategies.data_parallel(), "v5e-1"), batches())


@pytest.mark.parametrize(
    ("tables", "images", "tokens"),
    [
        (strategies.data_parallel(), (2, 5, 7, 3), (2, 6)),
        (strategies.fsdp(), (2, 5, 7, 3), (2, 6)),
        (BY_TWO, (4, 5, 7, 3), (4, 3)),  # a height of 5 and a width of 7 need not divide over sequence = 2
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_images_beside_text_train_as_on_one_device(tables, images, tokens, alone):
    bound = program(tables, "v4-8")
    placed = bound.put(batches()[0])
    assert {s.data.shape for s in placed["images"].addressable_shards} == {images}
    assert {s.data.shape for s in placed["inputs"].addressable_shards} == {tokens}
    assert {s.data.shape for s in placed["brightness"].addressable_shards} == {images[:1]}
    found = agreement.compare(agreement.run(bound, batches()), alone)
    assert max(part.ulp for part in found.values()) <= 32, found  # rounding: orders of sums, over 2 steps of AdamW


def test_microbatches_of_images(alone):
    found = agreement.compare(
        agreement.run(program(strategies.data_parallel(), "v4-8", accum_steps=2), batches()), alone
    )
    assert max(part.ulp for part in found.values()) <= 32, found


def test_a_declared_axis_of_a_field_follows_the_table():
    logical.declare("scanlines", "lines of an image")
    spec = {**SPEC, "images": Field((ROWS, 4, 7, 3), np.float32, ("batch", "scanlines", None, None))}
    by_lines = strategies.override(BY_TWO, activation_rules={"scanlines": "sequence"})
    for tables, wanted in ((BY_TWO, P("fsdp", None, None, None)), (by_lines, P("fsdp", "sequence", None, None))):
        bound = Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
        assert bound.batch_shardings(spec)["images"].spec == wanted
    with pytest.raises(ValueError, match=r"images: shape .* scanlines = 5 does not divide over sequence = 2"):
        bound.batch_shardings({"images": dataclasses.replace(spec["images"], shape=(ROWS, 5, 7, 3))})


@dataclasses.dataclass(frozen=True)
class Deep(Captions):
    """Adds an image in every layer of a stack."""

    def _sums(self, batch):
        init = hk.initializers.RandomNormal(0.2)
        table = logical.param("table", (VOCAB, EMBED), ("vocab", "embed"), init)

        def block(x, side):
            images, brightness = side
            patch = logical.param("patch", (HEIGHT * WIDTH * CHANNELS, EMBED), (None, "embed"), init)
            light = images * brightness[:, None, None, None]
            return x + jnp.tanh(light.reshape(len(images), -1) @ patch)[:, None]

        layers = stack.layer_stack(block, 4)
        x = layers(table[batch["inputs"]], (batch["images"], batch["brightness"]))  # [B, T, D]
        picked = jnp.take_along_axis(jax.nn.log_softmax(x @ table.T), batch["targets"][..., None], axis=-1)
        return LossOutput(-picked.sum(), jnp.float32(picked.size), {})


@pytest.mark.slow
def test_images_pass_through_a_pipeline():
    tables = strategies.pipeline_fsdp(stage=2, schedule=schedules.gpipe(num_microbatches=4))
    alone = agreement.run(program(strategies.data_parallel(), "v5e-1", model=Deep()), batches())
    found = agreement.compare(agreement.run(program(tables, "v4-8", model=Deep()), batches()), alone)
    assert max(part.ulp for part in found.values()) <= 32, found
