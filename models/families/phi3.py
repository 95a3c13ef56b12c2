"""Phi-3 and Phi-4 (Microsoft 2024): tensors of joined matrices, a part of each head rotated, LongRoPE, a window."""

import functools
from typing import Any

from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder import rotary
from models.decoder.config import DecoderConfig, LayerKind
from models.decoder.layers import Attention
from models.decoder.parts import Part
from models.decoder.published import family, rope_settings
from models.decoder.published.family import Config, Family, Sources

_PARTIAL = "partial_rotary_factor"
_FORMER = ("su", "yarn")  # names of LongRoPE in older files


def _read(config: Config) -> dict[str, Any]:
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise UserError(f"{name} = {rope!r}: expected an object or null")
    fraction: Any = rope.get(_PARTIAL, config[_PARTIAL])
    if not (rope_settings.is_positive(fraction) and fraction <= 1):
        raise UserError(f"{_PARTIAL} = {fraction!r}: expected a number above 0, at most 1")
    rope = {key: value for key, value in rope.items() if key not in (_PARTIAL, "type")} | {
        "rope_type": rope.get("rope_type", rope.get("type", "default"))
    }
    if rope["rope_type"] in _FORMER:
        rope["rope_type"] = "longrope"
    if rope["rope_type"] not in ("default", "longrope"):
        raise UserError(f"rope scaling {rope['rope_type']!r} is not known for this family; known is longrope")
    usual = {
        "max_position_embeddings": config["max_position_embeddings"] or 4096,
        rope_settings.ORIGINAL: config[rope_settings.ORIGINAL],
    }
    read = rope_settings.of_all_layers({**config, "rope_parameters": rope, "rope_scaling": None, **usual})
    found = family.llama(
        config, rope=read, mixer=Attention(window=config["sliding_window"], rotary_fraction=float(fraction))
    )
    head = config["head_dim"] or found["embed_dim"] // found["num_heads"]
    if (width := int(head * fraction)) % 2 or not width:
        raise UserError(
            f"{_PARTIAL} = {fraction!r}: rotates {width} of {head} dimensions of a head; expected an even number"
        )
    _check_factors(found, width)
    return found


def _check_factors(found: dict[str, Any], width: int) -> None:
    scaling = found["rope_scaling"]
    if isinstance(scaling, rotary.LongRope):
        for name, factors in (("short_factor", scaling.short), ("long_factor", scaling.long)):
            if len(factors) != width // 2:
                raise UserError(
                    f"{name} has {len(factors)} numbers; expected {width // 2}, half of the rotated dimensions"
                )


def _write(model: DecoderConfig) -> dict[str, Any]:
    usual = family.attention_of(model)
    found = family.llama_config(
        model,
        sliding_window=usual.window,
        pad_token_id=None,
        **{_PARTIAL: usual.rotary_fraction},
    )
    if (rope := found["rope_scaling"]) is not None and rope_settings.ORIGINAL in rope:
        found[rope_settings.ORIGINAL] = rope[rope_settings.ORIGINAL]
    return found


def _attention(model: DecoderConfig, kind: LayerKind) -> Sources:
    del kind
    name, h, n = "layers.{}.self_attn.qkv_proj.weight", model.num_heads, model.num_kv_heads
    return {
        "query": Source(name, f"(heads+{2 * n} head_dim) embed"),
        "key": Source(name, f"({h}+kv_heads+{n} head_dim) embed"),
        "value": Source(name, f"({h + n}+kv_heads head_dim) embed"),
        "output": Source("layers.{}.self_attn.o_proj.weight", "embed (heads head_dim)"),
    }


def _feed_forward(part: Part | None) -> Sources:
    del part
    return {
        "gate": Source("layers.{}.mlp.gate_up_proj.weight", "(0/2 mlp) embed"),
        "up": Source("layers.{}.mlp.gate_up_proj.weight", "(1/2 mlp) embed"),
        "down": Source("layers.{}.mlp.down_proj.weight", "embed mlp"),
    }


FAMILIES = {
    "phi3": Family(
        title="Phi-3, Phi-4",
        differs="joined matrices, partial rotary embedding, LongRoPE",
        architecture="Phi3ForCausalLM",
        read=_read,
        write=_write,
        sources=functools.partial(family.llama_sources, attention=_attention, feed_forward=_feed_forward),
        keys={
            **family.LLAMA,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            _PARTIAL: 1.0,
            rope_settings.ORIGINAL: 4096,
        },
        nullable=family.NULLABLE | {"sliding_window"},
        others=family.ROPE,
    )
}
