"""Published vision towers: the `config.json` of SigLIP and CLIP, and the names and layouts of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.checkpoints import published_files
from core.checkpoints.image_processor import CLIP_COLORS
from core.checkpoints.published import PublishedFolder
from core.checkpoints.tensor_map import Source
from core.errors import UserError, check_integer, check_number
from core.logical import Specs
from core.model_settings import differing_settings
from models.decoder.published import families, family
from models.vision.tower import NAME, VisionTower

FAMILIES = ("siglip", "siglip_vision_model", "clip", "clip_vision_model")
INSIDE = ("clip_vision_model", "siglip_vision_model", "idefics3_vision", "smolvlm_vision")  # of other models
_PREFIXES = ("vision_model.", "model.vision_tower.vision_model.", "vision_tower.vision_model.", "")
# Tensors that hold no parameter of the tower: the text model, and what turns features into one vector for an image.
_IGNORED = (
    "*text_model.*",
    "*logit_*",
    "*vision_model.head.*",
    "head.*",
    "*text_projection*",
    "*visual_projection*",
    "*.position_ids",
)
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_SIGLIP = {**_DEFAULTS, "patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_CLIP = {**_DEFAULTS, "patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
_IDEFICS3 = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_CLIP_COLORS = {name.removeprefix("image_"): tuple(colors) for name, colors in CLIP_COLORS.items()}


def fields(config: Mapping[str, Any], *, where: str = published_files.CONFIG) -> dict[str, Any]:
    """Returns the fields of `VisionTower` that a `config.json` describes.

    Raises UserError if a value is malformed or not supported.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES and kind not in INSIDE:
        raise UserError(
            f"{where}: model_type = {kind!r} is not a supported vision model; supported: {', '.join(FAMILIES)}"
        )
    is_clip = str(kind).startswith("clip")
    inner = config.get("vision_config", config)
    if not isinstance(inner, Mapping):
        raise UserError(f"{where}: vision_config = {inner!r}: expected the configuration of the vision model")
    found = {**(_CLIP if is_clip else _IDEFICS3 if kind in INSIDE[2:] else _SIGLIP), **inner}
    for name in _DEFAULTS.keys() | {"patch_size"}:
        check_integer(found[name], where=f"{where}: {name}", least=1)
    check_number(found["layer_norm_eps"], where=f"{where}: layer_norm_eps", is_positive=True)
    if found["num_channels"] != 3:
        raise UserError(f"{where}: num_channels = {found['num_channels']} is not supported (expected 3)")
    return {
        "image_size": found["image_size"],
        "patch_size": found["patch_size"],
        "num_layers": found["num_hidden_layers"],
        "embed_dim": found["hidden_size"],
        "mlp_dim": found["intermediate_size"],
        "num_heads": found["num_attention_heads"],
        "norm_eps": found["layer_norm_eps"],
        "activation": family.known_activation(str(found["hidden_act"])),
        "patch_bias": not is_clip,
        "class_token": is_clip,
        "input_norm": is_clip,
        "cut": found["image_size"] % found["patch_size"] > 0,
        "output_norm": not is_clip,  # CLIP normalizes the class token alone, which is not part of the features
        **(_CLIP_COLORS if is_clip else {}),
    }


def pretrained(folder: str, **changes: Any) -> VisionTower:
    """Returns the tower that a folder describes, with fields replaced by `changes`.

    `folder` is local, gs:// or hf://OWNER/NAME.
    """
    found = published_files.small_files(folder)
    read = fields(families.read_config(found), where=str(found / published_files.CONFIG))
    return VisionTower(**{**read, **changes})


def keys(kind: str) -> frozenset[str]:
    """Returns the configuration keys, besides `model_type`, that `fields` reads."""
    return frozenset(_CLIP if kind.startswith("clip") else _SIGLIP)


def sources(tower: VisionTower) -> dict[str, Source]:
    """Returns the source of each parameter of a tower, by its path."""
    result = {
        f"{NAME}_patches": Source("embeddings.patch_embedding.weight", "embed channels pixel_rows pixel_columns"),
        f"{NAME}_positions": Source("embeddings.position_embedding.weight", "_ embed"),
    }
    if tower.patch_bias:
        result[f"{NAME}_patches_bias"] = Source("embeddings.patch_embedding.bias", "norm")
    if tower.class_token:
        result[f"{NAME}_class"] = Source("embeddings.class_embedding", "norm")
    norms = {f"{NAME}_input_norm": ("pre_layrnorm", tower.input_norm)}
    norms[f"{NAME}_output_norm"] = ("post_layernorm", tower.output_norm)
    block = {
        "output": ("self_attn.out_proj", "embed (heads head_dim)", "norm"),
        "up": ("mlp.fc1", "mlp embed", "mlp"),
        "down": ("mlp.fc2", "embed mlp", "norm"),
        "attention_norm": ("layer_norm1", "norm", "norm"),
        "mlp_norm": ("layer_norm2", "norm", "norm"),
    }
    for ours, theirs, heads in (("query", "q", "heads"), ("key", "k", "kv_heads"), ("value", "v", "kv_heads")):
        block[ours] = (f"self_attn.{theirs}_proj", f"({heads} head_dim) embed", f"({heads} head_dim)")
    for ours, (theirs, is_there) in norms.items():
        if is_there:
            result[ours] = Source(f"{theirs}.weight", "norm")
            result[f"{ours}_bias"] = Source(f"{theirs}.bias", "norm")
    for ours, (theirs, weight, bias) in block.items():
        path = f"{NAME}_layers/block/{ours}"
        result[path] = Source(f"encoder.layers.{{}}.{theirs}.weight", weight)
        result[f"{path}_bias"] = Source(f"encoder.layers.{{}}.{theirs}.bias", bias)
    return result


def published_folder(tower: VisionTower, folder: str, config: Mapping[str, Any]) -> PublishedFolder:
    """Returns the parameters of a tower in a published model's folder; reads headers only."""
    name = published_files.described(folder)
    where = f"{name}/{published_files.CONFIG}"
    differing = differing_settings(VisionTower(**fields(config, where=where)), tower)
    unused = () if tower.output_norm else ("*post_layernorm.*",)
    return PublishedFolder(
        published_files.weights(folder),
        sources(tower),
        prefixes=_PREFIXES,
        ignored=(*_IGNORED, *unused),
        differences=[f"{field} = {a!r} in {where}, {b!r} in the model" for field, (a, b) in differing.items()],
        name=name,
    )


class TwoFolders:
    """The parameters of a tower and of a decoder in two folders."""

    def __init__(self, tower: PublishedFolder, decoder: PublishedFolder):
        self._folders = (tower, decoder)
        self.notes = (*tower.notes, *decoder.notes)

    def describe(self) -> str:
        """Returns the descriptions of both folders."""
        return " and ".join(folder.describe() for folder in self._folders)

    def renamed(self, renames: Mapping[str, str]) -> TwoFolders:
        """Returns the folders as if the decoder's tensors had other names."""
        tower, decoder = self._folders
        return TwoFolders(tower, decoder.renamed(renames))

    def has(self, path: str) -> bool:
        """Returns whether one of the folders has a parameter."""
        return any(folder.has(path) for folder in self._folders)

    def num_layers(self, path: str) -> int | None:
        """Returns the number of layers of a parameter; None if neither folder has it."""
        return next((folder.num_layers(path) for folder in self._folders if folder.has(path)), None)

    def problems(self, shapes: Any, specs: Specs) -> list[str]:
        """Returns the differences between the folders and the parameters of a model, as lines."""
        parts = [self._own(folder, shapes, specs) for folder in self._folders]
        return [line for folder, part in zip(self._folders, parts, strict=True) for line in folder.problems(*part)]

    def load(self, abstract: Any, specs: Specs, *, progress: Callable[[str, int, int], None] = lambda *_: None) -> Any:
        """Returns the parameters as `PublishedFolder.load`, each from the folder that has it."""
        found: dict[str, dict[str, Any]] = {module: {} for module in abstract}
        for folder in self._folders:
            if any((part := self._own(folder, abstract, specs))[0].values()):
                for module, leaves in folder.load(*part, progress=progress).items():
                    found[module] |= leaves
        return found

    def _own(self, folder: PublishedFolder, *trees: Any) -> tuple[Any, ...]:
        """Returns a folder's part of each tree; parameters of neither folder are in the second's part."""
        other = self._folders[0]

        def is_here(module: str, name: str) -> bool:
            path = f"{module}/{name}".replace("~/", "")
            return folder.has(path) if folder is other else not other.has(path)

        kept = (
            {
                module: {name: leaf for name, leaf in leaves.items() if is_here(module, name)}
                for module, leaves in t.items()
            }
            for t in trees
        )
        return tuple({module: leaves for module, leaves in tree.items() if leaves} for tree in kept)
