"""Tensors of families with a gated delta rule in some layers and gated attention in the others."""

import functools
from collections.abc import Callable

from core.checkpoints.tensor_map import Source
from models.decoder.config import DecoderConfig, LayerKind
from models.decoder.experts import Experts
from models.decoder.layers import Mlp
from models.decoder.parts import Part
from models.decoder.published import family
from models.decoder.published.family import Sources
from models.mixers.gated_delta import GatedDelta

Projections = Callable[[GatedDelta], dict[str, tuple[str, str]]]  # names and dimensions of tensors, by our names


def _mixer(model: DecoderConfig, kind: LayerKind, *, projections: Projections) -> Sources:
    norm = Source("layers.{}.input_layernorm.weight", "norm")
    part = kind.mixers[0]
    if not isinstance(part, GatedDelta):
        return {"attention_norm": norm, **family.attention_sources(model, kind)}
    keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
    found = {name: (f"{tensor}.weight", dims) for name, (tensor, dims) in projections(part).items()} | {
        "query_kernel": ("conv1d.weight", f"(heads head_dim)+{keys + values} 0/1 _"),
        "key_kernel": ("conv1d.weight", f"{keys}+(heads head_dim)+{values} 0/1 _"),
        "value_kernel": ("conv1d.weight", f"{2 * keys}+(heads head_dim) 0/1 _"),
        "log_rate": ("A_log", "(heads _)"),
        "step_bias": ("dt_bias", "(heads _)"),
        "delta_norm": ("norm.weight", "norm"),
        "delta_output": ("out_proj.weight", "embed (heads head_dim)"),
    }
    return {"mixer_norm": norm} | {
        name: Source(f"layers.{{}}.linear_attn.{tensor}", dims) for name, (tensor, dims) in found.items()
    }


def _feed_forward(part: Part | None) -> Sources:
    found, shared = family.mlp_sources(part), family.mlp_sources(Mlp(), layer="mlp.shared_expert")
    if not isinstance(part, Experts):
        return found
    found |= {f"shared_{name}": source for name, source in shared.items()}
    return {**found, "shared_score": Source("layers.{}.mlp.shared_expert_gate.weight", "_ embed")}


def sources(model: DecoderConfig, *, projections: Projections) -> Sources:
    """Returns the source of each parameter of a decoder, by its path.

    `projections` returns the tensor and dimensions of each projection of a gated delta rule, by our names.
    """
    return family.llama_sources(
        model,
        norms={"mlp_norm": "post_attention_layernorm"},
        attention=functools.partial(_mixer, projections=projections),
        feed_forward=_feed_forward,
    )
