"""Block-sparse attention: global blocks, a window of blocks and random blocks.

Zaheer et al. 2020, "Big Bird", causal. A query in block i attends, within its segment and up to its own position, to
the keys of blocks j with

    j < global_blocks   or   i - window <= j <= i   or   j one of `random` blocks that head h drew for block i.

The draws depend on the settings, h and i alone. The splash kernel reads a mask of n x n blocks for each head from
scalar memory, which limits the length of rows; the plain form gathers the keys of each block of queries.

B batch, T length, H query heads, N key/value heads, G = H / N, K head_dim. A row has n = T / c blocks of c positions;
a block of queries has s blocks of keys.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from core import computed_share, logical, units
from core.errors import UserError, check_integer
from core.platforms import by_platform
from models.decoder.attention import attention, ring_attention
from models.decoder.attention.kv_cache import KeysAndValues
from models.decoder.attention.scores import USUAL, Scores
from models.decoder.attention.splash_tiles import LANES, Tiles, largest
from models.decoder.layers import Heads
from models.decoder.parts import Call, Decoder, Result, Work

_SCALAR_BYTES = 2**20 - 2**14  # scalar memory (SMEM) that the mask can fill; TPUs have 1 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSparse(Heads):
    """A mixer: attention to global, near and randomly drawn blocks.

    Attributes:
      block: c, positions of a block; the kernel needs a multiple of 128.
      global_blocks: number of first blocks of a row to which later queries attend.
      window: number of blocks before a query's own to which it attends.
      random: number of further blocks drawn for each head and block of queries; fewer near the start of a row.
      seed: seed of the draws, from 0 to 2**63 - 1.
    """

    block: int = 128
    global_blocks: int = 1
    window: int = 3
    random: int = 3
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        for field in ("block", "global_blocks", "window", "random", "seed"):
            check_integer(getattr(self, field), where=f"BlockSparse.{field}", least=int(field == "block"))
        if self.seed >= 2**63:
            raise UserError(f"BlockSparse.seed = {self.seed}: expected an integer below 2**63")

    name = "block_sparse"

    def check(self, decoder: Decoder) -> None:
        super().check(decoder)
        if decoder.attention == "none":
            raise UserError("Transformer.attention = 'none' mixes no positions: expected another with 'block_sparse'")
        if decoder.attention == "cudnn":
            raise UserError("Transformer.attention = 'cudnn' cannot skip blocks: expected another with 'block_sparse'")

    def _mixed(self, c: Decoder, q: jax.Array, key: jax.Array, value: jax.Array, call: Call) -> Result:
        if call.side.prefix is not None:
            raise UserError("mixer 'block_sparse' is causal, and this model attends both ways to a part of a row")
        how = self.scores(c, call)
        if call.before is None:
            return Result(attend(q, key, value, call.side.segment_ids, how, settings=self, choice=c.attention))
        assert call.side.padding is not None
        return Result(*cached(q, key, value, *call.before, call.side.padding, how, settings=self))

    def work(self, decoder: Decoder, length: int) -> Work:
        inner = decoder.num_heads * self.width(decoder)
        return Work(super().work(decoder, length).matrices, 2 * self.attended(length) * inner)

    def shrink(self, multiples: Mapping[str, int]) -> "BlockSparse":
        return dataclasses.replace(super().shrink(multiples), block=8)

    def on_gpus(self, decoder: Decoder, length: int) -> str | None:
        return super().on_gpus(decoder, length) if decoder.attention == "splash" else "plain products"

    @property
    def blocks(self) -> int:
        """The largest number of blocks to which a query attends."""
        return self.global_blocks + self.window + 1 + self.random

    def attended(self, length: int) -> int:
        """Estimates how many positions a position attends to on average, in rows of `length` positions."""
        return min(length // 2, self.blocks * self.block)


class Table(NamedTuple):
    """The blocks of keys to which each block of queries attends.

    Attributes:
      blocks: [H, n, s], int32.
      valid: [H, n, s], bool: whether the entry of `blocks` is a block; others are 0.
    """

    blocks: np.ndarray
    valid: np.ndarray


@functools.lru_cache(maxsize=8)
def table(settings: BlockSparse, heads: int, count: int) -> Table:
    """Returns the key blocks of each head and each of `count` query blocks."""
    row = np.arange(count)[:, None]
    first = np.broadcast_to(np.arange(settings.global_blocks), (count, settings.global_blocks))
    near = row - np.arange(settings.window, -1, -1)
    fixed = np.concatenate([first, near], axis=1)
    is_fixed = np.concatenate([first <= row, near >= settings.global_blocks], axis=1)
    drawn = np.zeros((heads, count, settings.random), np.int64)
    is_drawn = np.zeros(drawn.shape, bool)
    for i in range(settings.global_blocks + settings.window + 1, count):
        others = i - settings.window - settings.global_blocks
        for head in range(heads if settings.random else 0):
            # Draws depend on (seed, head, i) alone: the second number of a Philox key is made of head and block.
            rng = np.random.Generator(np.random.Philox(key=[settings.seed, head * 2**32 + i]))
            some = rng.choice(others, min(settings.random, others), replace=False) + settings.global_blocks
            drawn[head, i, : len(some)], is_drawn[head, i, : len(some)] = np.sort(some), True
    every, fits = (
        np.concatenate([np.broadcast_to(a, (heads, *a.shape)), b], axis=2)
        for a, b in ((fixed, drawn), (is_fixed, is_drawn))
    )
    return Table(np.where(fits, every, 0).astype(np.int32), fits)


def block_mask(settings: BlockSparse, heads: int, count: int) -> np.ndarray:
    """Returns whether queries of a block attend to keys of a block, [H, n (queries), n (keys)], bool."""
    found, (blocks, valid) = np.zeros((heads, count, count), bool), table(settings, heads, count)
    head, row, _ = np.nonzero(valid)
    found[head, row, blocks[valid]] = True
    return found


class BlockMask(splash.splash_attention_mask.Mask):
    """The causal mask of one head for the splash kernel, given as a mask of blocks."""

    def __init__(self, of_blocks: np.ndarray, block: int):
        self.of_blocks, self.block = of_blocks, block

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.of_blocks) * self.block,) * 2

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(length)[part] for length, part in zip(self.shape, idx, strict=True))
        seen = self.of_blocks[rows[:, None] // self.block, columns // self.block]
        return seen & (rows[:, None] >= columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return False
        return self.block == other.block and np.array_equal(self.of_blocks, other.of_blocks)

    def __hash__(self) -> int:
        return hash((self.block, self.of_blocks.shape, self.of_blocks.tobytes()))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scores: Scores = USUAL,
    *,
    settings: BlockSparse,
    choice: str,
    interpret: bool = False,
) -> jax.Array:
    """Computes the attention by the splash kernel or by `plain`, [B, T, H, K].

    Args:
      q: [B, T, H, K].
      k, v: [B, T, N, K].
      choice: "plain"; "splash"; or "auto": splash on TPUs if its tiles and memory allow, otherwise plain.
      interpret: run the kernel in Pallas's interpreter.

    Raises:
      UserError: keys travel around a ring, or the sizes do not fit "splash".
    """
    if ring_attention.shards() > 1:
        raise UserError(
            "block-sparse attention with keys and values that travel around a ring: most of them would be outside of "
            "the blocks. Choose a strategy whose activation table has kv_length = None"
        )
    fits = _kernel_fits(choice, settings, q.shape[1], q.shape[2])
    k, v = (logical.constrain(a, "batch", "kv_length", "kv_heads", "head_dim") for a in (k, v))
    by_products = functools.partial(plain, scores=scores, settings=settings)

    def by_kernel(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        c = settings.block
        blocks = block_mask(settings, q.shape[2], q.shape[1] // c)
        masks = [BlockMask(of_head, c) for of_head in blocks]
        tile = largest(Tiles().queries, c)  # tiles divide blocks
        tiles = Tiles(queries=tile, keys=tile)
        share = blocks.mean() - 1 / (2 * blocks.shape[1])  # half of the blocks on the diagonal is hidden
        with computed_share.scope(share):
            return attention.splash_attention(
                q, k, v, segment_ids, scores=scores, masks=masks, tiles=tiles, interpret=interpret
            )

    operands = (q, k, v, segment_ids)
    if choice == "splash":
        return by_kernel(*operands)
    if choice == "plain" or not fits:
        return by_products(*operands)
    return by_platform(*operands, tpu=by_kernel, default=by_products)


def _kernel_fits(choice: str, settings: BlockSparse, length: int, heads: int) -> bool:
    """Raises UserError if the kernel cannot compute these sizes and `choice` is "splash"."""
    c = settings.block
    local = length // ring_attention.length_shards()  # the kernel of a chip has whole blocks of its own queries
    fits = attention.fits_tiles(length) and c % LANES == 0 and local % c == 0
    needed = _mask_bytes(heads // _head_shards(), local // c, length // c) if fits else 0
    if choice == "splash" and needed > _SCALAR_BYTES:
        raise UserError(
            f"attention = 'splash' with BlockSparse.block = {c}, rows of {length} positions and {heads} heads: "
            f"the mask of blocks needs {units.size(needed)} of the {units.size(_SCALAR_BYTES)} of scalar memory that "
            "the kernel has for it; a longer block or tensor parallelism lower that, and attention = 'auto' computes "
            "other sizes by plain products"
        )
    if choice == "splash" and not fits:
        raise UserError(
            f"attention = 'splash' with BlockSparse.block = {c} and rows of {length} positions, {local} on each chip: "
            f"the kernel needs a block that is a multiple of {LANES} and divides the positions of a chip; "
            "attention = 'auto' computes other sizes by plain products"
        )
    return fits and needed <= _SCALAR_BYTES


def _mask_bytes(heads: int, rows: int, columns: int) -> int:
    return heads * rows * columns * (2 + (1 if columns <= 128 else 2))


def _head_shards() -> int:
    spec = logical.activation_spec("heads")
    return 1 if spec is None else logical.shards(spec[0], jax.sharding.get_abstract_mesh().shape)


def cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    before: KeysAndValues,
    start: jax.Array,
    padding: jax.Array,
    scores: Scores = USUAL,
    *,
    settings: BlockSparse,
) -> tuple[jax.Array, KeysAndValues]:
    """Returns the attention of new slots to cached ones, [B, T, H, K], and the new cache.

    All cached entries are scored, so the cost of a token grows with their number.

    Args:
      q, k, v, before, start, padding, scores: as in `models.decoder.attention.attention.cached`.
      settings: the blocks, which are counted from the first position of a row.
    """
    new = (jnp.swapaxes(a, 1, 2) for a in (k, v))
    pairs = zip(before, new, strict=True)
    after = KeysAndValues(*(jax.lax.dynamic_update_slice_in_dim(*pair, start, axis=2) for pair in pairs))
    entries, c = after.keys.shape[2], settings.block
    mask = jnp.asarray(block_mask(settings, q.shape[2], -(-entries // c)))  # [H, n, n]
    queries = start + jnp.arange(q.shape[1]) - padding[:, None]  # [B, T]
    keys = jnp.arange(entries) - padding[:, None]  # [B, S]
    of_rows = mask[:, jnp.maximum(queries, 0) // c]  # [H, B, T, n]
    seen = jax.vmap(lambda rows, of: rows[..., of], in_axes=(1, 0))(of_rows, jnp.maximum(keys, 0) // c)  # [B, H, T, S]
    seen &= ((keys[:, None] <= queries[:, :, None]) & (keys >= 0)[:, None])[:, None]
    groups = q.reshape(*q.shape[:2], after.keys.shape[1], -1, q.shape[-1])
    found = jnp.einsum("btngk,bnsk->bngts", groups, after.keys, preferred_element_type=jnp.float32)
    found = scores.bounded(found * scores.factor(q.shape[-1]))
    found = jnp.where(seen.reshape(found.shape), found, -1e30)
    mixed = jnp.einsum("bngts,bnsk->btngk", jax.nn.softmax(found, axis=-1).astype(v.dtype), after.values)
    return mixed.reshape(q.shape), after


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scores: Scores = USUAL,
    *,
    settings: BlockSparse,
) -> jax.Array:
    """Computes the attention from gathered keys and values, [B, T, H, K].

    Args:
      q, k, v, segment_ids, scores: as in `attend`.
    """
    length, c = q.shape[1], settings.block
    extra = -length % c
    q, k, v = (jnp.pad(a, ((0, 0), (0, extra), (0, 0), (0, 0))) for a in (q, k, v))
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, extra)))
    q, k, v = (jnp.moveaxis(a.reshape(a.shape[0], -1, c, *a.shape[2:]), 3, 0) for a in (q, k, v))  # [H, B, n, c, K]
    blocks, valid = table(settings, q.shape[0], q.shape[2])
    form = functools.partial(_gathered, scores=scores)
    places = np.arange(q.shape[2], dtype=np.int32)
    others: tuple[Any, ...] = (segment_ids.reshape(-1, places.size, c), jnp.asarray(places), blocks, valid)
    specs = [logical.activation_spec(name) for name in ("batch", "heads", "kv_heads")]
    if specs[0] is not None:
        batch, heads, kv_heads = (spec and (logical.mesh_axes(spec[0]) or None) for spec in specs)
        if heads != kv_heads:
            k, v = (jnp.repeat(a, q.shape[0] // a.shape[0], axis=0) for a in (k, v))
        of_head = PartitionSpec(heads, batch)
        form = jax.shard_map(
            form,
            in_specs=(of_head, of_head, of_head, PartitionSpec(batch), PartitionSpec(), *[PartitionSpec(heads)] * 2),
            out_specs=of_head,
            axis_names=logical.automatic_axes(),
            check_vma=False,  # arrays that all chips have in equal form are not declared as such
        )
    mixed = jnp.moveaxis(form(q, k, v, *others), 0, 3)  # [B, n, c, H, K]
    return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length]


def _gathered(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    places: jax.Array,
    blocks: jax.Array,
    valid: jax.Array,
    *,
    scores: Scores,
) -> jax.Array:
    groups, c = k.shape[0], q.shape[3]
    within = jnp.arange(c)

    def one(operands: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, blocks, valid = operands  # [G, B, n, c, K], [B, n, c, K] x 2, [G, n, s] x 2

        def rows(a: jax.Array) -> jax.Array:  # [B, n, ...] -> [G, n, s, B, ...]
            return jnp.moveaxis(a, 1, 0)[blocks]

        keys, values, of_keys = rows(k), rows(v), rows(segments)
        found = jnp.einsum("gbnck,gnsbdk->gbncsd", q, keys, preferred_element_type=jnp.float32)
        found = scores.bounded(found * scores.factor(q.shape[-1]))
        at, of = places[:, None] * c + within, blocks[..., None] * c + within  # [n, c], [G, n, s, c]
        visible = (at[:, :, None, None] >= of[:, :, None]) & valid[:, :, None, :, None]  # [G, n, c, s, c]
        same = segments[None, :, :, :, None, None] == jnp.moveaxis(of_keys, 3, 1)[:, :, :, None]
        found = jnp.where(visible[:, None] & same, found, -1e30)
        weights = jax.nn.softmax(found.reshape(*found.shape[:-2], -1), axis=-1).reshape(found.shape)
        return jnp.einsum("gbncsd,gnsbdk->gbnck", weights.astype(v.dtype), values)

    grouped = [a.reshape(groups, -1, *a.shape[1:]) for a in (q, blocks, valid)]
    mixed = jax.lax.map(jax.checkpoint(one, prevent_cse=False), (grouped[0], k, v, *grouped[1:]))
    return mixed.reshape(q.shape)
