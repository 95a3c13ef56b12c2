"""Granite 3 (IBM 2024), dense: Llama with multipliers of embeddings, scores, outputs of parts, and logits."""

from typing import Any

from models.decoder.config import DecoderConfig
from models.decoder.layers import Attention
from models.decoder.published import family
from models.decoder.published.family import Config, Family

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def multiplied(config: Config, *, rotary_fraction: float = 1.0) -> dict[str, Any]:
    """Returns the fields of a decoder that the multipliers describe."""
    embedding, scores, residual, logits = (float(config[name]) for name in MULTIPLIERS)
    return {
        "scaled_embedding": False if embedding == 1 else embedding,
        "mixer": Attention(scale=scores, rotary_fraction=rotary_fraction),
        "residual_scale": residual,
        "logit_scale": 1 / logits,
    }


def multipliers(model: DecoderConfig) -> dict[str, float]:
    """Returns the multipliers of a decoder, by their keys."""
    root = model.embed_dim**0.5 if model.scaled_embedding is True else model.scaled_embedding
    scale = family.attention_of(model).score_scale(model)
    exact, short = 1 / model.logit_scale, round(1 / model.logit_scale, 12)
    logits_scaling = short if 1 / short == model.logit_scale else exact
    values = (float(root or 1), scale, model.residual_scale, logits_scaling)
    return dict(zip(MULTIPLIERS, values, strict=True))


def _read(config: Config) -> dict[str, Any]:
    return family.without_windows(config, **multiplied(config))


def _write(model: DecoderConfig) -> dict[str, Any]:
    return family.llama_config(model, **multipliers(model))


FAMILIES = {
    "granite": Family(
        title="Granite 3",
        differs="multipliers of embeddings, scores, outputs and logits",
        architecture="GraniteForCausalLM",
        read=_read,
        write=_write,
        sources=family.llama_sources,
        keys={**family.LLAMA, **dict.fromkeys(MULTIPLIERS, 1.0)},
        nullable=family.NULLABLE,
        others=family.ROPE,
    )
}
