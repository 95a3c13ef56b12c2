"""A decoder-only language model; its fields can express the published families (`models.decoder.published.families`).

    x = E[inputs];   x += Attention(norm(x));   x += MLP(norm(x));   logits = norm(x) U

The dataclass is both configuration and model. Its defaults are Llama's (Touvron et al. 2023, section 2.2; Ainslie et
al. 2023; Shazeer 2020).

B batch, T length, D embed, H heads, K head_dim, V vocab as stored, L layers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, random_bits, stack
from core.errors import UserError, check_fields
from core.types import Batch, LossOutput, Params
from models import derivatives, lora, losses
from models.decoder import block, chunked_loss, layers, rotary
from models.decoder.attention import ring_attention
from models.decoder.block import Block, Passing
from models.decoder.config import REMAT, DecoderConfig, LayerKind, parts_of
from models.decoder.parts import Call, Earlier, Part, Side, adaptable
from models.decoder.prefix import Prefix

if TYPE_CHECKING:
    from core.checkpoints.published import PublishedFolder


Cache = tuple[block.State, ...]  # a state for each layer
Carried = Any  # states of parts by name, leaves [B, L, ...]; () without
_FIELDS = ("inputs", "targets", "segment_ids", "positions", "weights")  # fields of a batch, [B, T] each


class Inserted(NamedTuple):
    """Vectors that take the place of embedded tokens, such as those of the patches of an image.

    Attributes:
      values: [B, T, D].
      places: [B, T], bool: the positions whose embedded tokens they replace.
      prefix: the positions that attend in both directions; None: none.
    """

    values: jax.Array
    places: jax.Array
    prefix: Prefix | None = None


class Head(NamedTuple):
    """Parameters of the final norm, and the output matrix [D, V] in the compute dtype."""

    norm: tuple[jax.Array, ...]
    unembed: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(DecoderConfig):
    """A decoder-only language model; `models.decoder.config` describes its fields.

    Batches have `inputs`, `targets`, `segment_ids`, `positions` [B, T] int32 and `weights` [B, T] float32.
    """

    couples_rows: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        parts = dict.fromkeys(part for kind in self.layer_kinds for part in parts_of(kind).values())
        for part in parts:
            part.check(self)
        self._check_states()
        for name in self._parts:
            named = {found for kind in self.layer_kinds if (found := parts_of(kind).get(name))}
            if len(named) > 1 and any(map(self._shares_by_name, named)):
                raise UserError(
                    f"Transformer: parts called {name!r} have different settings, but share sums or states under "
                    "this name: give them the same settings, or make one a subclass with another `name` (a "
                    "feed-forward also needs a `norm`)"
                )
        for part in (part for kind in self.first_kinds for part in parts_of(kind).values()):
            if jax.tree.leaves(jax.eval_shape(part.empty_sums)):
                raise UserError(
                    f"Transformer: {part.name} has losses or metrics, which layers before those that repeat cannot "
                    "have: give these layers another first_mixer or first_feed_forward"
                )
        if self.lora is not None:
            known = adaptable(self)
            if wrong := [target for target in self.lora.targets if target not in known]:
                raise UserError(
                    f"lora.adapted.targets: this decoder has no matrix {', '.join(map(repr, wrong))}; expected some of "
                    f"{known}"
                )

    def _shares_by_name(self, part: Part) -> bool:
        return (part.keeps_state and self.keeps_states) or bool(jax.tree.leaves(jax.eval_shape(part.empty_sums)))

    def _check_states(self) -> None:
        if not self.keeps_states:
            return
        if not any(part.keeps_state for kind in self.layer_kinds for part in parts_of(kind).values()):
            raise UserError(
                "Transformer.keeps_states = True has no effect: no mixer or feed_forward keeps a state; set it to "
                "False, or use one that does, such as @s5.S5()"
            )
        if lost := sorted(name for name, part in self._parts.items() if part.is_recurrent and not part.keeps_state):
            raise UserError(
                f"Transformer.keeps_states = True: {' and '.join(lost)} would start anew in every step; use @s5.S5()"
            )
        if self.planner is not None or self.positions == "learned":
            found = "a planner counts chunks" if self.planner is not None else "learned positions are counted"
            raise UserError(f"Transformer.keeps_states = True: {found} from the start of a row, which is of many steps")

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Returns initial parameters in float32; with adapters, see `Lora.base_dtype`."""
        params = hk.transform(self.sums).init(rng, batch)
        return params if self.lora is None else self.lora.base_frozen(params)

    def init_carry(self, batch: Batch) -> Carried:
        """Returns empty states of parts by name, leaves [B, L, ...]; () unless `keeps_states`."""
        if not self.keeps_states:
            return ()
        rows, length = batch["inputs"].shape
        of_layer = {n: p.empty_state(self, rows, length) for n, p in self._parts.items() if p.keeps_state}
        return jax.tree.map(lambda a: jnp.zeros((rows, self.num_layers, *a.shape[1:]), a.dtype), of_layer)

    def loss(
        self, params: Params, carry: Carried, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[Carried, LossOutput]:
        """Returns the next carry and the loss: sums of the weighted cross-entropy, in nats, and of weights.

        In training, losses of parts such as experts are added.
        """
        drops = is_training and self.lora is not None and self.lora.dropout > 0  # otherwise it is deterministic
        rows = random_bits.row_ids(batch) if drops else None
        run = hk.transform(functools.partial(self._sums, is_training=is_training))
        return run.apply(params, rng if drops else None, batch, rows, carry)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the logits, [B, T, vocab_size], float32."""
        return hk.transform(self.all_logits).apply(params, None, batch)[..., : self.vocab_size]

    def published(self, folder: str) -> PublishedFolder:
        """Returns access to this decoder's parameters in the folder of a published model."""
        from models.decoder.published import family_tensors  # a run that starts from its seed does not need it

        return family_tensors.published_folder(self, folder)

    @property
    def added_parameters(self) -> tuple[str, ...]:
        """Patterns of the paths of adapters; () without any."""
        return () if self.lora is None else lora.PATTERNS

    def residual(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the residual stream after the last layer and before the final norm, [B, T, D]."""
        x = hk.transform(lambda b: self._stack(b, None)).apply(params, None, batch)
        return ring_attention.arrange(x, "batch", "residual_length", "embed", back=True)

    def hidden(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the residual stream after the final norm, [B, T, D]."""
        return layers.normalize(self, self.residual(params, batch), *self.head(params).norm)

    def head(self, params: Params) -> Head:
        """Returns the arrays of the head."""
        return hk.transform(lambda: self._head_params(self._embedding())).apply(params, None)

    def unembedded(self, unembed: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V], float32, of x from `hidden`."""
        logits = derivatives.unembedded(x, unembed)
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * jnp.tanh(logits / self.logit_softcap)
        return logical.constrain(logits, "batch", "length", "vocab")

    def sums(
        self,
        batch: Batch,
        rows: jax.Array | None = None,
        *,
        is_training: bool = True,
        inserted: Inserted | None = None,
    ) -> LossOutput:
        """Returns the loss as sums; call it inside `hk.transform`.

        Args:
          rows: [B], global row ids, if inputs of adapters are dropped; otherwise None.
          is_training: whether experts have a capacity, and their losses are added.
          inserted: vectors in place of embedded tokens; None: none.
        """
        return self._sums(batch, rows, self.init_carry(batch), is_training=is_training, inserted=inserted)[1]

    def _sums(
        self,
        batch: Batch,
        rows: jax.Array | None,
        carry: Carried,
        *,
        is_training: bool,
        inserted: Inserted | None = None,
    ) -> tuple[Carried, LossOutput]:
        def tail(head: Head, x: jax.Array, side: tuple[Any, ...], *sums: Any) -> LossOutput:
            found = self._cross_entropy(head, x, side[1:3])
            for name, of_part in (sums[0]["sums"] if sums else {}).items():
                layers = sum(name in parts_of(self.layer_kind(layer)) for layer in range(self.num_layers))
                found = self._parts[name].finish(found, of_part, num_layers=layers, is_training=is_training)
            return found

        return self._stack_with_states(batch, tail, rows, carry, drops=is_training, inserted=inserted)

    def _cross_entropy(self, head: Head, x: jax.Array, side: tuple[jax.Array, jax.Array]) -> LossOutput:
        def sums(head: Head, x: jax.Array, side: tuple[jax.Array, jax.Array]) -> LossOutput:
            return losses.cross_entropy(self._head(head, x), *side, vocab_size=self.vocab_size)

        chunk = self.loss_chunk
        if chunk is None:
            chunk = chunked_loss.default_positions(x.shape[0], x.shape[1], self.stored_vocab_size)
        return chunked_loss.total(sums, head, x, side, positions=chunk) if chunk else sums(head, x, side)

    def all_logits(self, batch: Batch, *, inserted: Inserted | None = None) -> jax.Array:
        """Returns the logits [B, T, V], also of padding of the vocabulary; call it inside `hk.transform`."""
        logits = self._stack(batch, lambda head, x, *_: self._head(head, x), inserted=inserted)
        return ring_attention.arrange(logits, "batch", "length", "vocab", back=True)

    def token_embeddings(self, ids: jax.Array) -> jax.Array:
        """Returns the embeddings [B, T, D] of ids [B, T], not scaled; call it inside `hk.transform`."""
        return derivatives.embedded(self._embedding(), ids, ("batch", "residual_length"), self.dtype)

    def _stack(self, batch: Batch, tail_fn, *, inserted: Inserted | None = None) -> Any:
        return self._stack_with_states(batch, tail_fn, None, self.init_carry(batch), inserted=inserted)[1]

    def _stack_with_states(
        self,
        batch: Batch,
        tail_fn,
        rows: jax.Array | None,
        carry: Carried,
        *,
        drops: bool = False,
        inserted: Inserted | None = None,
    ) -> tuple[Carried, Any]:
        """Returns the next carry and the result of `tail_fn`; with a ring, positions are in its order."""
        batch = {name: ring_attention.arrange(batch[name], "batch", "length") for name in _FIELDS}
        embedding = self._embedding()
        head = self._head_params(embedding)
        side = self._side(batch, rows=rows)
        x = self._embedded(embedding, batch)
        if inserted is not None:
            x, side = _inserted(x, inserted), side._replace(prefix=inserted.prefix)
        inputs: Any = () if self.layer_inputs is None else self.layer_inputs.of_tokens(self, batch["inputs"], x)
        if self.planner is not None:
            x += self._planner(x, batch["segment_ids"])
        summed = {name: part for name, part in self._parts.items() if jax.tree.leaves(part.empty_sums())}
        outputs = ({"sums": "summed"} if summed or carry else {}) | ({"states": "stacked"} if carry else {})

        def layer(x: Any, side: tuple[Any, ...], entry: Any = ((), ()), kind: LayerKind = self.layer_kinds[0]) -> Any:
            carried, given = (part if jax.tree.leaves(part) else None for part in entry)
            hands_over = bool(kind.is_first and self.key_sources)
            x, shared = x if hands_over else (x, side[3] if self.key_sources else {})
            call = Call(side[0], weights=side[2], drops=drops, carried=carried, layer_input=given, shared=shared)
            x, states, found, shared = Block(self, kind)(x, call)
            x = (x, shared) if hands_over else x
            sums: Any = {name: found.get(name, part.empty_sums()) for name, part in summed.items()}
            sums = () if kind.is_first else sums
            if carried is not None:
                return x, {"sums": sums, "states": {**carried, **states}}
            return (x, {"sums": sums}) if summed else x

        layers = stack.layer_stack(
            layer,
            self.num_layers,
            remat=REMAT[self.remat],
            tail=None if tail_fn is None else stack.Tail(tail_fn, head),
            outputs=outputs or None,
            undivided=self._undivided,
            **self._pattern,
        )
        of_layers = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), carry)
        shared = {i: one.empty_shared(self, x.shape[0], x.shape[1]) for i, one in enumerate(self.key_sources)}
        found = layers((x, shared) if shared else x, (side, batch["targets"], batch["weights"]), (of_layers, inputs))
        result, out = found if outputs else (found, {})
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), out.get("states", ())), result

    def empty_cache(self, rows: int, length: int) -> Cache:
        """Returns an empty cache for `rows` rows of at most `length` slots."""

        def state(kind: LayerKind) -> block.State:
            found = {name: part.empty_state(self, rows, length) for name, part in parts_of(kind).items()}
            return {name: state for name, state in found.items() if jax.tree.leaves(state)}

        kinds = tuple(map(self.layer_kind, range(self.num_layers)))
        layers = _laid_out(kinds, tuple(map(state, kinds)))
        if self.planner is None:
            return layers
        from models.decoder import chunk_planner  # only models with a planner need it

        return (*layers, {"planner": chunk_planner.empty_state(self.planner, rows, length, self.embed_dim)})

    def extend(
        self,
        params: Params,
        cache: Cache,
        ids: jax.Array,
        start: jax.Array,
        padding: jax.Array,
        inserted: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs the decoder on T new ids of each row; returns logits after the last id, [B, vocab_size], and the cache.

        Args:
          cache: from `empty_cache` or `extend`.
          ids: [B, T], int32.
          start: slot of the first new id, [], int32.
          padding: [B], int32, empty slots at the start of each row.
          inserted: vectors in place of embedded ids [B, T, D], and where they are [B, T], bool; None: none.
        """
        x, side, others = self.before_layers(params, cache[self.num_layers :], ids, start, padding, inserted)
        kinds = tuple(map(self.layer_kind, range(self.num_layers)))
        x, states = self.extend_layers(params, x, side, cache[: self.num_layers], start, kinds=kinds)
        return self.after_layers(params, x), (*states, *others)

    def before_layers(
        self,
        params: Params,
        others: Cache,
        ids: jax.Array,
        start: jax.Array,
        padding: jax.Array,
        inserted: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[Passing, Side, Cache]:
        """Returns the input of the first layer, the arrays that all layers read, and the new states of `others`.

        Args:
          others: the part of the cache after the states of the layers.
          ids, start, padding, inserted: as in `extend`.
        """
        positions = jnp.maximum(start + jnp.arange(ids.shape[1]) - padding[:, None], 0)
        batch = {"inputs": ids, "positions": positions, "segment_ids": jnp.ones_like(ids)}
        return hk.transform(self._before_layers).apply(params, None, batch, others, start, padding, inserted)

    def _before_layers(
        self,
        batch: Batch,
        others: Cache,
        start: jax.Array,
        padding: jax.Array,
        inserted: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[Passing, Side, Cache]:
        side = self._side(batch, padding=padding)
        x = self._embedded(self._embedding(), batch)
        if inserted is not None:
            x = _inserted(x, Inserted(*inserted))
        number: Any = ()
        if self.layer_inputs is not None:
            inputs = self.layer_inputs.of_tokens(self, batch["inputs"], x)
            side, number = side._replace(layer_inputs=jnp.swapaxes(inputs, 0, 1)), jnp.zeros(len(x), jnp.int32)
        if self.planner is not None:
            places = start + jnp.arange(x.shape[1]) - padding[:, None]
            added, state = self._planner.extended(x, others[0]["planner"], places)
            x, others = x + added, ({"planner": state},)
        return Passing(x, number, {}), side, others

    def extend_layers(
        self,
        params: Params,
        x: Passing,
        side: Side,
        states: Cache,
        start: jax.Array,
        *,
        kinds: tuple[LayerKind, ...],
    ) -> tuple[Passing, Cache]:
        """Runs successive layers, of `kinds`, on T new ids; returns the next layer's input, and new states."""

        def layer(x: tuple[Passing, Cache], side: Side, start: jax.Array, kind: tuple[int, LayerKind]):
            ((stream, number, shared), cache), (at, of_layer) = x, kind
            call = Call(side, Earlier(cache[at], start), shared=shared)
            if side.layer_inputs is not None:
                given = jax.lax.dynamic_index_in_dim(side.layer_inputs, number[0], axis=1, keepdims=False)
                call, number = call._replace(layer_input=given), number + 1
            stream, after, _, shared = Block(self, of_layer)(stream, call)
            return Passing(stream, number, shared), (*cache[:at], after, *cache[at + 1 :])

        # Layers differ in kind and number, because states of different shapes cannot be stacked.
        pattern, first = tuple(enumerate(kinds)), sum(kind.is_first for kind in kinds)
        how: dict[str, Any] = {"pattern": pattern, "group": self.group, "undivided": self._undivided}
        if first == len(kinds):
            how |= {"group": self.first_group, "name": logical.FIRST_LAYERS}
        elif first:
            how |= {"pattern": pattern[first:], "first": stack.First(pattern[:first], self.first_group)}
        layers, x = stack.layer_stack(layer, len(kinds), **how), x.with_places(self, kinds, states)
        starts = jnp.broadcast_to(start, (len(kinds),))
        x, states = hk.transform(layers).apply(params, None, (x, states), side, starts)
        return x, _laid_out(kinds, states)

    def after_layers(self, params: Params, x: Passing) -> jax.Array:
        """Returns the logits of the last of T positions, [B, vocab_size], float32; x is from `extend_layers`."""
        logits = hk.transform(lambda x: self._head(self._head_params(self._embedding()), x)).apply(
            params, None, x.stream[:, -1:]
        )
        return logits[:, 0, : self.vocab_size]

    @property
    def _planner(self) -> Any:
        from models.decoder import chunk_planner  # only models with a planner need it

        assert self.planner is not None
        return chunk_planner.Plans(self, self.planner)

    @property
    def _parts(self) -> dict[str, Part]:
        """A part for each name in the layers; parts of one name may differ between layers."""
        return {name: part for kind in self.layer_kinds for name, part in parts_of(kind).items()}

    @property
    def _pattern(self) -> dict[str, Any]:
        if len(self.layer_kinds) == 1:
            return {}
        first = stack.First(self.first_kinds, self.first_group, bool(self.key_sources)) if self.first_kinds else None
        return {"pattern": self.repeated_kinds, "group": self.group, "first": first}

    @property
    def _undivided(self) -> str:
        """Why a strategy must not divide the rows of a batch between runs of the layers; "" if it may."""
        if self.layer_inputs is None and not self.key_sources:
            return ""
        found = "layer_inputs" if self.layer_inputs is not None else "mixer with shares_keys = True"
        return (
            f"Transformer.{found} gives layers arrays that depend on parameters and have an entry for every row, and "
            "this strategy divides the rows: use one without a pipeline and overlap_reduction, such as strategies.fsdp"
        )

    def _side(self, batch: Batch, *, padding: jax.Array | None = None, rows: jax.Array | None = None) -> Side:
        turns = self._rotary_tables(batch["positions"])
        continues = batch["positions"][:, 0] > 0 if self.keeps_states and padding is None else None
        return Side(batch["segment_ids"], turns, padding, rows, continues=continues)

    def flops_per_token(self, length: int) -> float:
        """Returns training FLOPs per token without recomputation, in rows of `length` positions.

        There are 6 per parameter of a matrix product (4 with adapters: frozen matrices have no gradient), and those of
        attention.
        """
        matrices, others = float(self.embed_dim * self.stored_vocab_size), 0.0
        for layer in range(self.num_layers):
            kind = self.layer_kind(layer)
            for part in parts_of(kind).values():
                work = part.work(self, length)
                matrices, others = matrices + work.matrices, others + work.others
        matrices += 0 if self.layer_inputs is None else self.layer_inputs.work(self)
        found = (6.0 if self.lora is None else 4.0) * matrices + 6.0 * others
        if self.planner is None:
            return found
        from models.decoder import chunk_planner  # only models with a planner need it

        return found + chunk_planner.flops_per_token(self.planner, self)

    def _embedded(self, embedding: jax.Array, batch: Batch) -> jax.Array:
        rows = ("batch", "residual_length")
        x = derivatives.embedded(embedding, batch["inputs"], rows, self.dtype)
        if self.scaled_embedding:
            factor = self.embed_dim**0.5 if self.scaled_embedding is True else self.scaled_embedding
            x *= jnp.asarray(factor, self.dtype)
        if self.positions == "learned":
            assert self.max_positions is not None
            shape, init = (self.max_positions, self.embed_dim), hk.initializers.TruncatedNormal(0.02)
            table = logical.param("position_embedding", shape, (None, "embed"), init, kind="embedding", as_stored=True)
            x += derivatives.embedded(table, batch["positions"], rows, self.dtype, (None, "embed"))
        return logical.constrain(x, *rows, "embed")

    def _rotary_tables(self, positions: jax.Array) -> tuple[rotary.RotaryTables, ...]:
        if self.positions == "learned":
            return ()
        tables = tuple(
            rotary.tables(
                positions, one.width or self.head_width, theta=one.theta, scaling=one.scaling, length=one.length
            )
            for one in self.rotations
        )
        return jax.tree.map(lambda table: logical.constrain(table, "batch", "length", None, None), tables)

    def _embedding(self) -> jax.Array:
        # If it is also the output matrix, its columns have about unit length, so that initial logits are of order 1.
        stddev = 1.0 / math.sqrt(self.embed_dim) if self.tied else 1.0

        def init(shape, dtype):
            rows = hk.initializers.TruncatedNormal(stddev)(shape, dtype)
            return jnp.where(jnp.arange(shape[0])[:, None] < self.vocab_size, rows, 0.0)

        shape = (self.stored_vocab_size, self.embed_dim)
        return logical.param("embedding", shape, ("vocab", "embed"), init, as_stored=True)

    def _head_params(self, embedding: jax.Array) -> Head:
        norm = layers.norm_params(self, "final_norm", self.embed_dim)
        if self.tied:
            return Head(norm, logical.constrain(embedding.astype(self.dtype), "vocab", "embed").T)
        shape, axes = (self.embed_dim, self.stored_vocab_size), ("embed", "vocab")
        return Head(norm, logical.param("unembedding", shape, axes, self._unembedding_init, compute_dtype=self.dtype))

    def _unembedding_init(self, shape, dtype) -> jax.Array:
        columns = hk.initializers.TruncatedNormal(1.0 / math.sqrt(self.embed_dim))(shape, dtype)
        return jnp.where(jnp.arange(shape[1]) < self.vocab_size, columns, 0.0)

    def _head(self, head: Head, x: jax.Array) -> jax.Array:
        return self.unembedded(head.unembed, layers.normalize(self, x, *head.norm))


def _laid_out(kinds: Sequence[LayerKind], states: Cache) -> Cache:
    def of_layer(kind: LayerKind, of_parts: block.State) -> block.State:
        parts = parts_of(kind)
        return {name: parts[name].laid_out(state) for name, state in of_parts.items()}

    return tuple(map(of_layer, kinds, states))


def _inserted(x: jax.Array, inserted: Inserted) -> jax.Array:
    if ring_attention.shards() > 1:
        raise UserError(
            "inserted vectors, such as those of images, have no place in rows whose keys travel around a ring, which "
            "are in another order: choose a strategy whose activation table has kv_length = None"
        )
    x = jnp.where(inserted.places[:, :, None], inserted.values.astype(x.dtype), x)
    return logical.constrain(x, "batch", "residual_length", "embed")


def preset(name: str, **changes) -> Transformer:
    """Returns the decoder called `name` (`models.decoder.presets`), with fields replaced by `changes`.

    Raises:
      UserError: there is no preset of this name, or a field is unknown.
    """
    from models.decoder import presets  # a model of given sizes needs none

    if name not in presets.FIELDS:
        near = difflib.get_close_matches(name, presets.FIELDS, n=1, cutoff=0.3) or list(presets.FIELDS)
        raise UserError(
            f"transformer.preset: no preset {name!r} (did you mean {near[0]}?); expected one of "
            f"{', '.join(presets.FIELDS)}"
        )
    check_fields(changes, Transformer, where="transformer.preset")
    found = presets.FIELDS[name]
    return Transformer(**{**(found() if callable(found) else found), **changes})
