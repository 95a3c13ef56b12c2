"""A diagonal state-space layer (S5): its state has a fixed size, and its cost is linear in the length.

    h_t = exp(lambda dt) h_{t-1} + (exp(lambda dt) - 1) / lambda  B u_t;   y_t = 2 Re(C h_t) + D u_t

Smith et al. 2023, "Simplified State Space Layers for Sequence Modeling". lambda starts at eigenvalues of HiPPO-N (Gu et
al. 2020). The states of a chunk of positions are a parallel prefix; a loop carries the state from chunk to chunk, but
not from one segment of a packed row to the next.

B batch, T length, D embed, P complex states: one of each conjugate pair.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from core import logical
from core.errors import UserError, check_integer
from models import derivatives
from models.decoder.attention import ring_attention
from models.decoder.parts import Call, Decoder, Part, Result, Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class S5(Part):
    """A state-space layer of a decoder, as a mixer or in place of a feed-forward.

    Attributes:
      states: 2 P, an even number.
      min_dt, max_dt: range of the initial step sizes dt.
      blocks: number of HiPPO matrices, of size states / blocks, from which lambda starts; divides states / 2.
      activation: of the output, one of `models.derivatives.ACTIVATIONS`; None: linear.
      chunk: positions of one parallel prefix.
    """

    states: int
    min_dt: float = 1e-3
    max_dt: float = 1e-1
    blocks: int = 1
    activation: str | None = "gelu"
    chunk: int = 256

    name = "s5"
    is_recurrent = True
    keeps_state = True

    def __post_init__(self):
        for field in ("states", "chunk", "blocks"):
            check_integer(getattr(self, field), where=f"S5.{field}", least=1)
        if self.states % 2:
            raise UserError(f"S5.states = {self.states}: expected an even number")
        if self.states % (2 * self.blocks):
            raise UserError(
                f"S5.blocks = {self.blocks}: states = {self.states} do not divide into blocks of an even size; "
                f"expected a divisor of {self.states // 2}"
            )
        if not 0 < self.min_dt <= self.max_dt < math.inf:
            raise UserError(
                f"S5.min_dt = {self.min_dt}, max_dt = {self.max_dt}: expected finite numbers, 0 < min_dt <= max_dt"
            )
        if self.activation is not None and self.activation not in derivatives.ACTIVATIONS:
            raise UserError(
                f"S5.activation = {self.activation!r}: expected None or one of {', '.join(derivatives.ACTIVATIONS)}"
            )

    @property
    def frequencies(self) -> np.ndarray:
        """The initial imaginary parts of lambda, [P]."""
        return np.tile(hippo(self.states // self.blocks), self.blocks)

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        names = ("batch", "length", "embed")
        x = ring_attention.arrange(x, *names, back=True)
        segment_ids = ring_attention.arrange(call.side.segment_ids, *names[:2], back=True)
        y, state = _Layer(self, decoder.dtype, call.name)(x, segment_ids, call)
        return Result(ring_attention.arrange(y, *names), state)

    def work(self, decoder: Decoder, length: int) -> Work:
        return Work(2 * decoder.embed_dim * self.states, 2 * self.states)

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> Complex:
        """Returns complex zeros, [rows, P]."""
        return Complex(*(jnp.zeros((rows, self.states // 2)) for _ in range(2)))

    def laid_out(self, state: Complex) -> Complex:
        return Complex(*(logical.constrain(a, "batch", "mlp") for a in state))

    def shrink(self, multiples: Mapping[str, int]) -> S5:
        return dataclasses.replace(self, states=2 * math.lcm(4, multiples["mlp"]), blocks=1)

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        found = super().settings(decoder)
        del found[f"{self.name}.chunk"]  # changes no result
        return found


class Complex(NamedTuple):
    """Complex numbers as two real arrays."""

    re: jax.Array
    im: jax.Array

    def __mul__(self, other: Complex) -> Complex:  # type: ignore[override]
        return Complex(self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re)

    def __add__(self, other: Complex) -> Complex:  # type: ignore[override]
        return Complex(self.re + other.re, self.im + other.im)

    def where(self, condition: jax.Array) -> Complex:
        """Returns the numbers where the condition holds, and 0 elsewhere."""
        return Complex(*(jnp.where(condition, a, 0.0) for a in self))


class System(NamedTuple):
    """The system in discrete time.

    Attributes:
      decay: exp(lambda dt), [P].
      gain: (exp(lambda dt) - 1) / lambda, [P].
    """

    decay: Complex
    gain: Complex


def hippo(states: int) -> np.ndarray:
    """Returns the positive imaginary parts of the eigenvalues of HiPPO-N, [states / 2]; `states` is even.

    HiPPO-N is -1/2 I plus the skew-symmetric matrix with entries -sqrt((n + 1/2) (k + 1/2)) for n > k.
    """
    root = np.sqrt(np.arange(states) + 0.5)
    lower = np.tril(np.outer(root, root), -1)
    return np.sort(np.linalg.eigvalsh(1j * (lower.T - lower)))[states // 2 :]


def discretized(log_rate: jax.Array, frequency: jax.Array, log_dt: jax.Array) -> System:
    """Returns the system with a zero-order hold; lambda = -exp(log_rate) + i frequency, dt = exp(log_dt), [P] each."""
    rate, dt = jnp.exp(log_rate), jnp.exp(log_dt)
    size, angle = jnp.exp(-rate * dt), frequency * dt
    decay = Complex(size * jnp.cos(angle), size * jnp.sin(angle))
    # Without cancellation for small |lambda dt|: Re = (|decay| - 1) cos + (cos - 1).
    minus_one = Complex(jnp.expm1(-rate * dt) * jnp.cos(angle) - 2 * jnp.sin(angle / 2) ** 2, decay.im)
    norm = rate**2 + frequency**2
    return System(decay, minus_one * Complex(-rate / norm, -frequency / norm))


def scan(
    system: System,
    inputs: Complex,
    segment_ids: jax.Array,
    before: Complex,
    *,
    chunk: int,
    continues: jax.Array | None = None,
    last_only: bool = False,
    dtype: Any = jnp.float32,
) -> tuple[Complex | None, Complex]:
    """Computes the states of rows.

    Args:
      inputs: B u, [B, T, P].
      before: [B, P], the state before the first position.
      continues: [B], whether the first position continues `before`; None: it does in all rows.

    Returns:
      The states [B, T, P] (None if `last_only`), and the last one [B, P].
    """
    length, c = segment_ids.shape[1], min(chunk, segment_ids.shape[1])
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    if continues is not None:
        changes = changes.at[:, 0].set(~continues)
    groups = jnp.cumsum(changes, axis=1)  # [B, T], 0: the segment of `before`
    extra = -length % c
    padded = [jnp.pad(a, ((0, 0), (0, extra), *[(0, 0)] * (a.ndim - 2))) for a in inputs]
    groups = jnp.pad(groups, ((0, 0), (0, extra)), mode="edge")
    is_real = jnp.arange(length + extra) < length

    def split(a: jax.Array) -> jax.Array:  # [chunks, B, c, ...]
        return jnp.moveaxis(a.reshape(a.shape[0], -1, c, *a.shape[2:]), 1, 0)

    def one(carry: tuple[Complex, jax.Array], part: tuple) -> tuple[tuple[Complex, jax.Array], Complex | None]:
        (state, group), (re, im, ids, real) = carry, part
        added = Complex(re.astype(jnp.float32), im.astype(jnp.float32)) * system.gain
        found = _prefix(system.decay, powers, added, ids, state, group)
        end = jnp.maximum(jnp.sum(real) - 1, 0)
        last = Complex(*(jax.lax.dynamic_index_in_dim(a, end, axis=1, keepdims=False) for a in found))
        return (last, ids[:, -1]), None if last_only else Complex(*(a.astype(dtype) for a in found))

    powers = jax.lax.stop_gradient(_powers(system.decay, c))  # once for all chunks
    parts = (*(split(a) for a in padded), split(groups), is_real.reshape(-1, c))
    first = (before, jnp.zeros(before.re.shape[:1], groups.dtype))
    (last, _), states = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), first, parts)
    if states is None:
        return None, last
    joined = (jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, a.shape[-1])[:, :length] for a in states)
    return Complex(*joined), last


@jax.custom_vjp
def _prefix(
    decay: Complex, powers: Complex, inputs: Complex, groups: jax.Array, before: Complex, group: jax.Array
) -> Complex:
    """Returns the states of a chunk, [B, c, P]; the gradient of `decay` includes that of `powers`."""
    states = _doubled(decay, inputs, groups)
    carried = powers * Complex(*(a[:, None] for a in before))
    return states + carried.where((groups == group[:, None])[..., None])


def _powers(decay: Complex, count: int) -> Complex:
    power, powers, shift = decay, Complex(*(a[None] for a in decay)), 1
    while shift < count:
        powers = Complex(*(jnp.concatenate(pair) for pair in zip(powers, power * powers, strict=True)))
        power, shift = power * power, 2 * shift
    return Complex(*(a[:count] for a in powers))


def _doubled(decay: Complex, inputs: Complex, groups: jax.Array, *, reverse: bool = False) -> Complex:
    states, power, shift = inputs, decay, 1
    while shift < groups.shape[1]:
        pads, kept = ((0, shift), slice(shift, None)) if reverse else ((shift, 0), slice(None, -shift))
        same = jnp.pad(groups[:, shift:] == groups[:, :-shift], ((0, 0), pads))[..., None]
        earlier = Complex(*(jnp.pad(a[:, kept], ((0, 0), pads, (0, 0))) for a in states))
        states = states + (power * earlier).where(same)
        power, shift = power * power, 2 * shift
    return states


def _prefix_forward(
    decay: Complex, powers: Complex, inputs: Complex, groups: jax.Array, before: Complex, group: jax.Array
) -> tuple[Complex, tuple]:
    states = _prefix(decay, powers, inputs, groups, before, group)
    return states, (decay, groups, before, group, states)


def _prefix_backward(saved: tuple, of_states: Complex) -> tuple:
    decay, groups, before, group, states = saved
    conjugate = Complex(decay.re, -decay.im)
    back = _doubled(conjugate, of_states, groups, reverse=True)  # gradients of the inputs
    continued = jnp.concatenate([group[:, None], groups[:, :-1]], axis=1) == groups
    earlier = Complex(*(jnp.concatenate([a[:, None], b[:, :-1]], axis=1) for a, b in zip(before, states, strict=True)))
    of_decay = (Complex(earlier.re, -earlier.im) * back).where(continued[..., None])
    first = conjugate * Complex(*(a[:, 0] for a in back))
    return (
        Complex(*(jnp.sum(a, axis=(0, 1)) for a in of_decay)),
        None,
        back,
        None,
        first.where(continued[:, :1]),
        None,
    )


_prefix.defvjp(_prefix_forward, _prefix_backward)


def states_of_rows(
    system: System,
    inputs: Complex,
    segment_ids: jax.Array,
    before: Complex | None,
    *,
    chunk: int,
    dtype: Any,
    continues: jax.Array | None = None,
) -> tuple[Complex, Complex]:
    """Returns the states of rows, whose positions may be sharded, and the last one.

    Args:
      before: the state before each row; None: zero.
    """
    before = before or Complex(*(jnp.zeros((a.shape[0], a.shape[2])) for a in inputs))
    continues = jnp.ones(segment_ids.shape[:1], bool) if continues is None else continues
    spec = logical.activation_spec("batch", "length", "mlp")
    axes = () if spec is None else logical.mesh_axes(spec[1])
    sizes = jax.sharding.get_abstract_mesh().shape
    if logical.shards(axes, sizes) == 1:
        how = {"chunk": chunk, "continues": continues, "dtype": dtype}
        return scan(system, inputs, segment_ids, before, **how)  # type: ignore[return-value]
    assert spec is not None
    of_states, rows = PartitionSpec(spec[0], spec[2]), PartitionSpec(spec[0], spec[1])
    local = functools.partial(_scan_on_chip, axes=axes, chunk=chunk, dtype=dtype)
    return jax.shard_map(
        local,
        in_specs=(PartitionSpec(spec[2]), spec, rows, of_states, PartitionSpec(spec[0])),
        out_specs=(spec, of_states),
        axis_names=logical.automatic_axes(),
        check_vma=False,  # the last state is equal on all chips of a row
    )(system, inputs, segment_ids, before, continues)


def _scan_on_chip(
    system: System,
    inputs: Complex,
    segment_ids: jax.Array,
    state: Complex,
    continues: jax.Array,
    *,
    axes: tuple[str, ...],
    chunk: int,
    dtype: Any,
) -> tuple[Complex, Complex]:
    empty = jax.tree.map(jnp.zeros_like, state)
    _, own = scan(system, inputs, segment_ids, empty, chunk=chunk, last_only=True)
    ends = segment_ids[:, 0], segment_ids[:, -1], jnp.all(segment_ids == segment_ids[:, :1], axis=1)
    own, (firsts, lasts, is_whole) = jax.lax.all_gather((own, ends), axes)  # leaves [chips, ...]
    power = _power(system.decay, segment_ids.shape[1])
    chips, place = firsts.shape[0], jax.lax.axis_index(axes)
    before, first_continues = state, continues  # as on the first chip
    for chip in range(chips):
        joins = firsts[chip] == lasts[chip - 1] if chip else continues
        before = Complex(*(jnp.where(place == chip, new, old) for new, old in zip(state, before, strict=True)))
        first_continues = jnp.where(place == chip, joins, first_continues)
        passes = (power * state).where((joins & is_whole[chip])[:, None])
        state = Complex(*(a[chip] for a in own)) + passes
    states, _ = scan(system, inputs, segment_ids, before, chunk=chunk, continues=first_continues, dtype=dtype)
    assert states is not None
    return states, state


def _power(decay: Complex, exponent: int) -> Complex:
    result = Complex(jnp.ones_like(decay.re), jnp.zeros_like(decay.im))
    while exponent:
        result, decay, exponent = (result * decay if exponent % 2 else result), decay * decay, exponent // 2
    return result


class _Layer(hk.Module):
    def __init__(self, settings: S5, dtype: str, name: str):
        super().__init__(name)
        self.settings, self.dtype = settings, dtype

    def __call__(self, x: jax.Array, segment_ids: jax.Array, call: Call) -> tuple[jax.Array, Complex | tuple]:
        settings, (d, p) = self.settings, (x.shape[-1], self.settings.states // 2)
        dt = self._initial_dt()
        # With random real matrices of 2 P states in the basis of the eigenvectors, of which half are kept, real and
        # imaginary parts are independent and each has half of the variance. Without the factor dt**-0.5 the states of
        # white noise would have variance dt; with it about 1, less at high frequencies.
        weight_in = self._matrix("b", (d, 2, p), ("embed", None, "mlp"), stddev=(2 * d * dt) ** -0.5)
        weight_out = self._matrix("c", (2, p, d), (None, "mlp", "embed"), stddev=(4 * p) ** -0.5, in_dims=2)
        skip = logical.param("d", (d,), ("norm",), hk.initializers.RandomNormal(1.0))
        system = discretized(
            logical.param("log_rate", (p,), ("mlp",), hk.initializers.Constant(math.log(0.5))),
            logical.param("frequency", (p,), ("mlp",), lambda shape, dtype: jnp.asarray(settings.frequencies, dtype)),
            logical.param("log_dt", (p,), ("mlp",), lambda shape, dtype: jnp.asarray(np.log(dt), dtype)),
        )
        products = logical.constrain(jnp.einsum("btd,dcp->btcp", x, weight_in), "batch", "length", None, "mlp")
        if call.before is not None:  # otherwise padding has a segment of its own
            products = jnp.where(call.real(x.shape[1])[..., None, None], products, 0)
        states, last = states_of_rows(
            system,
            Complex(products[:, :, 0], products[:, :, 1]),
            segment_ids,
            call.carried if call.before is None else call.before.state,
            continues=None if call.carried is None else call.side.continues,
            chunk=settings.chunk,
            dtype=x.dtype,
        )
        hidden = logical.constrain(jnp.stack([states.re, -states.im], axis=2), "batch", "length", None, "mlp")
        y = 2 * jnp.einsum("btcp,cpd->btd", hidden, weight_out) + (skip * x.astype(jnp.float32)).astype(x.dtype)
        y = y if settings.activation is None else derivatives.activated(y, settings.activation)
        return y, () if call.before is None and call.carried is None else last

    def _matrix(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], *, stddev: Any, in_dims: int = 1
    ) -> jax.Array:
        def init(shape: Any, dtype: Any) -> jax.Array:
            return jnp.asarray(stddev, dtype) * hk.initializers.RandomNormal(1.0)(shape, dtype)

        return logical.param(name, shape, axes, init, in_dims=in_dims, compute_dtype=self.dtype)

    def _initial_dt(self) -> np.ndarray:
        every = np.geomspace(self.settings.min_dt, self.settings.max_dt, self.settings.states // 2)
        return np.random.default_rng(0).permutation(every)
