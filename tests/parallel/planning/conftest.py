"""What arithmetic knows of a model, traced once."""

import types

import pytest

from core import optimizers
from launch.plans import facts
from models import transformer
from tasks import synthetic


@pytest.fixture(scope="session")
def facts_of():
    """`facts_of(model, slice_name="v4-32", rows=32, length=2048) -> Facts`."""

    def build(model, *, slice_name="v4-32", rows=32, length=2048, optimizer=None):
        vocab = getattr(model, "vocab_size", 32000)
        task = synthetic.random_tokens(vocab_size=vocab, length=length, num_streams=rows)
        experiment = types.SimpleNamespace(
            model=model,
            optimizer=optimizer or optimizers.adamw(learning_rate=lambda step: 1e-3),
            task=task,
            batch_size=rows,
            seed=0,
            slice=slice_name,
        )
        return facts.facts(experiment)

    return build


@pytest.fixture(scope="session")
def seven_b(facts_of):
    """Valkyrie-7B with 32 rows on a v4-32."""
    return facts_of(transformer.preset("7b", remat="full"))
