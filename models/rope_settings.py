"""Rotary embeddings in `config.json`: reads their base and scaling, and writes the scaling."""

import json
import math
from collections.abc import Mapping
from typing import Any

from core.errors import UserError
from models import rotary
from models.decoder_config import GLOBAL, LOCAL

Config = Mapping[str, Any]
LAYER_TYPES = {GLOBAL: "full_attention", LOCAL: "sliding_attention"}
_SCALINGS = {  # with the keys that they need
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor")}


def is_positive(value: Any) -> bool:
    """Returns whether a value is a finite number above 0; JSON files may contain NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def read(config: Config, layer_type: str) -> dict[str, Any]:
    """Returns the settings of the rotary embedding of layers of a type, with the keys of transformers 5 or 4."""
    found = _settings(config, "rope_parameters")
    found = _settings(found, layer_type) if found.keys() & LAYER_TYPES.values() else found
    rope = {"rope_theta": config["rope_theta"], **found, **_settings(config, "rope_scaling")}
    if not is_positive(rope["rope_theta"]):
        raise UserError(f"rope_theta = {json.dumps(rope['rope_theta'])}: expected a number above 0")
    return rope


def _settings(config: Config, key: str) -> Mapping[str, Any]:
    """Returns an object in a configuration; {} if it is absent or null."""
    found = config.get(key)
    if not isinstance(found, Mapping | None):
        raise UserError(f"{key} = {json.dumps(found)}: expected an object or null")
    return found or {}


def scaling(rope: Mapping[str, Any], max_positions: int | None) -> rotary.Scaling | None:
    """Returns the scaling that the result of `read` describes; None if there is none.

    Args:
      rope: from `read`.
      max_positions: the length before an extension that names none.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UserError(f"rope scaling {kind!r} is not known; known are {', '.join(_SCALINGS)}")
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"partial_rotary_factor = {part!r} of the rotary embedding is not supported (expected 1.0)")
    rope = {"original_max_position_embeddings": max_positions, **rope}
    optional = [key for key in _OPTIONAL.get(kind, ()) if rope.get(key) is not None]
    for key in (*_SCALINGS[kind], *optional):
        if not is_positive(rope.get(key)):
            raise UserError(f"rope scaling {kind!r} has {key} = {json.dumps(rope.get(key))}: expected a number above 0")
    if kind == "linear":
        return rotary.Linear(factor=rope["factor"])
    if kind == "llama3":
        if not rope["low_freq_factor"] < rope["high_freq_factor"]:
            raise UserError(
                f"rope scaling 'llama3' has low_freq_factor = {rope['low_freq_factor']} and high_freq_factor = "
                f"{rope['high_freq_factor']}: expected the first to be less"
            )
        return rotary.Llama3(
            factor=rope["factor"],
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
            original_length=rope["original_max_position_embeddings"],
        )
    if kind == "yarn":
        if rope.get("mscale") or rope.get("mscale_all_dim"):
            raise UserError("rope scaling 'yarn' with mscale is not supported; expected attention_factor or neither")
        if not isinstance(rope.get("truncate", True), bool):
            raise UserError(
                f"rope scaling 'yarn' has truncate = {json.dumps(rope['truncate'])}: expected true or false"
            )
        return rotary.Yarn(
            factor=rope["factor"],
            original_length=rope["original_max_position_embeddings"],
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            sharpening=rope.get("attention_factor"),
            truncate=rope.get("truncate", True),
        )
    return None


def written(scaling: rotary.Scaling | None) -> dict[str, Any] | None:
    """Returns a scaling as `scaling` reads it."""
    if isinstance(scaling, rotary.Linear):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, rotary.Llama3):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    if isinstance(scaling, rotary.Yarn):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            **({} if scaling.sharpening is None else {"attention_factor": scaling.sharpening}),
        }
    return None
