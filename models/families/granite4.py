"""Granite 4 (IBM 2025), dense: Granite 3 with gate and up in one tensor, with or without a rotary embedding."""

import functools
from typing import Any

from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.parts import Part
from models.decoder.published import family
from models.decoder.published.family import Check, Config, Family, Sources
from models.decoder.published.rope_settings import FULL
from models.families import granite

_TYPES = {"attention": FULL, "mamba": "linear_attention"}  # names of published files, and those of transformers 5
_WIDTH, _POSITIONS, _EXPERTS = "shared_intermediate_size", "position_embedding_type", "num_local_experts"
_SUPPORTED = "only layers with attention are supported, such as those of granite-4.0-micro and granite-4.0-1b"


def _read(config: Config) -> dict[str, Any]:
    if config.get("layer_types") is None:
        raise UserError(f"layer_types is missing, so all layers have Mamba-2; {_SUPPORTED}")
    types = family.layer_types(config, (*_TYPES, *_TYPES.values())) or []
    if others := [layer for layer, name in enumerate(types) if _TYPES.get(name, name) != FULL]:
        raise UserError(
            f"layer_types has {types[others[0]]!r} in {len(others)} of {len(types)} layers, which is Mamba-2; "
            f"{_SUPPORTED}"
        )
    fraction = float(config[_POSITIONS] == "rope")
    return family.llama(
        {**config, "intermediate_size": config[_WIDTH]}, **granite.multiplied(config, rotary_fraction=fraction)
    )


def _write(model: DecoderConfig) -> dict[str, Any]:
    return family.llama_config(
        model,
        **granite.multipliers(model),
        layer_types=["attention"] * model.num_layers,
        shared_intermediate_size=model.mlp_dim,
        position_embedding_type="rope" if family.attention_of(model).rotary_fraction else "nope",
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=1,  # transformers checks that the sizes of Mamba-2 fit the model, also without such layers
        mamba_d_head="auto",
    )


def _feed_forward(part: Part | None) -> Sources:
    del part
    return {
        "gate": Source("layers.{}.shared_mlp.input_linear.weight", "(0/2 mlp) embed"),
        "up": Source("layers.{}.shared_mlp.input_linear.weight", "(1/2 mlp) embed"),
        "down": Source("layers.{}.shared_mlp.output_linear.weight", "embed mlp"),
    }


_OF_MAMBA = {f"mamba_{name}" for name in ["n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size"]}
_OF_MAMBA |= {"mamba_conv_bias", "mamba_proj_bias", "time_step_limit"}
FAMILIES = {
    "granitemoehybrid": Family(
        title="Granite 4 (dense)",
        differs="as Granite 3; joined matrices; rotary embedding or none",
        architecture="GraniteMoeHybridForCausalLM",
        read=_read,
        write=_write,
        sources=functools.partial(family.llama_sources, feed_forward=_feed_forward),
        keys={
            **{key: value for key, value in family.LLAMA.items() if key != "intermediate_size"},
            **dict.fromkeys(granite.MULTIPLIERS, 1.0),
            _WIDTH: 1024,
            _POSITIONS: None,
            _EXPERTS: 8,
            "normalization_function": "rmsnorm",
        },
        nullable=family.NULLABLE | {_POSITIONS},
        others=family.ROPE | _OF_MAMBA | {"intermediate_size", "num_experts_per_tok"},
        aliases={"layers_block_type": "layer_types"},
        checks={
            _POSITIONS: Check(lambda value: value in ("rope", "nope"), '"rope", "nope" or null'),
            _EXPERTS: Check(
                lambda value: type(value) is int and value == 0,
                f"0 (an absent key means 8), because experts of this family are not supported; {_SUPPORTED}",
            ),
            "normalization_function": Check(lambda value: value == "rmsnorm", '"rmsnorm"'),
        },
    )
}
