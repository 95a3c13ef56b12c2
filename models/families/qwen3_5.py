"""Qwen3.5 (Qwen team 2026), dense and with experts; of models with images, the language model."""

import dataclasses
import functools
from typing import Any

from models.decoder.config import DecoderConfig
from models.decoder.published import family
from models.decoder.published.family import Config, Family, Sources
from models.families import _delta, qwen3_next
from models.mixers.gated_delta import GatedDelta

_MROPE = ("mrope_section", "mrope_interleaved")  # positions of images; those of text are the same in all sections


def _read(config: Config) -> dict[str, Any]:
    return qwen3_next.decoder(config, without_effect=_MROPE)


def _read_moe(config: Config) -> dict[str, Any]:
    sparse = qwen3_next.experts(config, normalized=True)
    return qwen3_next.decoder(
        {**config, "intermediate_size": sparse.mlp_dim}, without_effect=_MROPE, feed_forward=sparse
    )


def _write_moe(model: DecoderConfig) -> dict[str, Any]:
    family.experts_to_write(model)  # an error without experts
    return {key: value for key, value in qwen3_next.written(model).items() if key != "intermediate_size"}


def _apart(part: GatedDelta) -> dict[str, tuple[str, str]]:
    keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
    return {
        "delta_query": ("in_proj_qkv", f"(heads head_dim)+{keys + values} embed"),
        "delta_key": ("in_proj_qkv", f"{keys}+(heads head_dim)+{values} embed"),
        "delta_value": ("in_proj_qkv", f"{2 * keys}+(heads head_dim) embed"),
        "delta_gate": ("in_proj_z", "(heads head_dim) embed"),
        "strength": ("in_proj_b", "(heads _) embed"),
        "step": ("in_proj_a", "(heads _) embed"),
    }


def _sources_moe(model: DecoderConfig) -> Sources:
    found = _delta.sources(model, projections=_apart)
    dims = {"gate": "expert (0/2 mlp) embed", "up": "expert (1/2 mlp) embed", "down": "expert embed mlp"}
    for path, source in found.items():
        if (name := path.rpartition("/")[2]) in dims:
            tensor = "gate_up_proj" if name != "down" else "down_proj"
            found[path] = dataclasses.replace(source, name=f"layers.{{}}.mlp.experts.{tensor}", dims=dims[name])
    return found


_DENSE = Family(
    title="Qwen3.5 (text)",
    differs="as Qwen3-Next, with dense layers",
    architecture="Qwen3_5ForCausalLM",
    read=_read,
    write=qwen3_next.written,
    sources=functools.partial(_delta.sources, projections=_apart),
    keys={**qwen3_next.KEYS, "num_key_value_heads": 4},
    nullable=qwen3_next.NULLABLE,
    others=qwen3_next.OTHERS | {"mlp_only_layers"},
)
_SPARSE = _DENSE._replace(
    title="Qwen3.5 MoE (text)",
    differs="as Qwen3-Next, with experts in all layers",
    architecture="Qwen3_5MoeForCausalLM",
    read=_read_moe,
    write=_write_moe,
    sources=_sources_moe,
    keys={
        **{key: value for key, value in qwen3_next.KEYS.items() if key != "intermediate_size"},
        **qwen3_next.SPARSE,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    others={*_DENSE.others, "intermediate_size"},
)
_AROUND = {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
FAMILIES = {
    "qwen3_5_text": _DENSE,
    "qwen3_5": _DENSE._replace(write=None, inside="qwen3_5_text", around=_AROUND, ties_inside=True),
    "qwen3_5_moe_text": _SPARSE,
    "qwen3_5_moe": _SPARSE._replace(write=None, inside="qwen3_5_moe_text", around=_AROUND, ties_inside=True),
}
