"""Counts the bytes that a generated token reads from HBM."""

import jax
import numpy as np

from core import optimizers, slices
from models.decoder import experts, transformer
from models.decoder.layer_inputs import LayerInputs
from parallel import partitioner, strategies
from parallel.generation import decoding
from parallel.generation.decoding import Decoder
from parallel.planning import generation_cost
from tasks import streams

SIZES = {"num_layers": 2, "embed_dim": 64, "mlp_dim": 96, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 512}
TABLE = 4 * 512 * 64  # bytes of the embedding, and of the output matrix
EXPERTS = 4 * 2 * 8 * 3 * 64 * 96  # bytes of the experts of two layers


def read(strategy=None, **changes):
    at = slices.get("v4-8")
    bound = partitioner.Partitioner(strategy or strategies.data_parallel(), slice=at, devices=jax.devices())
    model = transformer.Transformer(**SIZES, dtype="float32", **changes)
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-3))
    program = bound.program(model, optimizer, streams.batch_spec(8, length=16), seed=0)
    params, _ = Decoder(program).abstract(8, 16)
    whole = sum(
        leaf.dtype.itemsize * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params)
    )
    return *generation_cost.read_bytes(params, program.axes.params), whole


def test_of_an_embedding_only_rows_are_read_unless_it_is_the_output_matrix():
    least, most, whole = read()
    assert least == most == whole - TABLE
    least, most, whole = read(tied=True)
    assert least == most == whole


def test_of_a_table_of_inputs_of_layers_only_rows_are_read():
    least, most, whole = read(tied=True, layer_inputs=LayerInputs(width=8))
    assert least == most == whole - 4 * 512 * 2 * 8


def test_not_all_experts_are_used_by_each_token(monkeypatch):
    least, most, whole = read(feed_forward=experts.Experts(num_experts=8, top_k=2))
    assert (most, most - least) == (whole - TABLE, EXPERTS)
    monkeypatch.setattr(decoding, "_REPLICATED_BYTES", 0)  # every chip would have all parameters of so small a model
    least, most, _ = read(strategies.experts(expert=4), feed_forward=experts.Experts(num_experts=8, top_k=2))
    assert most - least == EXPERTS / 4
