"""Computes a mixture of experts: each token passes through the top k of E experts.

    s = softmax(x R) or sigmoid(x R);   y = sum over the k largest s_e of  g_e Expert_e(x);   g = s, or s / sum of the k

Shazeer et al. 2017; Fedus et al. 2022 (the balancing loss); Zoph et al. 2022 (the z loss). As in DeepSeek-V3
(DeepSeek-AI 2024, section 2.1.2), a correction may be added to s when experts are chosen. The choice may be limited to
the groups of experts with the largest sums of their two best scores.

Two forms compute the same function as long as nothing is dropped:

    dropless   the choices of all tokens on a chip, sorted by expert, are multiplied group by group
    capacity   every expert takes the first C = capacity T k / E choices of a row; further choices add nothing

Both run on the tokens of a chip inside a `shard_map`, because XLA's partitioner would sort the tokens of all chips
together. Over a mesh axis that shards experts and also rows, tokens are exchanged: with capacity by an all-to-all,
dropless by gathering tokens and reduce-scattering outputs.

B rows, T positions, D embed, F width of an expert, E experts, k choices of a token. S slots of the experts, C slots of
one expert for a row, n tokens of a chip, G groups of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from core import computed_share, logical
from core.errors import UserError
from core.types import LossOutput, WeightedSum
from models import derivatives

Activation = str | derivatives.ClampedGate


class Choices(Protocol):
    """How tokens choose experts: fields of `models.decoder.experts.Experts`."""

    num_experts: int
    top_k: int
    scores: str
    normalized: bool
    num_groups: int
    top_groups: int
    scale: float
    capacity_factor: float | None
    load_balance_coef: float
    z_loss: float

    def slots(self, length: int) -> int:
        """Returns C, the most choices of a row of `length` positions that an expert takes."""


class Weights(NamedTuple):
    """The matrices of a layer's router and experts, laid out for computation.

    Attributes:
      router: [D, E] float32.
      gate, up: [E, D, F]; `gate` None: the decoder is not gated.
      down: [E, F, D].
      biases: theirs in this order, [E] float32, [E, F], [E, F], [E, D]; None: none.
      correction: [E] float32, added to the scores when experts are chosen; None: none.
      input_scale: [D] float32, multiplies what experts read; None: none.
      output_scales: [E] float32, multiplies the factors g; None: none.
    """

    router: jax.Array
    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    biases: tuple[jax.Array, jax.Array | None, jax.Array, jax.Array] | None = None
    correction: jax.Array | None = None
    input_scale: jax.Array | None = None
    output_scales: jax.Array | None = None


class Routing(NamedTuple):
    """Statistics of routing: float32 sums over the tokens of each row, without padding.

    Attributes:
      tokens: number of tokens, [B].
      choices: number of tokens that chose each expert, [B, E].
      scores: each expert's share of a token's scores, [B, E].
      entropy: entropy of these shares, in nats, [B].
      z: squared logsumexp of the logits, [B].
      dropped: number of choices without a slot, [B].
    """

    tokens: jax.Array
    choices: jax.Array
    scores: jax.Array
    entropy: jax.Array
    z: jax.Array
    dropped: jax.Array

    def summed(self, weights: jax.Array) -> dict[str, jax.Array]:
        """Returns sums over rows; losses are weighted by `weights` [B, T].

        The balancing loss of a row is E sum_e f_e p_e, with f_e choices of expert e per token, and p_e its mean share.
        """
        tokens, supervised = jnp.maximum(self.tokens, 1.0), jnp.sum(weights, axis=1)
        products = jnp.sum(self.choices * self.scores, axis=-1)
        return {
            "balance": jnp.sum(supervised * self.choices.shape[-1] * products / tokens**2),
            "z": jnp.sum(supervised * self.z / tokens),
            "tokens": jnp.sum(self.tokens),
            "entropy": jnp.sum(self.entropy),
            "dropped": jnp.sum(self.dropped),
            "choices": jnp.sum(self.choices, axis=0),
        }


def empty_sums(settings: Choices) -> dict[str, jax.Array]:
    """Returns zeros for the entries of `Routing.summed`."""
    one = {name: jnp.zeros(()) for name in ("balance", "z", "tokens", "entropy", "dropped")}
    return {**one, "choices": jnp.zeros(settings.num_experts)}


def with_routing(
    settings: Choices,
    name: str,
    found: LossOutput,
    sums: Mapping[str, jax.Array],
    *,
    num_layers: int,
    is_training: bool,
) -> LossOutput:
    """Adds the losses and metrics of routing, as means over layers, to the sums of a decoder.

    Args:
      name: begins the names of the metrics.
      found: the sums with the cross-entropy.
      sums: results of `Routing.summed`, added over layers.
      is_training: whether to add losses, and metrics of drops and loads.
    """
    weight_sum = found.weight_sum
    per_expert = sums["tokens"] * settings.top_k / settings.num_experts
    digits = len(str(settings.num_experts - 1))
    metrics = {
        f"{name}/imbalance": WeightedSum(sums["balance"] / (settings.top_k * num_layers), weight_sum),
        f"{name}/z": WeightedSum(sums["z"] / num_layers, weight_sum),
        f"{name}/entropy": WeightedSum(sums["entropy"], sums["tokens"]),
    }
    if not is_training:
        return found._replace(metrics={**found.metrics, **metrics})
    metrics[f"{name}/dropped"] = WeightedSum(sums["dropped"], settings.top_k * sums["tokens"])
    for e in range(settings.num_experts):
        metrics[f"{name}/load_{e:0{digits}d}"] = WeightedSum(sums["choices"][e], per_expert)
    loss_sum = found.loss_sum
    if settings.load_balance_coef or settings.z_loss:
        metrics["cross_entropy"] = found.metrics.get("cross_entropy", WeightedSum(loss_sum, weight_sum))
        loss_sum += (settings.load_balance_coef * sums["balance"] + settings.z_loss * sums["z"]) / num_layers
    return found._replace(loss_sum=loss_sum, metrics={**found.metrics, **metrics})


class _Layout(NamedTuple):
    """Mesh axes of kinds of dimensions; positions are gathered over `gathered`, tokens exchanged over `exchanged`.

    `experts` has the manual axes first, over which experts and rows were divided outside of this layer.
    """

    rows: Any = None
    residual: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    exchanged: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    manual: tuple[str, ...] = ()

    @property
    def automatic(self) -> tuple[str, ...]:
        """The axes of experts that XLA's partitioner controls."""
        return self.experts[len(self.manual) :]

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes, in addition to `exchanged`, over which outputs are partial sums."""
        return tuple(axis for axis in (*self.experts, *self.hidden) if axis not in self.exchanged)


def _layout() -> _Layout:
    spec = logical.activation_spec("expert", None, "mlp")
    if spec is None:
        return _Layout()
    of_residual, of_length = (logical.activation_spec("batch", name) for name in ("residual_length", "length"))
    assert of_residual is not None
    assert of_length is not None
    (rows, residual), length = of_residual, of_length[1]
    manual = logical.exchanged_axes("expert")
    experts, _, hidden = map(logical.mesh_axes, spec)
    experts = (*manual, *experts)
    residual, length = map(logical.mesh_axes, (residual, length))
    shards_tokens = {*logical.mesh_axes(rows), *length, *manual}
    at = _Layout(rows, length, (), length, experts, tuple(a for a in experts if a in shards_tokens), hidden, manual)
    extra = residual[len(length) :]
    if residual[: len(length)] == length and set(extra) <= set(at.summed):
        return at._replace(residual=residual, gathered=extra)
    return at  # XLA gathers positions before the layer and slices its outputs


def check_capacity(settings: Choices) -> None:
    """Raises UserError if a capacity is set that the layout of the strategy being traced does not allow."""
    at, limited = _layout(), settings.capacity_factor is not None
    if limited and at.positions:
        raise UserError(
            f"Experts.capacity_factor = {settings.capacity_factor} counts the tokens of whole rows, and this strategy "
            f"shards positions over {', '.join(at.positions)}: set capacity_factor = None (dropless), or use another "
            "strategy"
        )
    if limited and at.exchanged not in ((), at.experts):
        raise UserError(
            f"Experts.capacity_factor = {settings.capacity_factor}: experts are sharded over "
            f"{', '.join(at.experts)}, of which only {', '.join(at.exchanged)} shards rows: set capacity_factor = None "
            "(dropless), or shard experts over axes that all shard rows, or that all do not"
        )


def mixture(
    settings: Choices, x: jax.Array, weights: Weights, real: jax.Array, *, activation: Activation, drops: bool
) -> tuple[jax.Array, Routing]:
    """Sends each token through its experts, except a shared one; returns [B, T, D], and statistics of routing.

    Args:
      x: [B, T, D].
      real: [B, T], whether each position is a token, not padding.
      activation: as in `models.derivatives.gated`.
      drops: whether the capacity applies.
    """
    at, limited = _layout(), drops and settings.capacity_factor is not None
    local = functools.partial(_local, settings=settings, activation=activation, limited=limited, at=at)
    if not (automatic := logical.automatic_axes()):
        return local(x, weights, real)
    tokens, hidden = PartitionSpec(at.rows, at.residual or None), at.hidden or None
    of_experts = at.automatic or None
    inward, outward = PartitionSpec(of_experts, None, hidden), PartitionSpec(of_experts, hidden, None)
    of_gate = None if weights.gate is None else inward
    vectors = (weights.correction, weights.input_scale, weights.output_scales)
    of_vectors = [None if vector is None else PartitionSpec() for vector in vectors]
    specs: Any = Weights._make((PartitionSpec(), of_gate, inward, outward, None, *of_vectors))
    if weights.biases is not None:
        of_hidden, of_output = PartitionSpec(of_experts, hidden), PartitionSpec(of_experts)
        specs = specs._replace(
            biases=(PartitionSpec(), None if weights.gate is None else of_hidden, of_hidden, of_output)
        )
    rows = PartitionSpec(at.rows)
    return jax.shard_map(
        local,
        in_specs=(tokens, specs, PartitionSpec(at.rows, at.positions or None)),
        out_specs=(tokens, Routing._make([rows] * len(Routing._fields))),
        axis_names=automatic,
        check_vma=False,  # kernels do not declare over which mesh axes their results vary
    )(x, weights, real)


def _local(
    x: jax.Array,
    weights: Weights,
    real: jax.Array,
    *,
    settings: Choices,
    activation: Activation,
    limited: bool,
    at: _Layout,
) -> tuple[jax.Array, Routing]:
    if at.gathered:
        x = jax.lax.all_gather(x, at.gathered, axis=1, tiled=True)
    chosen, gates, routing = _routed(settings, x, weights, real)
    if weights.input_scale is not None:
        x = (x.astype(jnp.float32) * weights.input_scale).astype(x.dtype)
    if weights.biases is not None and at.hidden:  # outputs are summed over these axes
        of_router, of_gate, of_up, of_down = weights.biases
        is_first = jax.lax.axis_index(at.hidden) == 0
        weights = weights._replace(biases=(of_router, of_gate, of_up, jnp.where(is_first, of_down, 0)))
    if limited:
        y, dropped = _with_capacity(settings, x, chosen, gates, weights, activation, at)
        routing = routing._replace(dropped=dropped)
    else:
        y = _dropless(x, chosen, gates, weights, activation, at)
    if at.positions:
        routing = jax.tree.map(lambda sums: jax.lax.psum(sums, at.positions), routing)
    rest = tuple(axis for axis in at.summed if axis not in at.gathered)
    if at.gathered:
        y = jax.lax.psum_scatter(y, at.gathered, scatter_dimension=1, tiled=True)
    return (jax.lax.psum(y, rest) if rest else y), routing


def _routed(settings: Choices, x: jax.Array, weights: Weights, real: jax.Array) -> tuple[jax.Array, jax.Array, Routing]:
    """Returns each token's experts [B, T, k] (E for padding), their factors g [B, T, k] float32, and statistics."""
    router = weights.router.astype(jnp.float32)
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    if weights.biases is not None:
        logits += weights.biases[0]
    # Experts are ranked by logits if these alone decide: the scores of large logits can be equal.
    by_logits = weights.correction is None and settings.num_groups == 1
    chosen = _largest(jax.lax.stop_gradient(logits), settings.top_k) if by_logits else None
    scores = jax.nn.softmax(logits, axis=-1) if settings.scores == "softmax" else jax.nn.sigmoid(logits)
    if chosen is None:
        chosen = _chosen(settings, jax.lax.stop_gradient(scores), weights.correction)
    is_chosen = chosen[..., None] == jnp.arange(settings.num_experts)  # [B, T, k, E]; selects without a gather
    gates = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0.0), axis=-1)
    if settings.normalized:
        gates /= jnp.maximum(jnp.sum(gates, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    if settings.scale != 1.0:
        gates *= settings.scale
    if weights.output_scales is not None:
        gates *= jnp.sum(jnp.where(is_chosen, weights.output_scales, 0.0), axis=-1)
    log_shares = jax.nn.log_softmax(logits if settings.scores == "softmax" else jax.nn.log_sigmoid(logits), axis=-1)
    shares = jnp.exp(log_shares)
    among = real.astype(jnp.float32)  # [B, T]
    routing = Routing(
        tokens=jnp.sum(among, axis=1),
        choices=jnp.sum(is_chosen * among[..., None, None], axis=(1, 2)),
        scores=jnp.sum(shares * among[..., None], axis=1),
        entropy=-jnp.sum(jnp.sum(shares * log_shares, axis=-1) * among, axis=1),
        z=jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2 * among, axis=1),
        dropped=jnp.zeros(real.shape[:1], jnp.float32),
    )
    return jnp.where(real[..., None], chosen, settings.num_experts), gates, routing


def _largest(values: jax.Array, count: int) -> jax.Array:
    return jax.lax.top_k(values, count)[1]


def _chosen(settings: Choices, scores: jax.Array, correction: jax.Array | None) -> jax.Array:
    scores = scores if correction is None else scores + jax.lax.stop_gradient(correction)
    if settings.num_groups > 1:
        groups = scores.reshape(*scores.shape[:-1], settings.num_groups, -1)
        best = _largest(jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1), settings.top_groups)
        is_best = jnp.any(best[..., None] == jnp.arange(settings.num_groups), axis=-2)
        scores = jnp.where(is_best[..., None], groups, -jnp.inf).reshape(scores.shape)
    return _largest(scores, settings.top_k)


class _Slots(NamedTuple):
    """The slot of each choice, [G, n, k] (S: none), and the choice in each slot, [G, S] (n k: empty)."""

    of: jax.Array
    choice: jax.Array


def _sorted(chosen: jax.Array, number: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sorts choices [G, n, k] by expert; returns order [G, n k], places [G, n, k], sizes and starts [G, number]."""
    flat = chosen.reshape(chosen.shape[0], -1)
    order = jnp.argsort(flat, axis=-1, stable=True).astype(jnp.int32)
    places = jnp.argsort(order, axis=-1).astype(jnp.int32).reshape(chosen.shape)
    sizes = jnp.sum(flat[..., None] == jnp.arange(number), axis=1, dtype=jnp.int32)
    return order, places, sizes, jnp.cumsum(sizes, axis=-1) - sizes


def _dropless(
    x: jax.Array, chosen: jax.Array, gates: jax.Array, weights: Weights, activation: Activation, at: _Layout
) -> jax.Array:
    """Returns this chip's summand of the outputs [B, T, D], over `at.summed`; `chosen` and `gates` are [B, T, k]."""
    shape, k = x.shape, chosen.shape[-1]
    tokens = x.reshape(-1, shape[-1]), chosen.reshape(-1, k), gates.reshape(-1, k)
    if at.exchanged:
        tokens = tuple(jax.lax.all_gather(a, at.exchanged, axis=0, tiled=True) for a in tokens)
    x, chosen, gates = tokens
    number = weights.up.shape[0]  # experts of this chip
    if at.experts:
        chosen -= number * jax.lax.axis_index(at.experts)
        chosen = jnp.where((chosen >= 0) & (chosen < number), chosen, number)
    order, places, sizes, starts = _sorted(chosen[None], number)
    count = jnp.sum(sizes)
    size = x.shape[0] * min(k, number)  # no token has more than min(k, number) choices on this chip
    empty = jnp.arange(size) >= count
    slots = _Slots(jnp.where(places < count, places, size), jnp.where(empty, chosen.size, order[:, :size]))
    rows = _taken(x[None], slots)[0]
    filled = k * number / weights.router.shape[-1] / min(k, number)  # of the rows, if experts are chosen equally often

    def product(rows: jax.Array, matrices: jax.Array, biases: jax.Array | None) -> jax.Array:
        from models.decoder.grouped_products import grouped_product  # imported only for models with experts

        with computed_share.scope(filled if at.experts else None):
            y = grouped_product(rows, matrices, sizes[0])
        if biases is None:
            return y
        at_row = jnp.arange(len(rows))[:, None] - starts  # [S, E]
        # A product, whose gradient is a product too; the gradient of a gather would add up rows one by one.
        y += ((at_row >= 0) & (at_row < sizes)).astype(y.dtype) @ biases
        # The kernel does not define empty rows, nor their gradients, and 0 times such a number may be NaN.
        return jnp.where(empty[:, None], 0, y)

    y = _combined(_feed_forward(rows, weights, activation, product)[None], slots, gates[None])[0]
    if at.exchanged:
        y = jax.lax.psum_scatter(y, at.exchanged, scatter_dimension=0, tiled=True)
    return y.reshape(shape)


def _with_capacity(
    settings: Choices,
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    weights: Weights,
    activation: Activation,
    at: _Layout,
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs as `_dropless` does, and the number of dropped choices [B]."""
    (b, t, d), (own, *_) = x.shape, weights.up.shape
    slots, fits = _capacity_slots(chosen, settings.num_experts, settings.slots(t), own, at)
    dropped = jnp.sum((chosen < settings.num_experts) & ~fits, axis=(1, 2)).astype(jnp.float32)
    rows = _taken(x.reshape(1, b * t, d), slots)
    rows = rows.reshape(-1, own, b * settings.slots(t), d)  # grouped by the chip of the experts
    if at.exchanged:  # this chip's rows for all experts -> rows of all chips for this chip's experts
        rows = jax.lax.all_to_all(rows, at.exchanged, split_axis=0, concat_axis=0, tiled=True)

    def product(rows: jax.Array, matrices: jax.Array, biases: jax.Array | None) -> jax.Array:
        y = jnp.einsum("peni,eio->peno", rows, matrices)
        return y if biases is None else y + biases[:, None]

    y = _feed_forward(rows, weights, activation, product)
    if at.exchanged:
        y = jax.lax.all_to_all(y, at.exchanged, split_axis=0, concat_axis=0, tiled=True)
    return _combined(y.reshape(1, -1, d), slots, gates.reshape(1, b * t, -1)).reshape(x.shape), dropped


def _capacity_slots(chosen: jax.Array, e: int, c: int, own: int, at: _Layout) -> tuple[_Slots, jax.Array]:
    """Returns the slots of choices [B, T, k], numbered [E, B, C], and which fit; `own`: experts on this chip."""
    b, choices = chosen.shape[0], chosen.size
    order, places, sizes, starts = _sorted(chosen, e)
    is_chosen = chosen[..., None] == jnp.arange(e)
    places -= jnp.sum(jnp.where(is_chosen, starts[:, None, None], 0), axis=-1)  # place among the choices of the expert
    fits = (chosen < e) & (places < c)
    filled = jnp.arange(c) < sizes[..., None]  # [B, E, C]
    at_slot = jnp.minimum(starts[..., None] + jnp.arange(c), order.shape[1] - 1)
    choice = jnp.take_along_axis(order, at_slot.reshape(b, e * c), axis=1).reshape(b, e, c)
    row = jnp.arange(b)[:, None, None]
    choice = jnp.where(filled, row * (choices // b) + choice, choices).swapaxes(0, 1)  # [E, B, C]
    of, has_slot = (chosen * b + row) * c + places, fits  # [B, T, k]
    if at.experts and not at.exchanged:
        first = own * jax.lax.axis_index(at.experts)
        choice = jax.lax.dynamic_slice_in_dim(choice, first, own, axis=0)
        has_slot, of = fits & (chosen >= first) & (chosen < first + own), of - first * b * c
    of = jnp.where(has_slot, of, choice.size).reshape(1, -1, chosen.shape[-1])
    return _Slots(of, choice.reshape(1, -1)), fits


def _feed_forward(rows: jax.Array, weights: Weights, activation: Activation, product: Any) -> jax.Array:
    _, of_gate, of_up, of_down = weights.biases or (None,) * 4
    up = product(rows, weights.up, of_up)
    if weights.gate is None:
        assert isinstance(activation, str)
        hidden = derivatives.activated(up, activation)
    else:
        hidden = derivatives.gated(product(rows, weights.gate, of_gate), up, activation)
    return product(hidden, weights.down, of_down)


def _combined(y: jax.Array, slots: _Slots, gates: jax.Array) -> jax.Array:
    """Returns [G, n, D]: outputs of slots [G, S, D] times factors [G, n, k], summed for each token."""
    return _weighted(_put(y, slots), gates)


@jax.custom_vjp
def _weighted(parts: jax.Array, gates: jax.Array) -> jax.Array:
    """Returns the sum over k of parts [G, n, k, D] times gates [G, n, k].

    Its gradient saves parts in their dtype.
    """
    return jnp.sum(parts.astype(jnp.float32) * gates[..., None], axis=2).astype(parts.dtype)


def _weighted_back(saved: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (parts, gates), wide = saved, d.astype(jnp.float32)[:, :, None]
    return (wide * gates[..., None]).astype(parts.dtype), jnp.sum(parts.astype(jnp.float32) * wide, axis=-1)


_weighted.defvjp(lambda parts, gates: (_weighted(parts, gates), (parts, gates)), _weighted_back)


def _in_slots(x: jax.Array, at: jax.Array) -> jax.Array:
    """Returns the rows `at` [G, S] of x [G, n, D]; the index n of an empty slot gives zeros."""
    return jnp.take_along_axis(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), at[..., None], axis=1, mode="promise_in_bounds")


@jax.custom_vjp
def _taken(x: jax.Array, slots: _Slots) -> jax.Array:
    """Gathers the tokens x [G, n, D] into the slots, [G, S, D]."""
    return _in_slots(x, slots.choice // slots.of.shape[-1])


def _taken_back(slots: _Slots, dy: jax.Array) -> tuple[jax.Array, None]:
    return jnp.sum(_put(dy, slots).astype(jnp.float32), axis=2).astype(dy.dtype), None


_taken.defvjp(lambda x, slots: (_taken(x, slots), slots), _taken_back)


@jax.custom_vjp
def _put(y: jax.Array, slots: _Slots) -> jax.Array:
    """Gathers for each choice the output of its slot, [G, S, D] -> [G, n, k, D]; 0 without a slot."""
    g, n, k = slots.of.shape
    at = slots.of.reshape(g, n * k, 1)
    return jnp.take_along_axis(y, at, axis=1, mode="fill", fill_value=0).reshape(g, n, k, y.shape[-1])


def _put_back(slots: _Slots, d: jax.Array) -> tuple[jax.Array, None]:
    return _in_slots(d.reshape(d.shape[0], -1, d.shape[-1]), slots.choice), None


_put.defvjp(lambda y, slots: (_put(y, slots), slots), _put_back)
