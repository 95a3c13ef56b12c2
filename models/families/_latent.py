"""Tensors of families with latent attention."""

from core.checkpoints.tensor_map import Source
from models.decoder.config import DecoderConfig, LayerKind
from models.decoder.published import family
from models.decoder.published.family import Sources
from models.mixers.latent_attention import LatentAttention


def attention_sources(model: DecoderConfig, kind: LayerKind) -> Sources:
    """Returns the sources of a layer's latent attention, by our names."""
    part = kind.mixers[0]
    if not isinstance(part, LatentAttention):  # a decoder that the folder's settings do not fit
        return family.attention_sources(model, kind)
    found = {
        "query": ("q_proj", "(heads head_dim) embed"),
        "query_down": ("q_a_proj", "_ embed"),
        "query_latent_norm": ("q_a_layernorm", "norm"),
        "query_up": ("q_b_proj", "(heads head_dim) latent"),
        "latent_down": ("kv_a_proj_with_mqa", "_ embed"),
        "latent_norm": ("kv_a_layernorm", "norm"),
        "latent_up": ("kv_b_proj", "(heads head_dim) latent"),
        "output": ("o_proj", "embed (heads head_dim)"),
    }
    absent = ("query_down", "query_latent_norm", "query_up") if part.query_latent_dim is None else ("query",)
    return {
        ours: Source(f"layers.{{}}.self_attn.{tensor}.weight", dims)
        for ours, (tensor, dims) in found.items()
        if ours not in absent
    }
