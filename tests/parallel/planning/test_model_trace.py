"""Traces of models: products, kernels and saved arrays, against formulas by hand."""

import dataclasses

import haiku as hk
import jax.numpy as jnp
import pytest

from core import logical, optimizers, slices
from core.types import LossOutput
from models.decoder import experts, transformer
from models.decoder.layers import Attention
from parallel.planning import model_trace
from tasks import streams
from tests.haiku_model import HaikuModel


@pytest.fixture(scope="module")
def sizes():
    return transformer.preset("7b")


def work_of(model, *, length):
    """Returns the work and the saved arrays of a training step without rematerialization."""
    optimizer, spec = optimizers.adamw(learning_rate=optimizers.constant(1e-3)), streams.batch_spec(8, length=length)
    return model_trace.trace(model, optimizer, spec, slice=slices.get("v4-8"), remats=["none"]).works["none"]


def test_products_of_a_forward_pass(seven_b, sizes):
    d, f, v, layers, length = 4096, 11008, 32000, 32, 2048
    by_hand = 2 * length * (layers * (4 * d * d + 3 * d * f) + d * v)
    turns = 2 * 2 * length * d * 128 * layers  # rotary positions are a product with a matrix of ones
    assert by_hand <= seven_b.works["none"].forward_flops <= by_hand + turns


def test_arrays_saved_by_full_rematerialization(seven_b):
    loops = sorted((k for k in seven_b.works["full"].kept if k.copies > 1 and k.has_rows), key=lambda k: k.bytes)
    *lengths, inputs = loops
    assert sum(k.bytes for k in lengths) < inputs.bytes / 100
    assert inputs.axes.names == ("layers", "batch", "residual_length", "embed")
    assert inputs.bytes == 32 * 2048 * 4096 * 2


def test_logits_are_kept_once(seven_b):
    (logits,) = [k for k in seven_b.works["full"].kept if k.axes.names == ("batch", "length", "vocab")]
    assert (logits.bytes, logits.copies) == (2048 * 32000 * 4, 1)


def test_products_that_tensor_parallelism_sums(seven_b):
    found = {r.axis: r.bytes for r in seven_b.works["none"].reductions}
    assert found == {"heads": 32 * 2048 * 4096 * 2, "mlp": 32 * 2048 * 4096 * 2}


def test_attention_kernels_are_counted_apart(seven_b):
    causal = 2 * 2048 * 2048 * 4096 / 2 * 32  # one product of all layers
    assert seven_b.works["none"].kernel_flops / causal == pytest.approx(
        9, rel=0.05
    )  # 2 forward, 3 for dq, 4 for dk, dv
    assert seven_b.works["full"].kernel_flops / causal == pytest.approx(11, rel=0.05)  # 2 again
    assert seven_b.works["full"].forward_kernel_flops / causal == pytest.approx(2, rel=0.05)


def test_kernels_of_layers_with_a_window_are_short():
    """Two of three layers attend to 512 of 4,096 positions, in blocks of 512; the first 512 queries see fewer."""
    sizes = {"num_layers": 3, "embed_dim": 256, "mlp_dim": 512, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 512}
    model = transformer.Transformer(**sizes, mixer=(*[Attention(window=512)] * 2, Attention()), attention="splash")
    without = dataclasses.replace(model, mixer=Attention())
    flops = [work_of(one, length=4096) for one in (model, without)]
    product = 2 * 4096 * 256  # of all queries with one key
    of_windows = 2 * product * (2 * (512 - 32) + 4096 / 2)
    assert flops[0].forward_kernel_flops == pytest.approx(of_windows, rel=1e-5)
    assert flops[1].forward_kernel_flops == 2 * product * 3 * 4096 / 2
    assert flops[0].kernel_flops / flops[0].forward_kernel_flops == pytest.approx(9 / 2)


class Weighted(HaikuModel):
    """Its loss depends on the number of a row, which a batch has in `loss` and not in `init`."""

    def _loss(self, batch):
        rows = jnp.ones(len(batch["inputs"])) if hk.running_init() else batch["row_ids"]
        matrix = logical.param("matrix", (32, 32), ("embed", None), jnp.ones)
        outputs = batch["inputs"].astype(jnp.float32) @ matrix
        return LossOutput(jnp.sum(outputs * rows[:, None]), jnp.float32(1), {})


def test_a_loss_may_depend_on_the_numbers_of_rows():
    optimizer, spec = optimizers.adamw(learning_rate=optimizers.constant(1e-3)), streams.batch_spec(8, length=32)
    works = model_trace.trace(Weighted(), optimizer, spec, slice=slices.get("v4-8")).works
    assert works[None].forward_flops == 2 * 32 * 32


def test_weights_of_one_kind_of_layers_have_the_axes_of_the_stack():
    """Layers of two kinds save their cast weights apart: half of the stack each, sharded as the stack is."""
    sizes = {"num_layers": 4, "embed_dim": 128, "mlp_dim": 384, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 512}
    model = transformer.Transformer(**sizes, mixer=(Attention(window=32), Attention()))
    weights = [k for k in work_of(model, length=96).kept if not k.has_rows and k.elements == 2 * 128 * 384]
    assert {k.copies for k in weights} == {2}
    assert {k.axes.names for k in weights} <= {("layers", "embed", "mlp"), ("layers", "mlp", "embed")}


def test_slots_of_experts_belong_to_rows_though_one_dimension_has_the_slots_of_all_rows():
    sizes = {"num_layers": 2, "embed_dim": 128, "mlp_dim": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 512}
    model = transformer.Transformer(**sizes, feed_forward=experts.Experts(num_experts=8, top_k=2, capacity_factor=1.0))
    slots = [k for k in work_of(model, length=96).kept if k.axes.names[2:4] == ("expert", "batch")]
    hidden = [k for k in slots if k.axes.names[-1] == "mlp"]
    assert len(hidden) == 3  # gate, up and their product
    assert {k.elements for k in hidden} == {2 * 2 * 96 * 256}  # of a row: layers, choices, tokens, width
    assert {k.elements for k in slots if k.axes.names[-1] == "embed"} <= {2 * 2 * 96 * 128}


def test_choices_of_equal_work_are_one(seven_b):
    assert set(seven_b.distinct_remats("full")) == set(seven_b.works)  # 7B's all differ
    one, other = seven_b.works["none"], seven_b.works["full"]
    equal = dataclasses.replace(seven_b, works={"none": one, "dots": other, "full": other})
    assert equal.distinct_remats("none") == ("none", "dots")
    assert equal.distinct_remats("full") == ("full", "none")
