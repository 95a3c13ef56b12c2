"""Configurations of the decoder by name: this project's own sizes, and published models."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.decoder import rotary
from models.decoder.experts import Experts
from models.decoder.layers import Attention

Fields = Mapping[str, Any]


def _sizes(layers: int, embed: int, mlp: int, heads: int, kv_heads: int, /, **other: Any) -> Fields:
    return {
        "num_layers": layers,
        "embed_dim": embed,
        "mlp_dim": mlp,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        **other,
    }


def _gpt2(layers: int, embed: int, heads: int) -> Fields:
    """Returns fields of GPT-2 (Radford et al. 2019)."""
    return _sizes(
        layers,
        embed,
        4 * embed,
        heads,
        heads,
        vocab_size=50257,
        norm="layer",
        bias="all",
        gated=False,
        activation="gelu_tanh",
        positions="learned",
        max_positions=1024,
        tied=True,
    )


def _llama3(*sizes: int, factor: float = 8.0, **other: Any) -> Fields:
    """Returns fields of Llama 3.1 and 3.2 (Dubey et al. 2024)."""
    scaling = rotary.Llama3(factor=factor)
    return _sizes(*sizes, vocab_size=128256, rope_theta=500000.0, rope_scaling=scaling, max_positions=131072, **other)


def _qwen2(*sizes: int, vocab_size: int = 151936, max_positions: int = 131072, **other: Any) -> Fields:
    """Returns fields of Qwen 2.5 (Qwen team 2024)."""
    sizing = {"vocab_size": vocab_size, "max_positions": max_positions}
    return _sizes(*sizes, norm_eps=1e-6, bias="qkv", rope_theta=1e6, **sizing, **other)


def _qwen3(*sizes: int, **other: Any) -> Fields:
    """Returns fields of Qwen 3 (Qwen team 2025)."""
    sizing = {"vocab_size": 151936, "head_dim": 128, "max_positions": 40960}
    return _sizes(*sizes, mixer=Attention(qk_norm=True), rope_theta=1e6, norm_eps=1e-6, **sizing, **other)


def _gemma(*sizes: int, **other: Any) -> Fields:
    return _sizes(
        *sizes,
        norm="rms_offset",
        norm_eps=1e-6,
        post_norm=True,
        activation="gelu_tanh",
        scaled_embedding=True,
        tied=True,
        **other,
    )


def _gemma2(*sizes: int, scale: float | None = None, **other: Any) -> Fields:
    """Returns fields of Gemma 2 (Gemma team 2024)."""
    return _gemma(
        *sizes,
        vocab_size=256000,
        mixer=tuple(Attention(window=window, scale=scale, softcap=50.0) for window in (4096, None)),
        logit_softcap=30.0,
        max_positions=8192,
        **other,
    )


def _gemma3(*sizes: int, window: int, scale: float | None = None, **other: Any) -> Fields:
    """Returns fields of Gemma 3 (Gemma team 2025)."""
    attention = Attention(qk_norm=True, scale=scale)
    mixer = (dataclasses.replace(attention, window=window, rope_theta=10000.0),) * 5 + (attention,)
    return _gemma(*sizes, rope_theta=1e6, mixer=mixer, **other)


_LINEAR: dict[str, Any] = {
    "rope_scaling": rotary.Linear(factor=8.0),
    "vocab_size": 262208,
    "window": 1024,
    "max_positions": 131072,
}


def _needing_parts() -> dict[str, Callable[[], Fields]]:
    """Returns functions by preset name; that of `a-b` returns the fields in `models.*.preset_a_b`."""

    def fields(module: str) -> Fields:
        return importlib.import_module(module).FIELDS

    package = __package__.rpartition(".")[0]
    files = sorted(Path(__file__).parents[1].glob("*/preset_*.py"))
    names = {file.stem.removeprefix("preset_").replace("_", "-"): file for file in files}
    return {
        name: functools.partial(fields, f"{package}.{file.parent.name}.{file.stem}") for name, file in names.items()
    }


FIELDS: Mapping[str, Fields | Callable[[], Fields]] = {
    "tiny": _sizes(2, 64, 176, 4, 2, vocab_size=259),
    "125m": _sizes(12, 768, 2048, 12, 12),
    "1b": _sizes(22, 2048, 5632, 32, 4),
    "7b": _sizes(32, 4096, 11008, 32, 32),
    **_needing_parts(),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": _sizes(32, 4096, 11008, 32, 32, max_positions=4096),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32, 8),
    "llama-3.1-70b": _llama3(80, 8192, 28672, 64, 8),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, 8, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, 8, factor=32.0, tied=True),
    "mistral-7b-v0.1": _sizes(32, 4096, 14336, 32, 8, mixer=Attention(window=4096), max_positions=32768),
    "mistral-7b-v0.3": _sizes(32, 4096, 14336, 32, 8, vocab_size=32768, rope_theta=1e6, max_positions=32768),
    "mixtral-8x7b": _sizes(
        32, 4096, 14336, 32, 8, rope_theta=1e6, max_positions=32768, feed_forward=Experts(num_experts=8, top_k=2)
    ),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, max_positions=32768, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, vocab_size=152064),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, 8),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, feed_forward=Experts(num_experts=128, top_k=8, mlp_dim=768)),
    "gemma-2-2b": _gemma2(26, 2304, 9216, 8, 4, head_dim=256),
    "gemma-2-9b": _gemma2(42, 3584, 14336, 16, 8, head_dim=256),
    "gemma-2-27b": _gemma2(46, 4608, 36864, 32, 16, head_dim=128, scale=144**-0.5),
    "gemma-3-1b": _gemma3(26, 1152, 6912, 4, 1, head_dim=256, vocab_size=262144, window=512, max_positions=32768),
    "gemma-3-4b": _gemma3(34, 2560, 10240, 8, 4, head_dim=256, **_LINEAR),
    "gemma-3-12b": _gemma3(48, 3840, 15360, 16, 8, head_dim=256, **_LINEAR),
    "gemma-3-27b": _gemma3(62, 5376, 21504, 32, 16, head_dim=128, scale=168**-0.5, **_LINEAR),
    "smollm2-135m": _sizes(30, 576, 1536, 9, 3, vocab_size=49152, rope_theta=1e5, tied=True, max_positions=8192),
    "smollm2-360m": _sizes(32, 960, 2560, 15, 5, vocab_size=49152, rope_theta=1e5, tied=True, max_positions=8192),
    "smollm2-1.7b": _sizes(
        24, 2048, 8192, 32, 32, vocab_size=49152, rope_theta=130000.0, tied=True, max_positions=8192
    ),
}
