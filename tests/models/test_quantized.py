"""Products in int8 and FP8 against the same rounding in NumPy; layouts agree; single bytes are what is gathered."""

import collections
import dataclasses
import re
import sys

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from core import slices
from core.errors import UserError
from models import agreement_subjects, lora, quantized
from parallel import strategies
from parallel.compiled import analysis, compiling
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules
from parallel.planning import model_trace
from tasks import streams

MODEL = dataclasses.replace(agreement_subjects.MODEL, quantization="int8")
AXES = ("embed", "heads", "head_dim")


def rounded(x, over):
    """Integers times their scale, in float64; 127.5 is the bound of the values that are rounded to 127."""
    scale = np.abs(x).max(over, keepdims=True) / 127.5
    return np.clip(np.rint(x / scale), -128, 127) * scale


def in_fp8(x, over, dtype):
    """x in FP8 times its scale, in float64."""
    scale = np.abs(x).max(over, keepdims=True) / float(jnp.finfo(dtype).max)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def test_fp8_rounds_values_to_three_bits_and_gradients_to_two():
    random = np.random.default_rng(0)
    x, w, dy = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 24), (24, 3, 8), (2, 5, 3, 8)))
    got, back = jax.vjp(lambda x, w: quantized.product("fp8", "btd,dhk->bthk", AXES, x, w), x, w)
    dx, dw = back(jnp.asarray(dy))
    values, gradients = jnp.float8_e4m3fn, jnp.float8_e5m2
    want = np.einsum("btd,dhk->bthk", in_fp8(x, -1, values), in_fp8(w, 0, values))
    # A value at a tie of two FP8 numbers may go either way by the last bit of its scale.
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    back_want = np.einsum("bthk,dhk->btd", in_fp8(dy, (2, 3), gradients), in_fp8(w, (1, 2), values))
    assert np.linalg.norm(dx - back_want) < 0.01 * np.linalg.norm(back_want)
    np.testing.assert_allclose(dw, np.einsum("btd,bthk->dhk", x, dy), atol=2e-5)
    exact = (np.einsum("btd,dhk->bthk", x, w), np.einsum("bthk,dhk->btd", dy, w))
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip((got, dx), exact, strict=True)]
    assert 0.02 < errors[0] < 0.05
    assert 0.04 < errors[1] < 0.08


@pytest.mark.parametrize("name", ["v4-8", "v5e-8", "v6e-8", "a100:2"])
def test_chips_without_fp8_are_refused(name):
    model = dataclasses.replace(MODEL, quantization="fp8")
    with pytest.raises(
        UserError, match=rf"{name[:2]}\w* has no products in FP8.*one of tpu7x, .*h100.*'int8' or 'none'"
    ):
        bind(ONE if ":" in name else strategies.fsdp(), name, model=model)


def test_product_and_gradients_are_those_of_rounded_operands():
    random = np.random.default_rng(0)
    x, w, dy = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 24), (24, 3, 8), (2, 5, 3, 8)))
    # The largest of each row and column is positive: -127.5 is a tie, which the last bit of the scale decides.
    x[..., 0] = w[0] = w[:, 0, 0] = dy[..., 0, 0] = 5
    got, back = jax.vjp(lambda x, w: quantized.product("int8", "btd,dhk->bthk", AXES, x, w), x, w)
    dx, dw = back(jnp.asarray(dy))
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    want = np.einsum("btd,dhk->bthk", rounded(x, -1), rounded(w, 0))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("bthk,dhk->btd", rounded(dy, (2, 3)), rounded(w, (1, 2))), atol=2e-5)
    np.testing.assert_allclose(dw, np.einsum("btd,bthk->dhk", x, dy), atol=2e-5)
    exact = np.einsum("btd,dhk->bthk", x, w)
    assert 0.002 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.02


def test_a_row_of_zeros_and_one_large_value_stay_apart():
    x = np.ones((1, 3, 4), np.float32)
    x[0, 1], x[0, 2, 0] = 0, 1e4
    got = np.asarray(quantized.product("int8", "btd,df->btf", ("embed", "mlp"), jnp.asarray(x), jnp.eye(4)))
    np.testing.assert_allclose(got[0, 0], x[0, 0], rtol=0.01)  # scaled apart from the row with the large value
    np.testing.assert_array_equal(got[0, 1], 0)
    np.testing.assert_allclose(got[0, 2, 0], 1e4, rtol=0.01)


def bind(tables, slice_name="v4-16", model=MODEL, devices=None):
    chips = slices.get(slice_name)
    at = Partitioner(tables, slice=chips, devices=devices or jax.devices()[: chips.devices])
    spec = streams.batch_spec(agreement_subjects.ROWS, length=agreement_subjects.LENGTH)
    return at.program(model, agreement_subjects.OPTIMIZER, spec, seed=0)


def losses(program, steps=4, start=None):
    state, found = program.init() if start is None else jax.tree.map(jnp.copy, start), []
    for batch in agreement_subjects.batches_for(agreement_subjects.MODEL, steps=steps):
        state, metrics = program.train_step(state, program.put(batch))
        found.append(float(metrics["loss"]))
    return np.array(found)


ONE = strategies.data_parallel()
LAYOUTS = {
    "fsdp": strategies.fsdp(),
    "fsdp_tensor": strategies.fsdp_tensor(tensor=2),
    "sequence_tensor": strategies.sequence_tensor(tensor=2),
    "pipeline": strategies.pipeline_fsdp(stage=2, schedule=schedules.gpipe(num_microbatches=2)),
    "fsdp_overlapped": strategies.fsdp(overlap_reduction=True),
}


@pytest.fixture(scope="module")
def one():
    return bind(ONE, "cpu:1")


@pytest.fixture(scope="module")
def start(one):
    """The first state on one device, which is the same with every quantization."""
    return one.init()


@pytest.fixture(scope="module")
def on_one_device(one, start):
    return losses(one, start=start)


@pytest.mark.parametrize(
    "layout", [n if n == "fsdp_tensor" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_layouts_agree(layout, on_one_device):
    """A sum in another order moves some values over a boundary of rounding: measured up to 1.1e-4."""
    np.testing.assert_allclose(losses(bind(LAYOUTS[layout])), on_one_device, rtol=3e-4)


def test_training_follows_the_usual_products(on_one_device, start):
    usual = losses(bind(ONE, "cpu:1", agreement_subjects.MODEL), start=start)
    fp8 = losses(bind(ONE, "cpu:1", dataclasses.replace(MODEL, quantization="fp8")), start=start)
    for other in (on_one_device, fp8):
        assert np.all(other != usual)
        np.testing.assert_allclose(other, usual, rtol=0.01)


# test_training_follows_the_usual_products is quick: a whole run in float32.
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"remat": "dots"}, marks=pytest.mark.slow),
        pytest.param({"lora": lora.Lora(rank=2, alpha=4.0, targets=("query", "down"))}, marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "dots", "lora"],
)
def test_gradients_with_other_settings_follow_the_usual_products(changes):
    model = dataclasses.replace(MODEL, num_layers=1, **changes)
    usual = dataclasses.replace(model, quantization="none")
    (batch,) = agreement_subjects.batches_for(agreement_subjects.MODEL, steps=1)
    params = model.init(jax.random.key(0), batch)

    def gradient(model):
        def loss(params):
            trained = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if a.dtype == jnp.bfloat16 else a, params)
            _, out = model.loss(trained, (), jax.random.key(1), batch, is_training=True)
            return out.loss_sum / out.weight_sum

        return jax.flatten_util.ravel_pytree(jax.jit(jax.grad(loss))(params))[0].astype(jnp.float32)

    got, want = gradient(model), gradient(usual)
    assert 0 < jnp.linalg.norm(got - want) / jnp.linalg.norm(want) < 0.1


@pytest.mark.slow
def test_dots_saves_products_in_int8():
    def kept(remat):
        model = dataclasses.replace(MODEL, remat=remat)
        known = model_trace.trace(
            model,
            agreement_subjects.OPTIMIZER,
            streams.batch_spec(agreement_subjects.ROWS, length=agreement_subjects.LENGTH),
            slice=slices.get("v4-16"),
            remats=[remat],
        )
        return known.works[remat]

    assert kept("full").row_bytes < kept("dots").row_bytes
    assert kept("dots").flops < kept("full").flops


@pytest.mark.parametrize(
    ("slice_name", "choice", "dtypes"),
    [
        pytest.param("v5p-8", "int8", ("s8", "s8"), marks=pytest.mark.compiled("v5p-8")),
        pytest.param(
            "tpu7x-8", "fp8", ("f8e4m3fn", "f8e5m2"), marks=[pytest.mark.compiled("tpu7x-8"), pytest.mark.slow]
        ),
    ],
)
def test_single_bytes_are_gathered_and_multiplied(slice_name, choice, dtypes, pinned_compiler):
    """The seven matrices of a layer: by activations in the forward pass, by gradients in the backward pass."""
    of_values, of_gradients = dtypes
    model = dataclasses.replace(MODEL, quantization=choice)
    program = bind(strategies.fsdp(), slice_name, model=model, devices=compiling.devices_of(slices.get(slice_name)))
    figures = analysis.analyze(program)
    gathered = [c for c in figures.collectives if c.kind == "all-gather" and c.loops]
    matrices = [c for c in gathered if c.payload_bytes >= MODEL.embed_dim * MODEL.num_kv_heads * MODEL.head_width]
    assert len(matrices) == 2 * 7
    assert {c.dtype for c in matrices} == {of_values}
    defined = dict(re.findall(r"(%[\w.\-]+) = (\w+)\[", figures.compiled.hlo))
    operands = re.findall(r" convolution\((%[\w.\-]+), (%[\w.\-]+)\)", figures.compiled.hlo)
    products = collections.Counter((defined.get(x), defined.get(weight)) for x, weight in operands)
    assert products[of_values, of_values] == (14 if of_gradients == of_values else 7)
    assert products[of_gradients, of_values] == (14 if of_gradients == of_values else 7)


def test_other_choices_and_a_missing_library_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"quantization = 'int4'.*none, int8, fp8"):
        dataclasses.replace(MODEL, quantization="int4")
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UserError, match=r"needs the package qwix; launch/setup.sh --extra int8"):
        dataclasses.replace(MODEL, quantization="int8")
