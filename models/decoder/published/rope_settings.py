"""Rotary embeddings in `config.json`: reads their base and scaling, and writes the scaling."""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from core.errors import UserError
from models.decoder import rotary

Config = Mapping[str, Any]
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
ORIGINAL = "original_max_position_embeddings"  # the context length before an extension
PARTIAL = "partial_rotary_factor"
_SCALINGS = {  # kinds of scalings, with the keys that they need
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": (ORIGINAL,),
    "proportional": (),
}
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
    "proportional": (PARTIAL, "factor"),
}
# Known keys; each scaling reads some of them. Keys in the last line belong to scalings that are not supported.
_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "truncate", "finetuned"}
_KEYS |= {key for keys in (*_SCALINGS.values(), *_OPTIONAL.values()) for key in keys}
_KEYS |= {"short_factor", "long_factor", "mrope_section"}


class Rope(NamedTuple):
    """The rotary embedding of layers: its base, and its scaling, if there is one."""

    theta: float
    scaling: rotary.Scaling | None


def is_positive(value: Any) -> bool:
    """Returns whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def of_all_layers(config: Config) -> Rope:
    """Returns the rotary embedding of a family that has one for all layers."""
    parameters, scaling = (_settings(config, key) for key in ("rope_parameters", "rope_scaling"))
    outside = {key: config[key] for key in (ORIGINAL,) if key in config}
    return _read(
        {"rope_theta": config["rope_theta"], **(scaling or parameters), **outside}, config["max_position_embeddings"]
    )


def of_scores(config: Config) -> float:
    """Returns `mscale_all_dim` of the scaling, by which latent attention sharpens its scores; 0 if there is none.

    Raises UserError if a setting is malformed or not supported.
    """
    parameters, scaling = (_settings(config, key) for key in ("rope_parameters", "rope_scaling"))
    rope = scaling or parameters
    found = rope.get("mscale_all_dim") or 0.0
    if found and not is_positive(found):
        raise UserError(f"mscale_all_dim = {json.dumps(found)} of the rotary embedding: expected a number above 0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if found and kind == "longrope":
        raise UserError("mscale_all_dim of rope scaling 'longrope' is not supported: expected 'yarn'")
    return float(found) if kind != "default" else 0.0


def partial(config: Config, usual: float, others: Collection[str] = ()) -> tuple[float, Config]:
    """Returns the fraction of a head's dimensions that is rotated, and the configuration without this setting.

    `usual` is the fraction if there is none; `others` are further keys to leave out. Raises UserError if the fraction
    is malformed or does not fit the size of a head.
    """
    found = {key: _settings(config, key) for key in ("rope_scaling", "rope_parameters")}
    fraction: Any = (found["rope_scaling"] or found["rope_parameters"]).get(PARTIAL, usual)
    if not (is_positive(fraction) and fraction <= 1):
        raise UserError(f"{PARTIAL} = {fraction!r}: expected a number above 0, at most 1")
    head = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if (width := int(head * fraction)) % 2 or not width:
        raise UserError(
            f"{PARTIAL} = {fraction!r}: rotates {width} of {head} dimensions of a head; expected an even number"
        )
    kept = {
        name: {key: value for key, value in rope.items() if key not in (PARTIAL, *others)}
        for name, rope in found.items()
    }
    return float(fraction), {**config, **kept}


def of_each_type(config: Config) -> tuple[Rope, float]:
    """Returns the rotary embedding of layers with full attention, and the base of those with a window.

    Raises UserError if a setting is unknown, malformed or not supported.
    """
    found = _settings(config, "rope_parameters")
    if other := sorted(found.keys() - set(LAYER_TYPES)):
        raise UserError(
            f"rope_parameters has {', '.join(f'{key} = {json.dumps(found[key])}' for key in other)}: expected an "
            f"object for each of {' and '.join(LAYER_TYPES)}"
        )
    full, local = (_settings(found, kind, "rope_parameters.") for kind in LAYER_TYPES)
    full = {**full, **_settings(config, "rope_scaling")}
    if full.get("truncate", True) is not True:
        raise UserError(f"truncate = {json.dumps(full['truncate'])} is not supported in this family (expected true)")
    rope = _read({"rope_theta": config["rope_theta"], **full}, config["max_position_embeddings"])
    theta, scaling = _read({"rope_theta": config["rope_local_base_freq"], **local}, None)
    if scaling is not None:
        raise UserError(f"rope_parameters.sliding_attention = {json.dumps(local)}: expected no scaling")
    return rope, theta


def _settings(config: Config, key: str, within: str = "") -> Mapping[str, Any]:
    found = config.get(key)
    if not isinstance(found, Mapping | None):
        raise UserError(f"{within}{key} = {json.dumps(found)}: expected an object or null")
    return found or {}


def _read(rope: Mapping[str, Any], max_positions: int | None) -> Rope:
    if unknown := sorted(rope.keys() - _KEYS):
        listed = ", ".join(f"{key} = {json.dumps(rope[key])}" for key in unknown)
        raise UserError(f"the rotary embedding (rope_parameters, rope_scaling) has {listed}, which is not known")
    if not is_positive(rope["rope_theta"]):
        raise UserError(f"rope_theta = {json.dumps(rope['rope_theta'])}: expected a number above 0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UserError(f"rope scaling {kind!r} is not known; known are {', '.join(_SCALINGS)}")
    part = rope.get(PARTIAL, 1.0)
    if part != 1.0 and kind != "proportional":
        raise UserError(f"{PARTIAL} = {part!r} of the rotary embedding is not supported (expected 1.0)")
    if max_positions is not None:
        rope = {ORIGINAL: max_positions, **rope}
    optional = [key for key in _OPTIONAL.get(kind, ()) if rope.get(key) is not None]
    for key in (*_SCALINGS[kind], *optional):
        if not is_positive(rope.get(key)):
            raise UserError(f"rope scaling {kind!r} has {key} = {json.dumps(rope.get(key))}: expected a number above 0")
    if kind == "longrope":
        if rope[ORIGINAL] <= 1:
            raise UserError(f"rope scaling 'longrope' has {ORIGINAL} = {rope[ORIGINAL]}: expected a number above 1")
        if max_positions is not None and rope.get("factor") is None:
            rope = {**rope, "factor": max_positions / rope[ORIGINAL]}
        for key in ("short_factor", "long_factor"):
            if not (isinstance(rope.get(key), list) and all(map(is_positive, rope[key]))):
                raise UserError(f"rope scaling 'longrope' has {key} = {json.dumps(rope.get(key))}: expected numbers")
    return Rope(float(rope["rope_theta"]), _scaling(kind, rope))


def _scaling(kind: str, rope: Mapping[str, Any]) -> rotary.Scaling | None:
    if kind == "proportional":
        if (part := rope.get(PARTIAL) or 1.0) > 1:
            raise UserError(f"rope scaling 'proportional' has {PARTIAL} = {part!r}: expected at most 1")
        return rotary.Proportional(fraction=float(part), factor=rope.get("factor") or 1.0)
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
            original_length=rope[ORIGINAL],
        )
    if kind == "yarn":
        if not isinstance(rope.get("truncate", True), bool):
            raise UserError(
                f"rope scaling 'yarn' has truncate = {json.dumps(rope['truncate'])}: expected true or false"
            )
        return rotary.Yarn(
            factor=rope["factor"],
            original_length=rope[ORIGINAL],
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            sharpening=_sharpening(rope),
            truncate=rope.get("truncate", True),
        )
    if kind == "longrope":
        factor, length = rope.get("factor") or 1.0, rope[ORIGINAL]
        usual = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        return rotary.LongRope(
            short=tuple(map(float, rope["short_factor"])),
            long=tuple(map(float, rope["long_factor"])),
            original_length=length,
            sharpening=rope.get("attention_factor") or usual,
        )
    return None


def _sharpening(rope: Mapping[str, Any]) -> float | None:
    given, scale, of_all = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None or not scale or not of_all:
        return given
    above, below = (1.0 + 0.1 * one * math.log(max(rope["factor"], 1.0)) for one in (scale, of_all))
    return above / below


def written(scaling: rotary.Scaling | None) -> dict[str, Any] | None:
    """Returns the entry `rope_scaling` of a `config.json` for a scaling; None without scaling."""
    if isinstance(scaling, rotary.Linear):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, rotary.Proportional):
        factor = {} if scaling.factor == 1 else {"factor": scaling.factor}
        return {"rope_type": "proportional", PARTIAL: scaling.fraction, **factor}
    if isinstance(scaling, rotary.Llama3):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            ORIGINAL: scaling.original_length,
        }
    if isinstance(scaling, rotary.LongRope):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            ORIGINAL: scaling.original_length,
            "attention_factor": scaling.sharpening,
        }
    if isinstance(scaling, rotary.Yarn):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            ORIGINAL: scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            **({} if scaling.sharpening is None else {"attention_factor": scaling.sharpening}),
        }
    return None
