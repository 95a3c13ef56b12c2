"""What a trace says of a step: products, kernels and what is kept, against formulas by hand."""

import pytest

from models import transformer


@pytest.fixture(scope="module")
def sizes():
    return transformer.preset("7b")


def test_products_of_a_forward_pass(seven_b, sizes):
    d, f, v, layers, length = 4096, 11008, 32000, 32, 2048
    by_hand = 2 * length * (layers * (4 * d * d + 3 * d * f) + d * v)
    turns = 2 * 2 * length * d * 128 * layers  # rotary positions are a product with a matrix of ones
    assert by_hand <= seven_b.works["none"].forward_flops <= by_hand + turns


def test_what_full_rematerialisation_keeps(seven_b):
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
