"""Block-sparse attention against attention with the same mask, computed from all scores."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import slices
from models.decoder.attention import attention
from models.decoder.attention.scores import Scores
from models.mixers import block_sparse
from models.mixers.block_sparse import BlockSparse
from parallel import strategies
from parallel.partitioner import Partitioner
from tests.models.decoder.test_layers import PLAIN, check_generation, drawn_params

SETTINGS = BlockSparse(block=4, global_blocks=1, window=1, random=2, seed=5)
LENGTH, HEADS, KEY_HEADS = 46, 4, 2  # the last block is not full


def operands(length=LENGTH, head_dim=8):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (
        jax.random.normal(key, (2, length, heads, head_dim))
        for key, heads in zip(keys, (HEADS, KEY_HEADS, KEY_HEADS, HEADS), strict=True)
    )
    segments = jnp.stack([(jnp.arange(length) >= length // 3) + 1, jnp.where(jnp.arange(length) < length - 5, 1, 0)])
    return (q, k, v), segments, weight


def dense(q, k, v, segments, settings):
    length = q.shape[1]
    mask = block_sparse.block_mask(settings, HEADS, -(-length // settings.block))
    mask = np.kron(mask, np.ones((settings.block,) * 2, bool))[:, :length, :length] & np.tri(length, dtype=bool)
    visible = mask & (segments[:, :, None] == segments[:, None])[:, None]
    k, v = (jnp.repeat(a, HEADS // KEY_HEADS, axis=2) for a in (k, v))
    scores = jnp.where(visible, jnp.einsum("bthk,bshk->bhts", q, k) * 0.3, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, axis=-1), v)


def check_equal(form, settings, length, head_dim, *, at=contextlib.nullcontext):
    """Compares output and gradients with `dense` in float64.

    In float32, the errors of `dense` and of the kernel are alike, at most 2.3e-6 of the largest entry.
    """
    inputs, segments, weight = jax.device_get(operands(length, head_dim))

    def results(form, inputs, weight):
        @jax.jit
        def both(*inputs):
            out, back = jax.vjp(lambda *a: form(*a, segments), *inputs)
            return out, *back(weight)

        return jax.device_get(both(*inputs))

    with at():
        found = results(form, inputs, weight)
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) for a in (*inputs, weight)]
        want = results(lambda *a: dense(*a, settings), wide[:-1], wide[-1])
    for ours, exact in zip(found, want, strict=True):
        assert (ours.dtype, exact.dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(ours, exact, rtol=0, atol=4e-6 * np.abs(exact).max())


@pytest.mark.covers("N09")
def test_plain_form_equals_attention_with_the_same_mask():
    check_equal(
        lambda *a: block_sparse.plain(*a, settings=SETTINGS, scores=Scores(scale=0.3)),
        SETTINGS,
        LENGTH,
        head_dim=8,
    )


@pytest.mark.covers("N09")
@pytest.mark.slow  # the interpreter; the mask that the kernel reads is tested below
def test_kernel_equals_attention_with_the_same_mask():
    settings = BlockSparse(block=128, global_blocks=1, window=1, random=1)

    def kernel(*a):
        return block_sparse.attend(*a, settings=settings, choice="splash", scores=Scores(scale=0.3), interpret=True)

    check_equal(kernel, settings, 640, head_dim=128)


@pytest.mark.covers("N09", "M13")
@pytest.mark.slow  # the interpreter
@pytest.mark.parametrize("strategy", [strategies.context(sequence=2), strategies.fsdp_tensor(tensor=2)])
def test_the_kernel_over_chips(strategy):
    """Each of two chips has half of a row's queries and all of its keys, or half of the heads."""
    settings = BlockSparse(block=128, global_blocks=1, window=1, random=1)

    def kernel(*a):
        return block_sparse.attend(*a, settings=settings, choice="splash", scores=Scores(scale=0.3), interpret=True)

    at = Partitioner(strategy, slice=slices.get("v4-8"), devices=jax.devices())
    check_equal(kernel, settings, 768, head_dim=128, at=at.tracing)


def test_blocks():
    """Global, near and drawn ones, alike in rows of any length; drawn ones differ between heads and rows."""
    mask = block_sparse.block_mask(SETTINGS, HEADS, 12)
    np.testing.assert_array_equal(mask[:, :7, :7], block_sparse.block_mask(SETTINGS, HEADS, 7))
    assert np.all(mask[:, :, 0])
    for head in range(HEADS):
        assert np.all(np.diag(mask[head]))
        assert np.all(np.diag(mask[head], -1))
        assert not np.any(np.triu(mask[head], 1))
        np.testing.assert_array_equal(np.sum(mask[head], axis=1), np.minimum(np.arange(12) + 1, 5))
    drawn = [tuple(map(tuple, mask[head])) for head in range(HEADS)]
    assert len(set(drawn)) == HEADS
    assert np.any(mask != block_sparse.block_mask(dataclasses.replace(SETTINGS, seed=6), HEADS, 12))


def test_the_mask_of_the_kernel():
    of_blocks = block_sparse.block_mask(SETTINGS, HEADS, 5)[1]
    mask = block_sparse.BlockMask(of_blocks, 4)
    assert mask.shape == (20, 20)
    whole = np.kron(of_blocks, np.ones((4, 4), bool)) & np.tri(20, dtype=bool)
    np.testing.assert_array_equal(mask[8:16, 4:12], whole[8:16, 4:12])
    same, other = of_blocks.copy(), of_blocks.copy()
    other[4, 2] = not other[4, 2]
    assert mask == block_sparse.BlockMask(same, 4)
    assert mask not in (block_sparse.BlockMask(other, 4), block_sparse.BlockMask(same, 2))


@pytest.mark.covers("N09")
def test_no_array_has_all_pairs_of_positions():
    """The largest array of the compiled program, with its gradient, has scores of s = 8 blocks for each position."""
    settings, length = BlockSparse(block=64, global_blocks=1, window=3, random=3), 8192
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]

    def total(*a):
        segments = jnp.ones((1, length), jnp.int32)
        return jnp.sum(block_sparse.plain(*a, segments, settings=settings, scores=Scores(scale=1.0)))

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes).compile()
    shapes_of_arrays = re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, dims.split(","))) for dims in shapes_of_arrays)
    assert largest == 2 * length * 8 * 64  # two heads; all pairs would be 16 times as many


MODEL = dataclasses.replace(
    PLAIN, num_layers=2, num_kv_heads=1, mixer=BlockSparse(block=2, global_blocks=1, window=1, random=1),
)  # fmt: skip


@pytest.mark.covers("N09")
def test_generation_with_the_cache_equals_the_full_pass():
    check_generation(MODEL, drawn_params(MODEL))


def test_flops_grow_with_length_alone():
    long, longer = (MODEL.flops_per_token(length) for length in (1024, 4096))
    assert long == longer
    assert MODEL.flops_per_token(8) < long
    assert dataclasses.replace(PLAIN, num_layers=2).flops_per_token(4096) > longer


def test_a_block_of_the_kernel_divides_the_positions_of_a_chip(monkeypatch):
    monkeypatch.setattr(attention.ring_attention, "length_shards", lambda: 4)
    inputs, segments, _ = operands(512)
    how = {"settings": BlockSparse(block=256), "scores": Scores(scale=0.3)}
    with pytest.raises(ValueError, match="block = 256 and rows of 512 positions, 128 on each chip"):
        block_sparse.attend(*inputs, segments, choice="splash", **how)
    program = jax.jit(lambda *a: block_sparse.attend(*a, segments, choice="auto", **how)).trace(*inputs)
    assert "pallas_call" not in str(program.jaxpr)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: BlockSparse(block=0), "BlockSparse.block = 0: expected an integer of at least 1"),
        (lambda: BlockSparse(random=-1), "BlockSparse.random = -1: expected an integer of at least 0"),
        (lambda: dataclasses.replace(MODEL, attention="none"), "attention = 'none' mixes no positions"),
        (
            lambda: block_sparse.attend(
                *operands()[0], None, settings=SETTINGS, choice="splash", scores=Scores(scale=1.0)
            ),
            "block = 4 and rows of 46 positions, 46 on each chip: the kernel needs a block that is a multiple of 128",
        ),
        (lambda: BlockSparse(seed=2**63), f"BlockSparse.seed = {2**63}: expected an integer below"),
    ],
)
def test_wrong_settings_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.covers("N09")
def test_rows_whose_mask_exceeds_scalar_memory_use_plain_products():
    """With 24 heads, 64 blocks fit; with 128 libtpu refuses the kernel ("Used 1.13M of 1.00M smem")."""
    settings = BlockSparse(random=0)

    def traced(length, choice):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16) for heads in (24, 1, 1)]
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        form = functools.partial(block_sparse.attend, settings=settings, scores=Scores(scale=0.1), choice=choice)
        return str(jax.make_jaxpr(form)(*shapes, segments))

    with pytest.raises(ValueError, match=r"the mask of blocks needs 1.12 MiB of the 1,008 KiB of scalar memory"):
        traced(128 * 128, "splash")
    assert "pallas_call" not in traced(128 * 128, "auto")
    assert "pallas_call" in traced(8 * 128, "auto")
