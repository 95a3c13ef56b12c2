"""SmolLM3 (Hugging Face 2025): Llama without rotary embedding in some layers."""

from typing import Any

from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.layers import Attention
from models.decoder.published import family
from models.decoder.published.family import Check, Config, Family


def _read(config: Config) -> dict[str, Any]:
    layers, interval, listed = (config[k] for k in ("num_hidden_layers", "no_rope_layer_interval", "no_rope_layers"))
    if listed is None:
        listed = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(listed) < layers:
        raise UserError(f"no_rope_layers has {len(listed)} entries, and num_hidden_layers = {layers}")
    parts = [Attention(rotary_fraction=float(turns)) for turns in listed[:layers]]
    return family.without_windows(config, mixer=family.shortest(parts))


def _are_flags(value: Any) -> bool:
    return isinstance(value, list) and all(type(layer) is int and layer in (0, 1) for layer in value)


def _write(model: DecoderConfig) -> dict[str, Any]:
    turns = [int(part.rotary_fraction > 0) for part in family.attentions(model)]
    return family.llama_config(model, no_rope_layers=turns, pad_token_id=None)


FAMILIES = {
    "smollm3": Family(
        title="SmolLM3",
        differs="layers without rotary embedding",
        architecture="SmolLM3ForCausalLM",
        read=_read,
        write=_write,
        sources=family.llama_sources,
        keys={
            **family.LLAMA,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "no_rope_layers": None,
        },
        nullable=family.NULLABLE | {"no_rope_layers"},
        others=family.ROPE | family.WINDOWS_OF_QWEN,
        checks={"no_rope_layers": Check(_are_flags, "a list of 0 (without rotary embedding) and 1")},
    )
}
