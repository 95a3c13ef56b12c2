"""Tables against the arrays of a model: everything that does not fit is reported with a fix."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from core.batches import Field
from core.logical import Axes
from parallel import strategy
from parallel.strategies import REPLICATED

MESH = {"stage": 1, "data": 2, "fsdp": 4, "tensor": 4}
RULES = {**REPLICATED, "embed": "fsdp", "mlp": "tensor", "vocab": "tensor", "heads": ("tensor", "data")}


def fit(**arrays):
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in arrays.items()}
    axes = {name: Axes(names) for name, (_, names) in arrays.items()}
    return strategy.specs({"block": shapes}, {"block": axes}, RULES, mesh_shape=MESH, where="strategy 'mine'")["block"]


@pytest.mark.covers("M10", "M15")
def test_every_array_gets_its_spec():
    specs = fit(up=((8, 12), ("embed", "mlp")), scale=((8,), ("norm",)), query=((3, 8), ("layers", "heads")))
    assert specs == {
        "up": PartitionSpec("fsdp", "tensor"),
        "scale": PartitionSpec(None),
        "query": PartitionSpec(None, ("tensor", "data")),
    }


@pytest.mark.covers("M05", "M14")
def test_a_vocabulary_that_does_not_divide_is_reported_with_the_degrees_that_do():
    with pytest.raises(ValueError, match="strategy 'mine' does not fit") as error:
        fit(embedding=((50257, 8), ("vocab", "embed")))
    text = str(error.value)
    assert (
        "block/embedding: shape (50257, 8), axes (vocab, embed): vocab = 50257 does not divide over tensor = 4" in text
    )
    assert "Degrees that do: 1; or store it rounded up to 50260 (vocab_multiple);" in text
    assert "strategies.override(strategy, {'vocab': None})" in text
    assert fit(embedding=((50304, 8), ("vocab", "embed")))["embedding"] == PartitionSpec("tensor", "fsdp")


@pytest.mark.covers("M05")
def test_all_mismatches_are_reported_at_once_and_nothing_is_replicated_silently():
    with pytest.raises(ValueError) as error:
        fit(
            up=((6, 12), ("embed", "mlp")),
            query=((12,), ("heads",)),
            square=((8, 8), ("embed", "embed")),
            flat=((8,), ("embed", "mlp")),
            fine=((8,), ("embed",)),
        )
    text = str(error.value)
    assert "block/up: shape (6, 12), axes (embed, mlp): embed = 6 does not divide over fsdp = 4" in text
    assert "Degrees that do: 1, 2;" in text
    assert "block/query: shape (12,), axes (heads): heads = 12 does not divide over tensor x data = 8" in text
    assert (
        "block/square: shape (8, 8): array (embed, embed): mesh axis 'fsdp' is used twice, by 'embed' and by 'embed'"
        in text
    )
    assert "block/flat: shape (8,), axes (embed, mlp): 1 dimensions, but its axes name 2" in text
    assert "fine" not in text


def test_axes_of_batches_and_carries():
    field = Field((8, 4, 2), jnp.float32, ("batch", "length", None))
    assert strategy.batch_axes({"frames": field}) == {"frames": Axes(("batch", "length", None))}
    misspelled = Field((8, 4), jnp.int32, ("batch", "lenght"))
    with pytest.raises(
        ValueError, match="field 'inputs' of a batch: unknown logical axis 'lenght'; did you mean length"
    ):
        strategy.batch_axes({"inputs": misspelled})
    assert strategy.row_axes((8, 4)) == Axes(("batch", None))
    assert strategy.row_axes(()) == Axes(())
