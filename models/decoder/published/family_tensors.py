"""Maps the parameters of the decoder to the tensors of published families; `families` maps their fields."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from core.checkpoints import published_files
from core.checkpoints.published import Copy, PublishedFolder
from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.published import families, published_keys

Read = Callable[[str, int | None], np.ndarray]
ADAPTER_CONFIG = published_files.ADAPTER_CONFIG
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Tensors that hold no parameter of the language model: buffers, vision parts, and heads that predict later tokens.
NOT_PARAMETERS = (
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.rotary_emb.inv_freq",
    "*vision_tower.*",
    "*multi_modal_projector.*",
    "*visual.*",
    "mtp.*",
)


def sources(model: DecoderConfig, kind: str = "") -> dict[str, Source]:
    """Returns the source of each parameter of a decoder, by its path, without the prefix of tensor names.

    `kind` is the `model_type`; "": that of an export.
    """
    return families.known()[kind or families.family(model)].sources(model)


def named_sources(model: DecoderConfig, kind: str = "") -> dict[str, Source]:
    """Returns `sources` with the complete tensor names of exported folders."""
    kind = kind or families.family(model)
    prefix = families.known()[kind].prefixes[0]
    return {path: source.prefixed(prefix) for path, source in sources(model, kind).items()}


def merged(read: Read, model: DecoderConfig) -> Read:
    """Returns a function that reads a parameter with its low-rank adapter added, if it has one.

    `read` returns a parameter, given its path and a layer's number (None: all layers).
    """

    def read_merged(path: str, layer: int | None) -> np.ndarray:
        base = read(path, layer)
        if model.lora is None or path.rpartition("/")[2] not in model.lora.targets:
            return base
        return model.lora.merged(base, read(f"{path}_lora_a", layer), read(f"{path}_lora_b", layer))

    return read_merged


def adapter_sources(model: DecoderConfig, kind: str = "") -> dict[str, Source]:
    """Returns the source of each low-rank adapter, by its path, with PEFT's tensor names.

    Raises:
      UserError: an adapter's matrix is a part of a tensor, which PEFT cannot express.
    """
    result: dict[str, Source] = {}
    if model.lora is None:
        return result
    for path, source in named_sources(model, kind).items():
        if path.rpartition("/")[2] not in model.lora.targets:
            continue
        rows, columns = re.findall(r"\([^)]*\)|\S+", source.dims)
        if "/" in source.dims or "+" in source.dims:
            raise UserError(
                f"{path}: this family keeps several matrices in one tensor, for which PEFT has one adapter; "
                "give --merge, which writes the whole model"
            )
        inner, outer = (rows, columns) if model.positions == "learned" else (columns, rows)
        prefix = "base_model.model." + source.name.removesuffix(".weight")
        for part, dims in (("A", f"rank {inner}"), ("B", f"{outer} rank")):
            name = f"{prefix}.lora_{part}.weight"
            result[f"{path}_lora_{part.lower()}"] = dataclasses.replace(source, name=name, dims=dims)
    return result


def adapter_config(model: DecoderConfig, base: str, kind: str = "") -> dict[str, Any]:
    """Returns the content of PEFT's file `adapter_config.json`; `base` is a folder or hf://OWNER/NAME[@REVISION]."""
    name, _, revision = base.removeprefix("hf://").partition("@") if base.startswith("hf://") else (base, "", "")
    assert model.lora is not None
    tensors = [source.name for path, source in adapter_sources(model, kind).items() if path.endswith("_lora_a")]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": model.lora.dropout,
        "target_modules": sorted({_module(tensor) for tensor in tensors}),
        "fan_in_fan_out": model.positions == "learned",
        "bias": "none",
        "inference_mode": True,
    }


def _module(tensor: str) -> str:
    parts = tensor.split(".")[:-2]
    return parts[-1] if parts[-1] != "c_proj" else ".".join(parts[-2:])


def published_folder(decoder: DecoderConfig, folder: str) -> PublishedFolder:
    """Returns access to a decoder's parameters in the folder of a published model.

    Raises:
      UserError: the folder cannot be read, or its model is not supported.
    """
    found = published_files.small_files(folder)
    name = published_files.described(folder)
    config, where = families.read_config(found), f"{name}/{published_files.CONFIG}"
    differences = families.differences(decoder, config, where=where)
    is_tied = decoder.tied and families.fields(config, where=where)["tied"]
    family = families.known()[config["model_type"]]
    quantization = config.get("quantization_config") or {}
    values = families.values(family, families.language_model(family, config))
    dequantized = family.quantized.get(published_keys.method(quantization))
    otherwise = (
        f"{where} has tie_word_embeddings = true, but transformers would use both, because they differ; set "
        "pretrained.model.tied = False, or in a copy of the folder tie_word_embeddings to false"
    )
    return PublishedFolder(
        published_files.weights(folder),
        family.sources(decoder),
        prefixes=family.prefixes,
        ignored=(*NOT_PARAMETERS, *family.ignored(values)),
        copies=_copies(decoder, otherwise, is_tied=is_tied),
        limits={"vocab": decoder.vocab_size},
        dequantized=None if dequantized is None else lambda tensors: dequantized(tensors, quantization),
        differences=differences,
        name=name,
    )


def _copies(decoder: DecoderConfig, otherwise: str, *, is_tied: bool) -> list[Copy]:
    """Returns head tensors that may repeat another parameter; `otherwise` tells the user what to do if they differ."""
    if is_tied:
        return [Copy(head, "embedding", otherwise) for head in HEADS]
    return [] if decoder.tied else [Copy(HEADS[1], "unembedding", "remove one of the two")]
