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
from models.decoder.experts import Experts
from models.decoder.parts import Part
from models.decoder.published import families

Read = Callable[[str, int | None], np.ndarray]
# Names as they are exported, of the models with images that hold them, and of models saved without a head.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
ADAPTER_CONFIG = published_files.ADAPTER_CONFIG
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
GPT2_PREFIXES = ("transformer.", "")
# Tensors that hold no parameter of the language model: buffers, and the vision part of Gemma 3.
NOT_PARAMETERS = (
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.rotary_emb.inv_freq",
    "*vision_tower.*",
    "*multi_modal_projector.*",
)


def sources(model: DecoderConfig) -> dict[str, Source]:
    """Returns the source of each parameter of a decoder, by its path, without the prefix of tensor names."""
    if model.positions == "learned":
        return _gpt2_sources(model)
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if model.post_norm:
        norms = {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    block = {ours: Source(f"layers.{{}}.{theirs}.weight", "norm") for ours, theirs in norms.items()}
    if families.attention_of(model).qk_norm:
        block |= {
            f"{part}_norm": Source(f"layers.{{}}.self_attn.{part[0]}_norm.weight", "norm") for part in ("query", "key")
        }
    for ours, theirs, rows in (("query", "q", "heads"), ("key", "k", "kv_heads"), ("value", "v", "kv_heads")):
        block[ours] = Source(f"layers.{{}}.self_attn.{theirs}_proj.weight", f"({rows} head_dim) embed")
        if model.bias == "qkv":
            block[f"{ours}_bias"] = Source(f"layers.{{}}.self_attn.{theirs}_proj.bias", f"({rows} head_dim)")
    block["output"] = Source("layers.{}.self_attn.o_proj.weight", "embed (heads head_dim)")
    result = {"embedding": Source("embed_tokens.weight", "vocab embed"), "final_norm": Source("norm.weight", "norm")}
    for layer in range(model.group):
        kind = model.layer_kind(layer)
        of_layer = {**block, **_feed_forward_sources(model, kind.feed_forward)}
        result |= {
            f"layers/{kind.module}/{ours}": dataclasses.replace(source, first=layer, every=model.group)
            for ours, source in of_layer.items()
        }
    return result if model.tied else {**result, "unembedding": Source("/lm_head.weight", "vocab embed")}


def _feed_forward_sources(model: DecoderConfig, part: Part | None) -> dict[str, Source]:
    has_experts = isinstance(part, Experts)
    layer, names = "mlp", {part: f"{part}_proj" for part in ("gate", "up", "down")}
    if has_experts and not families.attention_of(model).qk_norm:  # Mixtral
        layer, names = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    start = f"layers.{{}}.{layer}." + ("experts.{}." if has_experts else "")
    dims = {"gate": "mlp embed", "up": "mlp embed", "down": "embed mlp"}
    found = {part: Source(f"{start}{name}.weight", dims[part]) for part, name in names.items()}
    return found if not has_experts else {**found, "router": Source(f"layers.{{}}.{layer}.gate.weight", "_ embed")}


def _gpt2_sources(model: DecoderConfig) -> dict[str, Source]:
    block = {
        "output": Source("h.{}.attn.c_proj.weight", "(heads head_dim) embed"),
        "output_bias": Source("h.{}.attn.c_proj.bias", "norm"),
        "up": Source("h.{}.mlp.c_fc.weight", "embed mlp"),
        "up_bias": Source("h.{}.mlp.c_fc.bias", "mlp"),
        "down": Source("h.{}.mlp.c_proj.weight", "mlp embed"),
        "down_bias": Source("h.{}.mlp.c_proj.bias", "norm"),
    }
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        block |= {
            ours: Source(f"h.{{}}.{theirs}.weight", "norm"),
            f"{ours}_bias": Source(f"h.{{}}.{theirs}.bias", "norm"),
        }
    for i, (ours, heads) in enumerate((("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))):
        block[ours] = Source("h.{}.attn.c_attn.weight", f"embed ({i}/3 {heads} head_dim)")
        block[f"{ours}_bias"] = Source("h.{}.attn.c_attn.bias", f"({i}/3 {heads} head_dim)")
    result = {
        "embedding": Source("wte.weight", "vocab embed"),
        "position_embedding": Source("wpe.weight", "_ embed"),
        "final_norm": Source("ln_f.weight", "norm"),
        "final_norm_bias": Source("ln_f.bias", "norm"),
        **{f"layers/block/{ours}": source for ours, source in block.items()},
    }
    return result if model.tied else {**result, "unembedding": Source("/lm_head.weight", "vocab embed")}


def named_sources(model: DecoderConfig) -> dict[str, Source]:
    """Returns `sources` with the complete tensor names of exported folders."""
    prefix = (GPT2_PREFIXES if model.positions == "learned" else PREFIXES)[0]
    return {path: source.prefixed(prefix) for path, source in sources(model).items()}


def merged(read: Read, model: DecoderConfig) -> Read:
    """Returns a function that reads a parameter with its low-rank adapter added, if it has one.

    Args:
      read: returns a parameter by its path; of one layer, if a number is given.
      model: the decoder with adapters, or without.
    """

    def read_merged(path: str, layer: int | None) -> np.ndarray:
        base = read(path, layer)
        if model.lora is None or path.rpartition("/")[2] not in model.lora.targets:
            return base
        return model.lora.merged(base, read(f"{path}_lora_a", layer), read(f"{path}_lora_b", layer))

    return read_merged


def adapter_sources(model: DecoderConfig) -> dict[str, Source]:
    """Returns the source of each low-rank adapter, by its path, with the tensor names of the library PEFT.

    Raises:
      UserError: an adapter belongs to a part of a matrix (GPT-2's queries, keys and values), which PEFT cannot express.
    """
    result: dict[str, Source] = {}
    if model.lora is None:
        return result
    for path, source in named_sources(model).items():
        if path.rpartition("/")[2] not in model.lora.targets:
            continue
        rows, columns = re.findall(r"\([^)]*\)|\S+", source.dims)
        if "/" in source.dims:
            raise UserError(
                f"{path}: this family keeps queries, keys and values in one matrix, for which PEFT has one adapter; "
                "give --merge, which writes the whole model"
            )
        inner, outer = (rows, columns) if model.positions == "learned" else (columns, rows)
        prefix = "base_model.model." + source.name.removesuffix(".weight")
        for part, dims in (("A", f"rank {inner}"), ("B", f"{outer} rank")):
            name = f"{prefix}.lora_{part}.weight"
            result[f"{path}_lora_{part.lower()}"] = dataclasses.replace(source, name=name, dims=dims)
    return result


def adapter_config(model: DecoderConfig, base: str) -> dict[str, Any]:
    """Returns the contents of PEFT's `ADAPTER_CONFIG`.

    Args:
      model: the decoder with adapters.
      base: the published model, a folder or hf://OWNER/NAME[@REVISION].
    """
    name, _, revision = base.removeprefix("hf://").partition("@") if base.startswith("hf://") else (base, "", "")
    assert model.lora is not None
    tensors = [source.name for path, source in adapter_sources(model).items() if path.endswith("_lora_a")]
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
    """Returns the module of an adapter's tensor: `q_proj`; `attn.c_proj` where a layer has two of a name."""
    parts = tensor.split(".")[:-2]
    return parts[-1] if parts[-1] != "c_proj" else ".".join(parts[-2:])


def published_folder(decoder: DecoderConfig, folder: str) -> PublishedFolder:
    """Returns the parameters of a decoder in the folder of a published model; reads its `config.json` and headers."""
    found = published_files.small_files(folder)
    name = published_files.described(folder)
    config, where = families.read_config(found), f"{name}/{published_files.CONFIG}"
    is_tied = decoder.tied and families.fields(config, where=where)["tied"]
    otherwise = (
        f"{where} has tie_word_embeddings = true, but transformers would use both, because they differ; set "
        "pretrained.model.tied = False, or in a copy of the folder tie_word_embeddings to false"
    )
    return PublishedFolder(
        published_files.weights(folder),
        sources(decoder),
        prefixes=GPT2_PREFIXES if decoder.positions == "learned" else PREFIXES,
        ignored=NOT_PARAMETERS,
        copies=_copies(decoder, otherwise, is_tied=is_tied),
        limits={"vocab": decoder.vocab_size},
        differences=families.differences(decoder, config, where=where),
        name=name,
    )


def _copies(decoder: DecoderConfig, otherwise: str, *, is_tied: bool) -> list[Copy]:
    """Returns the heads that repeat a tied embedding, or the other name of a head of its own."""
    if is_tied:
        return [Copy(head, "embedding", otherwise) for head in HEADS]
    return [] if decoder.tied else [Copy(HEADS[1], "unembedding", "remove one of the two")]
