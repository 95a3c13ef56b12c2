"""Reads and merges a published folder's settings for generation: special ids, and how tokens are drawn."""

from collections.abc import Sequence
from typing import Any

from core.checkpoints import published_files
from core.checkpoints.published_files import CONFIG, GENERATION_CONFIG
from core.files import paths

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of generation_config.json that may be in a config.json instead.
_KEYS = frozenset(
    (*IDS, "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "max_length", "max_new_tokens")
    + ("min_length", "min_new_tokens", "early_stopping", "max_time", "stop_strings", "do_sample", "num_beams")
    + ("num_beam_groups", "diversity_penalty", "penalty_alpha", "use_cache", "cache_implementation", "temperature")
    + ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty")
    + ("encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
    + ("bad_words_ids", "force_words_ids", "renormalize_logits", "remove_invalid_values", "suppress_tokens")
    + ("begin_suppress_tokens", "exponential_decay_length_penalty", "sequence_bias", "token_healing", "guidance_scale")
    + ("num_return_sequences", "prefill_chunk_size", "watermarking_config")
)


def exported(folder: paths.Path, *, bos_id: int, stop_ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a fine-tuned model's settings: ids for `config.json`, and `generation_config.json`.

    `folder` is the published folder that training started from; `stop_ids` are added to its eos ids.
    """
    config, generation = (_with_values(folder / name) for name in (CONFIG, GENERATION_CONFIG))
    if not generation:
        generation = {key: config[key] for key in sorted(_KEYS & config.keys())}
    ids = {"bos_token_id": bos_id} | {key: found[key] for found in (generation, config) for key in IDS if key in found}
    generation = {**ids, **generation}
    for found in (ids, generation):
        found["eos_token_id"] = _joined(found.get("eos_token_id", []), stop_ids)
    return ids, generation


def _with_values(file: paths.Path) -> dict[str, Any]:
    """Returns a file's entries that are not null, also those of its `text_config`; {} if there is no such file."""
    found = published_files.read_object(file) if file.exists() else {}
    text = found.get("text_config")  # in the config of a model that also reads images
    return {key: v for key, v in {**(text if isinstance(text, dict) else {}), **found}.items() if v is not None}


def _joined(eos: Any, stop_ids: Sequence[int]) -> int | list[int]:
    found = list(dict.fromkeys([*(eos if isinstance(eos, list) else [eos]), *stop_ids]))
    return found[0] if len(found) == 1 else found
