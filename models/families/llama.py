"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024), and families with the same configuration, such as SmolLM2."""

from models.decoder.published.family import (
    LLAMA,
    NULLABLE,
    ROPE,
    Family,
    llama_config,
    llama_sources,
    without_windows,
)

FAMILIES = {
    "llama": Family(
        title="Llama 2 and 3, SmolLM2",
        differs="",
        architecture="LlamaForCausalLM",
        read=without_windows,
        write=llama_config,
        sources=llama_sources,
        keys=LLAMA,
        nullable=NULLABLE,
        others=ROPE,
    )
}
