"""Published models of images and text: reads their `config.json`, and names their tensors.

    LLaVA                a layer of the tower -> two matrices -> decoder
    Idefics3, SmolVLM    the tower -> squares of patches as one vector -> one matrix -> decoder

Liu et al. 2023 (LLaVA 1.5), Laurençon et al. 2024 (Idefics3). The tower is a CLIP or SigLIP, and attention is causal.
"""

import dataclasses
import fnmatch
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.checkpoints import published_files, safetensors_files
from core.checkpoints.published import Copy, PublishedFolder
from core.checkpoints.safetensors_files import Tensor
from core.checkpoints.tensor_map import Source
from core.errors import UserError
from core.model_settings import differing_settings
from models.decoder.published import families, family, family_tensors, published_keys
from models.decoder.transformer import Transformer
from models.vision import families as towers
from models.vision.tower import VisionTower

Model = Any  # a `models.vision.model.VisionLanguageModel`, whose module imports this one

Config = Mapping[str, Any]
# The decoders inside, with the sizes that transformers gives them if `text_config` leaves them out.
_LLAMA = dict(zip(family.SIZES, (32000, 4096, 11008, 32, 32), strict=True))
DECODERS: Mapping[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336},
    "qwen2": {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016},
}
_INNER = ("vision_config", "text_config")
_IMAGE_TOKEN = ("image_token_id", "image_token_index")  # keys of its id, of which a family has one by default
# Keys beside those that a family reads. They say who wrote the file, or what a processor or a loss does.
AROUND = {"image_seq_length", "ignore_index", "vocab_size", "_pad_token_id", "use_reentrant_checkpointing"}
OF_TOWER = {  # weights that are not read, sizes of processors, training
    *("projection_dim", "initializer_factor", "vision_use_head", "vocab_size", "max_image_size", "size", "dropout"),
    *("tie_word_embeddings", "use_base_siglip"),
}
_OF_TEXT = {"perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler"}  # read by no transformers
_HEAD = "/lm_head.weight"
_BUFFERS = ("*.position_ids", "*.rotary_emb.inv_freq")


class Names(NamedTuple):
    """The names of tensors of a family.

    Attributes:
      vision, text, connector: possible prefixes of the names of these parts.
      heads: possible names of the output matrix.
      matrices: names of the connector's matrices, by their names in Renga.
    """

    vision: Sequence[str]
    text: Sequence[str]
    connector: Sequence[str]
    heads: Sequence[str]
    matrices: Mapping[str, str]


class Family(NamedTuple):
    """A family of models of images and text.

    Attributes:
      differs: its tower and connector, in a few words.
      read: returns fields of the model, given the configuration, the tower's fields and the decoder's `embed_dim`.
      towers: kinds of towers; the first is that of a configuration that names none.
      processor: the `image_processor_type` of a folder that names none.
      keys: keys of `config.json` that are read, with the values that transformers gives absent ones.
      ignored: patterns of names of tensors that are not read.
      ties_inside: whether `text_config`, too, can tie the decoder's embedding and output matrix.
      has_frames: whether a prompt says which frame of an image follows.
    """

    title: str
    differs: str
    read: Callable[[Config, Config, int], dict[str, Any]]
    towers: Sequence[str]
    processor: str
    keys: Config
    names: Names
    ignored: Sequence[str] = ()
    ties_inside: bool = False
    has_frames: bool = False


def _llava(config: Config, tower: Config, width: int) -> dict[str, Any]:
    select = "default" if tower["class_token"] else "full"  # features never have the class token
    _require(config, "vision_feature_select_strategy", select)
    layer, layers = config["vision_feature_layer"], tower["num_layers"]
    if layer == 0 or not -layers - 1 <= layer <= layers:  # with 0, transformers finds no features
        raise UserError(
            f"vision_feature_layer = {layer}: expected one of {layers} layers of the tower, from {-layers - 1} to -1, "
            f"or from 1 to {layers}"
        )
    return {
        "vision": {**tower, "num_layers": layer % (layers + 1), "output_norm": False},
        "connector_dim": width,
        "connector_activation": family.known_activation(config["projector_hidden_act"]),
        "connector_bias": config["multimodal_projector_bias"],
    }


def _idefics3(config: Config, tower: Config, width: int) -> dict[str, Any]:
    del width
    side = tower["image_size"] // tower["patch_size"]
    if not all(np.array_equal(_rounded_places(side, block), np.arange(side)) for block in (1, 4, 8, 16)):
        raise UserError(
            f"vision_config has {side} patches along a side, of which transformers rounds some to the position of a "
            "neighbor; expected a number where it rounds none, such as 26, 27 or 32"
        )
    return {"vision": tower, "connector_bias": False, "connector_square": config["scale_factor"]}


def _rounded_places(side: int, block: int) -> np.ndarray:
    """Returns the index that transformers gives each patch of a side, if torch.arange vectorizes by `block`."""
    step = 1 / side
    edge = np.arange(math.ceil((1 - step) / step))
    first = (step + step * (edge // block * block)).astype(np.float32)
    edges = (first + edge % block * step).astype(np.float32)
    fractions = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    return np.searchsorted(edges, np.minimum(fractions, np.float32(1 - 1e-6)), side="right")


def _require(config: Config, key: str, expected: Any) -> None:
    if config[key] != expected:
        raise UserError(f"{key} = {json.dumps(config[key])} is not supported (expected {json.dumps(expected)})")


_LLAVA = Family(
    title="LLaVA 1.5",
    differs="CLIP or SigLIP, two matrices",
    read=_llava,
    towers=("clip_vision_model", "siglip_vision_model"),
    processor="LlavaImageProcessor",
    keys={
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "image_token_index": 32000,
    },
    names=Names(
        vision=("vision_tower.vision_model.", "vision_tower.")
        + ("model.vision_tower.vision_model.", "model.vision_tower."),
        text=("language_model.model.", "model.language_model."),
        connector=("multi_modal_projector.", "model.multi_modal_projector."),
        heads=("language_model.lm_head.weight", "lm_head.weight"),
        matrices={"up": "linear_1", "down": "linear_2"},
    ),
    ignored=("*vision_tower.*post_layernorm.*", "*vision_tower.*head.*"),
    ties_inside=True,
)
_IDEFICS3 = Family(
    title="Idefics3, SmolVLM",
    differs="SigLIP, squares of patches joined, a matrix",
    read=_idefics3,
    towers=("idefics3_vision",),
    processor="Idefics3ImageProcessor",
    keys={"scale_factor": 2, "image_token_id": 128257},
    names=Names(
        vision=("model.vision_model.",),
        text=("model.text_model.",),
        connector=("model.connector.modality_projection.",),
        heads=("lm_head.weight",),
        matrices={"down": "proj"},
    ),
    has_frames=True,
)
FAMILIES: Mapping[str, Family] = {
    "llava": _LLAVA,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3._replace(towers=("smolvlm_vision", "idefics3_vision"), processor="SmolVLMImageProcessor"),
}


def fields(config: Config, *, where: str = published_files.CONFIG) -> dict[str, Any]:
    """Returns the fields of `VisionLanguageModel` that a `config.json` describes.

    The entries `vision` and `decoder` are mappings of the fields of the tower and of the decoder. Raises UserError if a
    value is malformed or not supported.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UserError(
            f"{where}: model_type = {kind!r} is not a supported model of images and text; supported are "
            f"{', '.join(FAMILIES)}"
        )
    one = FAMILIES[kind]
    problems = published_keys.problems(config, {*_INNER, "tie_word_embeddings", "image_token_id", *one.keys, *AROUND})
    token = image_token(config, where=where)
    found = {**one.keys, "tie_word_embeddings": False, **config}
    found |= {key: token for key in _IMAGE_TOKEN if key in one.keys}
    for key, usual in {**one.keys, "tie_word_embeddings": False}.items():
        is_count = type(usual) is int and key != "vision_feature_layer"
        if type(found[key]) is not type(usual) or (is_count and found[key] < 1):
            problems.append(f"{key} = {json.dumps(found[key])}: expected a value such as {json.dumps(usual)}")
    inner = {key: config.get(key) for key in _INNER}
    problems += [f"{key} = {v!r}: expected an object" for key, v in inner.items() if not isinstance(v, Mapping)]
    if problems:
        raise UserError(f"{where} (model_type {kind}): " + "; ".join(problems))
    tower = _tower(one, inner["vision_config"] or {}, f"{where}, vision_config")
    decoder = _decoder(one, found, inner["text_config"] or {}, f"{where}, text_config")
    try:
        own = one.read(found, tower, decoder["embed_dim"])
    except UserError as error:
        raise UserError(f"{where} (model_type {kind}): {error}") from error
    return {**own, "decoder": decoder, "causal": True}


def _tower(one: Family, config: Config, where: str) -> dict[str, Any]:
    kind = config.get("model_type", one.towers[0])
    if kind not in one.towers:
        raise UserError(f"{where}: model_type = {kind!r} is not supported; supported are {', '.join(one.towers)}")
    if problems := published_keys.problems(config, {*towers.keys(kind), *OF_TOWER}):
        raise UserError(f"{where} (model_type {kind}): " + "; ".join(problems))
    return towers.fields({**config, "model_type": kind}, where=where)


def _decoder(one: Family, outer: Config, config: Config, where: str) -> dict[str, Any]:
    kind = config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in DECODERS:
        raise UserError(f"{where}: model_type = {kind!r} is not supported; supported are {', '.join(DECODERS)}")
    tied = outer["tie_word_embeddings"] or (one.ties_inside and config.get("tie_word_embeddings", False))
    kept = {key: value for key, value in config.items() if key not in _OF_TEXT}
    return families.fields({**DECODERS[kind], **kept, "model_type": kind, "tie_word_embeddings": tied}, where=where)


def image_token(config: Config, *, where: str = published_files.CONFIG) -> int:
    """Returns the id of image tokens, whose embeddings the vectors of an image replace.

    Raises UserError if two keys name different ones.
    """
    usual = FAMILIES[config["model_type"]].keys
    given = {key: config[key] for key in _IMAGE_TOKEN if key in config}
    found = list((given or {key: usual[key] for key in _IMAGE_TOKEN if key in usual}).values())
    if any(each != found[0] for each in found):
        said = " and ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
        raise UserError(f"{where}: {said}, which both name the image token: expected the same id, or one of the keys")
    return found[0]


def sources(model: Model, names: Names, decoder_kind: str) -> dict[str, Source]:
    """Returns the source of each parameter by its path, with complete names of tensors."""
    found = {path: source.prefixed(names.vision[0]) for path, source in towers.sources(model.vision).items()}
    for path, source in family_tensors.sources(model.decoder, decoder_kind).items():
        is_head = source.name == _HEAD
        found[path] = Source(names.heads[0], source.dims) if is_head else source.prefixed(names.text[0])
    rows = {"up": ("mlp _", "norm"), "down": ("embed mlp" if "up" in names.matrices else "embed _", "norm")}
    for ours, theirs in names.matrices.items():
        start, (weight, bias) = f"{names.connector[0]}{theirs}", rows[ours]
        found[f"connector_{ours}"] = Source(f"{start}.weight", weight)
        if model.connector_bias:
            found[f"connector_{ours}_bias"] = Source(f"{start}.bias", bias)
    return found


def published_folder(model: Model, folder: str, config: Config) -> PublishedFolder:
    """Returns the parameters of a model in its folder; reads headers only."""
    name = published_files.described(folder)
    where = f"{name}/{published_files.CONFIG}"
    one, weights = FAMILIES[config["model_type"]], published_files.weights(folder)
    tensors = safetensors_files.tensors(weights)
    names = names_in(one.names, tensors)
    copies = []
    if model.decoder.tied:
        otherwise = f"{where} has tie_word_embeddings = true; set it to false in a copy of the folder"
        copies = [Copy(head, "embedding", otherwise) for head in one.names.heads]
    return PublishedFolder(
        weights,
        sources(model, names, _decoder_kind(config)),
        ignored=(*_not_read(model, names, tensors, one), *_BUFFERS),
        copies=copies,
        limits={"vocab": model.decoder.vocab_size},
        differences=differences(model, config, where=where),
        name=name,
    )


def differences(model: Model, config: Config, *, where: str = published_files.CONFIG) -> list[str]:
    """Returns one line for each field in which a model differs from a `config.json`.

    The selector, and `mean` and `std` of the tower, are not compared.
    """
    found = fields(config, where=where)
    vision = VisionTower(**{**found["vision"], "mean": model.vision.mean, "std": model.vision.std})
    described = dataclasses.replace(model, **{**found, "vision": vision, "decoder": Transformer(**found["decoder"])})
    differing = differing_settings(described, model)
    return [f"{field} = {a!r} in {where}, {b!r} in the model" for field, (a, b) in differing.items()]


def exported(model: Model, folder: str, config: Config) -> tuple[dict[str, Source], dict[str, Tensor]]:
    """Returns what to write to export a model whose parameters began as those of a published folder.

    That is the source of each parameter but the selector's, by path; and the tensors that the model does not read, by
    name. Raises UserError if the model's settings differ from `config`.
    """
    name = published_files.described(folder)
    exact = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, quantization="none"))
    if lines := differences(exact, config, where=f"{name}/{published_files.CONFIG}"):
        raise UserError(f"the model is no longer that of {name}, whose config.json an export has: {'; '.join(lines)}")
    tensors = safetensors_files.tensors(published_files.weights(folder))
    one = FAMILIES[config["model_type"]]
    names = names_in(one.names, tensors)
    patterns = _not_read(model, names, tensors, one)
    kept = {key: tensor for key, tensor in tensors.items() if any(fnmatch.fnmatch(key, p) for p in patterns)}
    return sources(model, names, _decoder_kind(config)), kept


def _decoder_kind(config: Config) -> str:
    return config["text_config"].get("model_type", "llama")


def _not_read(model: Model, names: Names, tensors: Collection[str], one: Family) -> list[str]:
    return [*one.ignored, *_layers_after(model, names, tensors)]


def names_in(names: Names, tensors: Collection[str]) -> Names:
    """Returns `names` with one alternative each: the first in `tensors`, or else the first."""

    def there(prefixes: Sequence[str], after: str) -> tuple[str, ...]:
        return (next((prefix for prefix in prefixes if prefix + after in tensors), prefixes[0]),)

    return Names(
        there(names.vision, "embeddings.patch_embedding.weight"),
        there(names.text, "embed_tokens.weight"),
        there(names.connector, f"{names.matrices['down']}.weight"),
        there(names.heads, ""),
        names.matrices,
    )


def _layers_after(model: Model, names: Names, tensors: Collection[str]) -> list[str]:
    start = f"{names.vision[0]}encoder.layers."
    numbers = {name.removeprefix(start).partition(".")[0] for name in fnmatch.filter(tensors, f"{start}*")}
    after = sorted(int(number) for number in numbers if number.isdecimal() and int(number) >= model.vision.num_layers)
    return [f"{start}{number}.*" for number in after]
