"""Attention by cuDNN's form: equal to plain attention, lowered to cuDNN's calls, refused where it cannot compute.

No test runs cuDNN: numbers are those of the same call of JAX with implementation="xla".
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import jax_internals, slices
from core.errors import UserError
from models import agreement_subjects
from models.decoder import transformer
from models.decoder.attention import attention, cudnn_attention
from models.decoder.attention.scores import Scores
from models.decoder.layers import Attention
from models.decoder.parts import Sum
from models.decoder.prefix import Prefix
from models.mixers.block_sparse import BlockSparse
from models.mixers.latent_attention import LatentAttention
from models.mixers.s5 import S5
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules
from tasks import streams

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 48, 4, 2, 16
CALLS = ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    q, weight = (jax.random.normal(key, (BATCH, LENGTH, HEADS, HEAD_DIM)) for key in keys[:2])
    k, v = (jax.random.normal(key, (BATCH, LENGTH, KV_HEADS, HEAD_DIM)) for key in keys[2:])
    place = np.arange(LENGTH)
    ends = np.array([[20, 35], [10, 48], [48, 48], [33, 40]])  # of two segments; what follows is padding
    segments = np.where(place < ends[:, :1], 1, np.where(place < ends[:, 1:], 2, 0)).astype(np.int32)
    return q, k, v, jnp.asarray(segments), weight


@pytest.fixture
def with_cudnn(monkeypatch):
    """JAX on this machine behaves as if it had found cuDNN, as far as lowering."""
    monkeypatch.setattr(jax_internals.fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def results(form, inputs):
    q, k, v, segments, weight = inputs

    def total(q, k, v):
        out = form(q, k, v, segments, segments)
        return jnp.sum(out * weight), out

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def until(inputs):
    segments, place = np.asarray(inputs[3]), np.arange(LENGTH)
    return jnp.asarray(np.where((segments == 1) & (place < 8), 7, place).astype(np.int32))


@pytest.mark.parametrize(
    ("window", "with_prefix", "scale"),
    [
        (7, False, 0.5),
        (9, True, 0.3),
        pytest.param(None, False, None, marks=pytest.mark.slow),
        pytest.param(LENGTH, False, None, marks=pytest.mark.slow),
        pytest.param(None, True, None, marks=pytest.mark.slow),
    ],
)
def test_the_form_equals_plain_attention_with_its_gradients(inputs, window, with_prefix, scale):
    prefix = Prefix(until(inputs)) if with_prefix else None
    options = {"prefix": prefix, "scores": Scores(window=window, scale=scale)}
    (_, want), want_grads = results(functools.partial(attention.plain, **options), inputs)
    form = functools.partial(attention.on_gpus, implementation="xla", **options)
    (_, found), found_grads = results(form, inputs)
    for ours, theirs in zip((found, *found_grads), (want, *want_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


def test_values_narrower_than_keys_equal_plain_attention_with_its_gradients(inputs):
    """As in latent attention; cuDNN's form pads them."""
    q, k, v, segments, weight = inputs
    narrow = (q, k, v[..., :10], segments, weight[..., :10])
    (_, want), want_grads = results(attention.plain, narrow)
    (_, found), found_grads = results(functools.partial(attention.on_gpus, implementation="xla"), narrow)
    for ours, theirs in zip((found, *found_grads), (want, *want_grads), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


def test_rows_and_heads_of_each_device_equal_plain_attention(inputs):
    """In a shard_map over rows and heads, also where key heads are not sharded as query heads are."""
    row = {"kv_heads": None}
    tables = strategies.fsdp_tensor(tensor=2)
    for table in (tables, strategies.override(tables, param_rules=row, activation_rules=row)):
        bound = Partitioner(table, slice=slices.get("v4-8"), devices=jax.devices())
        form = functools.partial(attention.on_gpus, implementation="xla", scores=Scores(window=7))
        with bound.tracing():
            found = jax.jit(form)(*inputs[:4], inputs[3])
        np.testing.assert_allclose(found, attention.plain(*inputs[:4], scores=Scores(window=7)), atol=2e-5, rtol=0)


def lowered(inputs, *, table=None, **options):
    """The calls to cuDNN in a program for CUDA, with their first operands' types, of attention with its gradients."""
    q, k, v = (a.astype(jnp.bfloat16) for a in inputs[:3])

    def total(q, k, v):
        return jnp.sum(attention.attend(q, k, v, inputs[3], **options).astype(jnp.float32))

    bound = Partitioner(table or strategies.data_parallel(), slice=slices.get("v4-8"), devices=jax.devices())
    with bound.tracing():
        traced = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2))).trace(q, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "@__cudnn$" in line]
    return [(re.search(r"@(__cudnn\$\w+)", line)[1], re.search(r": \((tensor<\w+>)", line)[1]) for line in lines]


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize("options", [{}, {"scores": Scores(window=7)}, {"prefix": True}, {"choice": "cudnn"}])
def test_attention_for_cuda_is_lowered_to_cudnn(inputs, options):
    options = {**options, "prefix": Prefix(until(inputs))} if "prefix" in options else options
    calls = lowered(inputs, table=strategies.fsdp_tensor(tensor=2), **options)
    assert [name for name, _ in calls] == CALLS
    mine = f"tensor<{BATCH // 2}x{LENGTH}x{HEADS // 2}x{HEAD_DIM}xbf16>"  # the rows and heads of one device
    assert {operand for _, operand in calls} == {mine}


@pytest.mark.usefixtures("with_cudnn")
def test_attention_that_cudnn_cannot_compute_is_plain_for_cuda(inputs):
    assert not lowered(inputs, choice="plain")
    assert not lowered(inputs, scores=Scores(softcap=30.0))
    assert not lowered(inputs, table=strategies.context(sequence=2))
    bias = Prefix(until(inputs), jnp.zeros((BATCH, LENGTH)))
    assert not lowered(inputs, prefix=bias)
    q, k, v, *others = inputs
    wide = (q, k, jnp.concatenate([v, v], axis=-1), *others)
    assert not lowered(wide)
    with pytest.raises(
        UserError, match=r"attention = 'cudnn': .*values that are at most as wide as keys \(16\), not 32"
    ):
        lowered(wide, choice="cudnn")
    assert not cudnn_attention.problem(LENGTH, HEAD_DIM, "bfloat16", softcap=None)


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "cuDNN computes in bfloat16 or float16, not in float32"),
        ({"head_dim": 256}, "a head_dim that is a multiple of 8, at most 128, not 256"),
        ({"head_dim": 36}, "a multiple of 8, at most 128, not 36"),
        ({"value_dim": 136}, "values that are at most as wide as keys (128), not 136"),
        ({"length": 47}, "an even number of positions, not 47"),
        ({"softcap": 50.0}, "does not bound scores (softcap = 50.0)"),
        ({"prefix": Prefix(np.zeros((1, 8)), np.zeros((1, 8)))}, "no gradient for the biases of keys"),
    ],
)
def test_what_cudnn_cannot_compute_has_a_reason(changes, reason):
    usual = {"dtype": "bfloat16", "head_dim": 128, "length": 2048, "softcap": None}
    assert cudnn_attention.problem(**usual) == cudnn_attention.problem(**usual, value_dim=64) == ""
    assert reason in cudnn_attention.problem(**{**usual, **changes})


@pytest.mark.usefixtures("with_cudnn")
def test_rows_over_several_devices_are_not_for_cudnn():
    bound = Partitioner(strategies.context(sequence=2), slice=slices.get("v4-8"), devices=jax.devices())
    with bound.tracing():
        assert cudnn_attention.problem(LENGTH, HEAD_DIM, "bfloat16", softcap=None).startswith("the positions of a row")


def test_cudnn_that_was_asked_for_and_is_not_there_is_refused(inputs):
    with pytest.raises(UserError, match=r"attention = 'cudnn': JAX has found no cuDNN; attention = 'auto' uses plain"):
        attention.attend(*inputs[:4], choice="cudnn")


@pytest.mark.usefixtures("with_cudnn")
def test_a_decoder_says_how_it_attends_on_gpus():
    sizes = {"vocab_size": 64, "num_layers": 1, "embed_dim": 64, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 4}
    model = transformer.Transformer(**sizes, dtype="bfloat16")
    assert model.attention_on_gpus(2048) == "flash attention of cuDNN"
    in_float32 = dataclasses.replace(model, dtype="float32").attention_on_gpus(2048)
    assert in_float32.startswith("plain products: cuDNN computes in bfloat16")
    blocks, states = BlockSparse(block=4, global_blocks=1, window=1, random=1), S5(states=16)
    sparse = {"mixer": blocks}
    for changes, said in [
        ({"attention": "plain"}, "plain products"),
        ({"attention": "splash"}, "the splash kernel, which GPUs cannot run: set attention = 'auto'"),
        ({"attention": "none"}, "none: attention = 'none' mixes no positions"),
        (sparse, "plain products"),
        (sparse | {"attention": "splash"}, "the splash kernel, which GPUs cannot run: set attention = 'auto'"),
        ({"mixer": states, "attention": "plain"}, "none: no mixer of this decoder is attention"),
        (
            {"mixer": (Attention(), Sum((blocks, states))), "num_layers": 2},
            "attention: flash attention of cuDNN; block_sparse: plain products",
        ),
    ]:
        assert dataclasses.replace(model, **changes).attention_on_gpus(2048) == said
    wide = LatentAttention(latent_dim=16, plain_dim=16, rotary_dim=8, value_dim=32)
    said = dataclasses.replace(model, mixer=wide).attention_on_gpus(2048)
    assert said == "plain products: cuDNN needs values that are at most as wide as keys (24), not 32"


@pytest.mark.slow
@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize(
    "table", [strategies.fsdp_tensor(tensor=2), strategies.pipeline(schedule=schedules.gpipe(num_microbatches=2))]
)
def test_a_training_step_for_cuda_has_cudnns_calls(table):
    sizes = {"vocab_size": 64, "num_layers": 4, "embed_dim": 64, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2}
    model = transformer.Transformer(**sizes, dtype="bfloat16")
    bound = Partitioner(table, slice=slices.get("h100:4"), devices=jax.devices()[:4])
    program = bound.program(model, agreement_subjects.OPTIMIZER, streams.batch_spec(8, length=32), seed=0)
    with bound.tracing():
        traced = program.jitted_train_step.trace(program.abstract_state, program.abstract_batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"custom_call @(__cudnn\$\w+)", text)) == set(CALLS)
