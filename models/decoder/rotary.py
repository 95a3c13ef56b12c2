"""Rotary position embeddings (Su et al. 2021, RoFormer), and the scalings that extend them to longer contexts.

B batch, T length, K head_dim.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError, check_number


class Scaling(Protocol):
    """Changes the frequencies of a rotary embedding, and multiplies its tables by a factor."""

    @property
    def attention_factor(self) -> float:
        """Factor of the cosines and sines."""

    def __call__(self, frequency: jax.Array, theta: float, positions: jax.Array) -> jax.Array:
        """Returns scaled frequencies: [K/2], or [B, 1, 1, K/2] for each row, from `frequency` [K/2]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Divides positions by `factor`, a number above 0 (Chen et al. 2023, position interpolation)."""

    factor: float
    attention_factor: float = dataclasses.field(default=1.0, init=False)

    def __post_init__(self):
        check_number(self.factor, where="Linear.factor", is_positive=True)

    def __call__(self, frequency: jax.Array, theta: float, positions: jax.Array) -> jax.Array:
        del theta, positions
        return frequency / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Divides low frequencies by `factor`, keeps high ones and interpolates between, as the code of Llama 3.1 does.

    Attributes:
      factor: divisor of frequencies with wavelengths above `original_length / low_frequency_factor`.
      low_frequency_factor, high_frequency_factor: wavelengths below `original_length / high_frequency_factor` are kept.
      original_length: context length before the extension.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    attention_factor: float = dataclasses.field(default=1.0, init=False)

    def __post_init__(self):
        for name in ("factor", "low_frequency_factor", "high_frequency_factor", "original_length"):
            check_number(getattr(self, name), where=f"Llama3.{name}", is_positive=True)
        if self.low_frequency_factor == self.high_frequency_factor:
            raise UserError(
                f"Llama3.low_frequency_factor = {self.low_frequency_factor}: expected another number than that of "
                "high_frequency_factor"
            )

    def __call__(self, frequency: jax.Array, theta: float, positions: jax.Array) -> jax.Array:
        del theta, positions
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_length * frequency / (2 * math.pi)  # in the original context
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023, section 3.2): divides low frequencies by `factor`, and sharpens attention.

    Attributes:
      factor: extension of the context, a number above 0.
      original_length: context length before the extension.
      beta_fast, beta_slow: dimensions that turn more often than `beta_fast` times in the original context are kept,
        those that turn less often than `beta_slow` times are divided.
      sharpening: factor of cosines and sines; None: 0.1 ln(factor) + 1, or 1 for a factor below 1.
      truncate: whether the bounds between them are rounded outward.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    sharpening: float | None = None
    truncate: bool = True

    def __post_init__(self):
        for name in ("factor", "original_length", "beta_fast", "beta_slow"):
            check_number(getattr(self, name), where=f"Yarn.{name}", is_positive=True)

    @property
    def attention_factor(self) -> float:
        """Factor of the cosines and sines."""
        return (0.1 * math.log(max(self.factor, 1.0)) + 1.0) if self.sharpening is None else self.sharpening

    def __call__(self, frequency: jax.Array, theta: float, positions: jax.Array) -> jax.Array:
        del positions
        half = frequency.shape[0]

        def dimension(turns: float) -> float:  # the one that turns so often in the original context
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        divided = jnp.clip((jnp.arange(half) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return frequency / self.factor * divided + frequency * (1 - divided)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): divides every frequency by a factor of its own.

    Attributes:
      short, long: factors [K/2] of rows whose largest position is below `original_length`, and of longer ones.
      original_length: context length before the extension.
      sharpening: factor of cosines and sines.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    sharpening: float = 1.0

    def __post_init__(self):
        check_number(self.original_length, where="LongRope.original_length", is_positive=True)
        for name in ("short", "long"):
            object.__setattr__(self, name, factors := tuple(getattr(self, name)))
            for factor in factors:
                check_number(factor, where=f"LongRope.{name}", is_positive=True)

    @property
    def attention_factor(self) -> float:
        """Factor of the cosines and sines."""
        return self.sharpening

    def __call__(self, frequency: jax.Array, theta: float, positions: jax.Array) -> jax.Array:
        del theta
        if {len(self.short), len(self.long)} != {len(frequency)}:
            raise UserError(
                f"LongRope has {len(self.short)} short and {len(self.long)} long factors: expected {len(frequency)} of "
                "each, half the rotated width of a head"
            )
        is_long = (jnp.max(positions, axis=1) >= self.original_length)[:, None, None, None]
        return frequency / jnp.where(is_long, jnp.asarray(self.long), jnp.asarray(self.short))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proportional:
    """Rotates a part of the dimensions of a head, with frequencies spread over all of them (Gemma 4).

    Attributes:
      fraction: part of the dimensions that is rotated, those of the highest frequencies; from 0 to 1.
      factor: number above 0 by which frequencies are divided.
    """

    fraction: float
    factor: float = 1.0
    attention_factor: float = dataclasses.field(default=1.0, init=False)

    def __post_init__(self):
        check_number(self.fraction, where="Proportional.fraction", least=0, most=1)
        check_number(self.factor, where="Proportional.factor", is_positive=True)

    def __call__(self, frequency: jax.Array, theta: float, positions: jax.Array) -> jax.Array:
        del theta, positions
        turning = int(self.fraction * 2 * len(frequency) // 2)
        return jnp.where(jnp.arange(len(frequency)) < turning, frequency / self.factor, 0.0)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A rotary embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      scaling: changes the frequencies, and scales queries and keys; None: neither.
      length: further factor of rotated queries and keys.
      width: number of dimensions of a head that are rotated; None: the size of the decoder's heads.
    """

    theta: float
    scaling: Scaling | None = None
    length: float = 1.0
    width: int | None = None


class RotaryTables(NamedTuple):
    """Cosines and sines of the rotary angles, times a factor, for both halves of a head; [B, T, 1, K] float32."""

    cos: jax.Array
    sin: jax.Array


def tables(
    positions: jax.Array, head_dim: int, *, theta: float, length: float = 1.0, scaling: Scaling | None = None
) -> RotaryTables:
    """Returns rotary tables that pair dimension i with i + K/2 (Su et al. 2021, eq. 34).

    Args:
      positions: [B, T], int32.
      head_dim: K.
      theta: base of the geometric series of wavelengths.
      length: factor of the tables.
    """
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [K/2]
    if scaling is not None:
        frequency, length = scaling(frequency, theta, positions), length * scaling.attention_factor
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency  # [B, T, 1, K/2]
    return RotaryTables(
        *(length * jnp.concatenate([table, table], axis=-1) for table in (jnp.cos(angle), jnp.sin(angle)))
    )


def rotate(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
    """Rotates x [B, T, heads, K] by the angles of `positions` [B, T]."""
    return apply(x, tables(positions, x.shape[-1], theta=theta))


def apply(x: jax.Array, turned_by: RotaryTables) -> jax.Array:
    """Rotates x[..., :W] of x [B, T, heads, K], where W is the last dimension of the tables."""
    width = turned_by.cos.shape[-1]
    if width == x.shape[-1]:
        return _turn(x, *turned_by)
    return jnp.concatenate([_turn(x[..., :width], *turned_by), x[..., width:]], axis=-1)


@jax.custom_vjp
def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns x cos + (-b, a) sin, where (a, b) are the halves of x; slicing them is slow on TPUs."""
    half = x.shape[-1] // 2
    places = np.eye(2 * half, k=half) - np.eye(2 * half, k=-half)  # (a, b) -> (-b, a)
    swapped = jnp.einsum(
        "bthk,kj->bthj",
        x,
        jnp.asarray(places, x.dtype),
        precision=jax.lax.Precision.HIGHEST,  # keeps float32 inputs exact; bfloat16 is exact anyway
        preferred_element_type=jnp.float32,
    )
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _turn_forward(x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, tuple]:
    return _turn(x, cos, sin), (cos, sin)


def _turn_back(tables: tuple, dy: jax.Array) -> tuple:
    cos, sin = tables
    return _turn(dy, cos, -sin), jnp.zeros_like(cos), jnp.zeros_like(sin)


_turn.defvjp(_turn_forward, _turn_back)
