"""Traces of models, made once."""

import pytest

from core import optimizers, slices
from models.decoder import transformer
from parallel.planning import model_trace
from tasks import synthetic


@pytest.fixture(scope="session")
def trace_of():
    """`trace_of(model, slice_name="v4-32", rows=32, length=2048) -> ModelTrace`."""

    def build(model, *, slice_name="v4-32", rows=32, length=2048, optimizer=None, **options):
        vocab = getattr(model, "vocab_size", 32000)
        task = synthetic.random_tokens(vocab_size=vocab, length=length, num_streams=rows)
        optimizer = optimizer or optimizers.adamw(learning_rate=lambda step: 1e-3)
        return model_trace.trace(model, optimizer, task.spec(rows), slice=slices.get(slice_name), **options)

    return build


@pytest.fixture(scope="session")
def seven_b(trace_of):
    """Valkyrie-7B with 32 rows on a v4-32."""
    return trace_of(transformer.preset("7b", remat="full"))
