"""GPT-2 (Radford et al. 2019)."""

from typing import Any

from core.checkpoints.tensor_map import Source
from core.errors import UserError
from models.decoder.config import DecoderConfig
from models.decoder.published.family import Config, Family, Sources, known_activation, published_activation


def _read(config: Config) -> dict[str, Any]:
    embed, heads = config["n_embd"], config["n_head"]
    if embed % heads:
        raise UserError(f"n_embd = {embed} is not a multiple of n_head = {heads}")
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["n_layer"],
        "embed_dim": embed,
        "mlp_dim": config["n_inner"] or 4 * embed,
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "norm": "layer",
        "norm_eps": config["layer_norm_epsilon"],
        "bias": "all",
        "gated": False,
        "activation": known_activation(config["activation_function"]),
        "positions": "learned",
        "max_positions": config["n_positions"],
        "tied": config["tie_word_embeddings"],
    }


def _write(model: DecoderConfig) -> dict[str, Any]:
    if model.first_feed_forward:
        raise UserError("Transformer.first_feed_forward: all layers of GPT-2 have the same parts")
    return {
        "n_layer": model.num_layers,
        "n_embd": model.embed_dim,
        "n_inner": model.mlp_dim,
        "n_head": model.num_heads,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": published_activation(model.activation),
        "tie_word_embeddings": model.tied,
    }


def _sources(model: DecoderConfig) -> Sources:
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


FAMILIES = {
    "gpt2": Family(
        title="GPT-2",
        differs="LayerNorm, learned positions, biases, no gate, tied",
        architecture="GPT2LMHeadModel",
        read=_read,
        write=_write,
        sources=_sources,
        keys={
            **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head"), ...),
            "n_inner": None,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        nullable={"n_inner"},
        others={"n_ctx"},
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        prefixes=("transformer.", ""),
    )
}
