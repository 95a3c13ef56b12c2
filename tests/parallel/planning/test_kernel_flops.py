"""FLOPs of kernels, by hand, against masks, and as compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import computed_share, optimizers, slices
from models.decoder import experts, transformer
from models.decoder.attention import attention
from models.decoder.attention.scores import Scores
from models.decoder.attention.splash_tiles import Tiles
from models.decoder.layers import Attention
from models.decoder.prefix import Prefix
from models.mixers import block_sparse
from models.mixers.block_sparse import BlockSparse
from parallel import partitioner, strategies
from parallel.compiled import analysis, compiling
from parallel.compiled.hlo.costs import Kernel
from parallel.planning import kernel_flops, model_trace
from tasks import streams


def kernel(name, operands, results, times=1):
    return Kernel(name, f"jit(run)/while/body/{name}/pallas_call", tuple(operands), tuple(results), times)


def within(share, of):
    return of._replace(op_name=of.op_name.replace("/body/", f"/body/transpose(jvp(computed_{share:.6f}))/"))


HEADS = "bf16[2,32,2048,128]"
FORWARD = kernel("splash_mha_fwd_segmented.1", ["s8[1,4,4]", HEADS, HEADS, HEADS, "s32[2,2048,128]"], [HEADS], 32)
DQ = kernel("splash_mha_dq_segmented.1", ["s8[1,4,4]", HEADS, HEADS, HEADS], [HEADS], 32)
DKV = kernel("splash_mha_dkv_segmented.1", ["s8[1,4,4]", HEADS, HEADS, HEADS], [HEADS, HEADS], 32)
FUSED = kernel("splash_mha_dkv.1", ["s8[1,4,4]", HEADS, HEADS, HEADS], ["bf16[2,4,32,2048,128]", HEADS, HEADS], 32)
PRODUCT = 2 * (2 * 32) * 2048 * 2048 * 128 / 2  # of one matrix product of 2 x 32 heads, half of it behind the query


@pytest.mark.parametrize(("which", "products"), [(FORWARD, 2), (DQ, 3), (DKV, 4), (FUSED, 5)])
def test_flops_of_attention_kernels(which, products):
    assert kernel_flops.of_compiled(which) == products * PRODUCT * 32


@pytest.mark.parametrize(("which", "widths"), [(FORWARD, 128 + 64), (DQ, 2 * 128 + 64), (DKV, 2 * 128 + 2 * 64)])
def test_values_may_be_narrower_than_keys(which, widths):
    """As those of latent attention are."""
    q, k, v = HEADS, HEADS, HEADS.replace("128]", "64]")
    narrow = which._replace(operands=("s8[1,4,4]", q, k, v))
    assert kernel_flops.of_compiled(narrow) == widths / 128 * PRODUCT * 32


def test_the_chip_with_the_last_queries_sees_most_keys():
    queries, keys = "bf16[1,8,512,64]", "bf16[1,2,2048,64]"
    split = kernel("splash_mha_fwd.1", ["s8[1,1,4]", queries, keys, keys], [queries])
    assert kernel_flops.of_compiled(split) == 2 * 2 * 8 * 512 * 2048 * 64 * 0.875


@pytest.mark.parametrize(("which", "products"), [(FORWARD, 2), (DQ, 3), (DKV, 4)])
def test_a_name_says_which_share_is_computed(which, products):
    assert kernel_flops.of_compiled(within(0.125, which)) == products * 2 * PRODUCT * 32 / 8
    assert kernel_flops.of_compiled(within(1.0, which)) == products * 2 * PRODUCT * 32


@pytest.mark.parametrize(
    ("name", "operands", "result"),
    [
        ("gmm.1", ["s32[]", "s32[9]", "bf16[2048,512]", "bf16[8,512,1024]"], "bf16[2048,1024]"),
        ("gmm.7", ["s32[]", "s32[9]", "bf16[2048,1024]", "bf16[8,512,1024]"], "bf16[2048,512]"),
        ("tgmm.2", ["s32[]", "s32[9]", "bf16[2048,512]", "bf16[2048,1024]"], "bf16[8,512,1024]"),
    ],
)
def test_flops_of_grouped_products(name, operands, result):
    product = kernel(name, operands, [result], 3)
    assert kernel_flops.of_compiled(product) == 3 * 2 * 2048 * 512 * 1024
    assert kernel_flops.of_compiled(within(0.25, product)) == 3 * 2 * 2048 * 512 * 1024 / 4


def test_a_kernel_that_is_not_known_has_no_price():
    assert kernel_flops.of_compiled(kernel("ragged_gather.3", [HEADS], [HEADS])) is None


@pytest.mark.parametrize("window", [100, 512, 1500])
@pytest.mark.parametrize("tiles", [Tiles(), Tiles(queries=1024, keys=256), Tiles(queries=128, keys=1024)])
def test_the_share_of_a_window_is_what_its_mask_leaves_of_tiles(window, tiles):
    length, sizes = 2048, tiles.block_sizes(2048)
    behind = np.arange(length)[:, None] - np.arange(length)
    mask = (behind >= 0) & (behind < window)
    parts = mask.reshape(length // sizes.block_q, sizes.block_q, length // sizes.block_kv, sizes.block_kv)
    computed, whole = parts.any(axis=(1, 3)), parts.all(axis=(1, 3))
    share = tiles.computed_share(np.arange(length), window=window, shards=1)
    assert share == (computed / 2 + whole / 2).mean()
    quarter = (computed / 2 + whole / 2)[len(computed) * 3 // 4 :].mean()
    if sizes == tiles.block_sizes(length // 4):
        assert tiles.computed_share(np.arange(length), window=window, shards=4) == quarter


def traced(form, *, length=1024, heads=2):
    """Returns the FLOPs of kernels in both passes of an attention, as shares of those with all scores."""
    operands = [jax.ShapeDtypeStruct((2, length, heads, 128), jnp.bfloat16)] * 3
    segments = jnp.ones((2, length), jnp.int32)
    program = jax.make_jaxpr(jax.grad(lambda *qkv: jnp.sum(form(*qkv, segments)).astype(jnp.float32), (0, 1, 2)))
    products = [p.flops for p in model_trace._products(program(*operands).jaxpr) if p.in_kernel]
    assert len(products) == 3  # forward, dq, dkv
    return sum(products) / ((2 + 3 + 4) * 2 * 2 * heads * length**2 * 128)


BLOCKS = BlockSparse(block=128, global_blocks=1, window=1, random=2)


def test_a_traced_kernel_counts_the_scores_that_it_computes():
    splash = functools.partial(attention.attend, choice="splash")
    assert traced(splash) == pytest.approx(1 / 2)
    both_ways = Prefix(jnp.full((2, 1024), 1023))
    assert traced(functools.partial(splash, prefix=both_ways)) == pytest.approx(1.0)
    near = Scores(window=256)
    assert traced(functools.partial(splash, scores=near, tiles=Tiles(queries=128, keys=128))) == pytest.approx(
        (256 * 1024 - 256**2 / 2) / 1024**2, rel=1e-5
    )
    before = functools.partial(splash, scores=near, prefix=both_ways)
    assert traced(before) == pytest.approx(1 - 768**2 / 2 / 1024**2, rel=1e-5)
    sparse = functools.partial(block_sparse.attend, settings=BLOCKS, choice="splash")
    seen = block_sparse.block_mask(BLOCKS, 2, 8)
    mask = np.kron(seen, np.ones((128, 128), bool)) & np.tri(1024, dtype=bool)
    assert traced(sparse) == pytest.approx(mask.mean(), rel=0.01)  # the diagonal's half has 64 of 128 per row


@pytest.mark.slow  # golden records contain the FLOPs of compiled kernels
@pytest.mark.compiled("v4-8")
def test_compiled_kernels_of_both_passes_say_what_they_compute():
    """Experts of 4 chips, each with 2 of 8, and 4 choices of a token: half of the rows on a chip are filled."""
    sizes = {"num_layers": 3, "embed_dim": 256, "mlp_dim": 256, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 512}
    mixer = (Attention(window=256), BLOCKS, Attention())
    model = transformer.Transformer(
        **sizes, mixer=mixer, feed_forward=experts.Experts(num_experts=8, top_k=4), attention="splash", remat="full"
    )
    at = slices.get("v4-8")
    bound = partitioner.Partitioner(strategies.experts(expert=4), slice=at, devices=compiling.devices_of(at))
    spec = streams.batch_spec(8, length=1024)
    found = analysis.analyze(bound.program(model, optimizers.adamw(learning_rate=lambda step: 1e-3), spec, seed=0))
    shares = {}
    for one in found.costs.kernels:
        kind = next(name for name in ("gmm", "fwd", "dq", "dkv") if name in one.name)
        shares.setdefault(kind, set()).add(computed_share.of(one.op_name))
    window = Tiles().computed_share(np.arange(1024), window=256, shards=1)
    blocks = block_sparse.block_mask(BLOCKS, 2, 8).mean() - 1 / 16
    of_attention = {None, round(window, 6), round(blocks, 6)}
    assert shares == {"gmm": {0.5}, "fwd": of_attention, "dq": of_attention, "dkv": of_attention}
