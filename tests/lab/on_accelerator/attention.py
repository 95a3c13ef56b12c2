"""The kernel of attention for this device, compared with plain products in float32, and its time beside theirs."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.hosts import machine
from models.decoder.attention import attention, cudnn_attention
from models.decoder.attention.attention_check import TOLERANCE
from models.decoder.attention.scores import Scores
from models.decoder.prefix import Prefix
from tests.lab.on_accelerator.recorder import Recorder, Request, seconds_of

_HEADS, _KEY_HEADS, _HEAD_DIM = 16, 4, 128
_CALLS = "__cudnn$fmha"  # the target of the calls in a program; the backward pass has one of its own


def measure(record: Recorder, request: Request) -> None:
    """Measures causal attention with grouped heads, packing, a window, a prefix, and all heads of their own."""
    platform = machine.of_this_process().chip.platform
    length, rows = request.sized(2048, 128), request.sized(8, 1)
    reason = cudnn_attention.problem(length, _HEAD_DIM, jnp.bfloat16, softcap=None) if platform != "tpu" else ""
    kernel = {"tpu": attention.splash_attention}.get(platform, attention.on_gpus)
    options: dict[str, Any] = {}
    if reason:
        record.absent("kernel", reason)
        options = {"implementation": "xla"}  # the same call of JAX, by plain products
    for name, case in _cases(length).items():
        heads = _HEADS if case.pop("own_heads", False) else _KEY_HEADS
        inputs = _inputs(rows, length, heads)
        segments = case.pop("segments")
        form = functools.partial(kernel, scores=case["scores"], **options)
        plain = functools.partial(attention.plain, scores=case["scores"])
        try:
            _compare(record, name, form, plain, inputs, _rows(segments, rows), case.get("until"))
        except Exception as error:  # a kernel that this device or its library lacks; the other cases are measured
            record.figure(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", ok=False)


def _cases(length: int) -> Mapping[str, dict[str, Any]]:
    place = np.arange(length)
    one, packed = np.ones_like(place), 1 + place // (length // 4) + (place % (length // 4) > length // 9)
    until = np.where(place < length // 8, length // 8 - 1, place)
    return {
        "causal, grouped heads": {"segments": one, "scores": Scores()},
        "causal, own heads": {"segments": one, "scores": Scores(), "own_heads": True},
        "packed rows": {"segments": packed, "scores": Scores()},
        "window": {"segments": one, "scores": Scores(window=length // 4)},
        "prefix": {"segments": one, "scores": Scores(), "until": until},
    }


def _inputs(rows: int, length: int, key_heads: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, heads, _HEAD_DIM) for heads in (_HEADS, key_heads, key_heads, _HEADS)]
    return [jax.random.normal(k, shape).astype(jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def _rows(values: np.ndarray, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (rows, len(values)))


def _compare(
    record: Recorder,
    name: str,
    kernel: Callable,
    plain: Callable,
    inputs: list[jax.Array],
    segments: jax.Array,
    until: np.ndarray | None,
) -> None:
    """Records the largest difference from float32, as a share of the largest entry, and seconds of both passes."""

    def forward(form: Callable) -> Callable:
        def computed(q: jax.Array, k: jax.Array, v: jax.Array, *unused: jax.Array) -> jax.Array:
            own = segments[: len(q)]
            return form(q, k, v, own, own, None if until is None else Prefix(_rows(until, len(q))))

        return computed

    def both(form: Callable) -> Callable:
        def computed(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> list[jax.Array]:
            out, back = jax.vjp(forward(form), q, k, v)
            return [out, *back(weight.astype(out.dtype))]

        return computed

    one_row = [a[:1] for a in inputs]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(both(plain))(*(a.astype(jnp.float32) for a in one_row))
    pairs = zip(("output", "d query", "d key", "d value"), jax.jit(both(kernel))(*one_row), exact, strict=True)
    apart = {part: float(jnp.abs(a - b).max() / jnp.abs(b).max()) for part, a, b in pairs}
    worst, limit = max(apart, key=lambda part: apart[part]), TOLERANCE["bfloat16"]
    is_right = apart[worst] <= limit
    record.figure(f"{name}: {worst} apart", apart[worst], "of the largest", f"tolerance {limit:g}", is_right)
    if jax.local_devices()[0].platform == "cuda":
        calls = jax.jit(both(kernel)).lower(*inputs).as_text().count(_CALLS)
        record.figure(f"{name}: calls of cuDNN", calls, beside="one for each pass", ok=calls == 2)
    for what, timed in (("forward", forward), ("both passes", both)):
        ours, theirs = (_timed(jax.jit(timed(form)), inputs) for form in (kernel, plain))
        record.figure(f"{name}: {what}", 1000 * ours, "ms", f"plain {1000 * theirs:.3g} ms: {theirs / ours:.2f} times")


def _timed(computed: Callable, inputs: list[jax.Array]) -> float:
    return seconds_of(lambda: computed(*inputs), calls=5, turns=3)
