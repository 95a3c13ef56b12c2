"""Keys of `config.json` that set no field of the decoder: keys without effect, and keys with one supported value."""

import json
from collections.abc import Collection, Mapping
from typing import Any

# A comment before each group says what its keys are for; no key changes the logits of a model in evaluation.
_GROUPS = (
    # where the file comes from, and which classes load it
    "model_type architectures auto_map transformers_version torch_dtype dtype name_or_path _name_or_path _commit_hash"
    " _from_auto tokenizer_class processor_class transformers.js_config is_llama_config tokenizer_model_max_length"
    " model_max_length max_sequence_length seq_length",
    # how transformers computes and what it returns
    "use_cache cache_implementation attn_implementation _attn_implementation _attn_implementation_autoset"
    " _attn_implementation_internal _experts_implementation _experts_implementation_internal experts_implementation"
    " _flash_attn_2_enabled pretraining_tp chunk_size_feed_forward torchscript use_bfloat16 distributed_config"
    " output_attentions output_hidden_states return_dict use_return_dict output_router_logits output_past"
    " use_flash_attn",
    # initial values, dropout and losses of training, which this project sets in its own files
    "initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob"
    " attention_probs_dropout_prob router_aux_loss_coef gradient_checkpointing neftune_noise_alpha",
    # heads for classification and summaries, which a language model lacks
    "id2label label2id num_labels _num_labels problem_type classifier_dropout finetuning_task task_specific_params"
    " summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
    " summary_last_dropout n_special predict_special_tokens",
    # models with an encoder, or whose layers are called as those of a decoder
    "is_decoder tie_encoder_decoder",
    # special tokens: tokenizers and generation read them
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id"
    " forced_bos_token_id forced_eos_token_id",
    # sampling, which older files keep here
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty"
    " temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size"
    " encoder_no_repeat_ngram_size encoder_repetition_penalty bad_words_ids num_return_sequences output_scores"
    " return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens"
    " begin_suppress_tokens epsilon_cutoff eta_cutoff num_assistant_tokens num_assistant_tokens_schedule"
    " assistant_confidence_threshold target_lookbehind assistant_lookbehind sequence_bias forced_decoder_ids"
    " force_words_ids penalty_alpha renormalize_logits guidance_scale max_time stop_strings",
)
WITHOUT_EFFECT = frozenset(" ".join(_GROUPS).split())
_PREFIXES = ("unsloth_",)  # keys that one tool for fine-tuning writes about itself
ONLY: Mapping[str, Any] = {  # keys with their only supported value
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,  # this and the next are of Phi-4 mini
    "interpolate_factor": 1,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "scale_attn_weights": True,
    "add_cross_attention": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "router_jitter_noise": 0.0,
    "pruned_heads": {},
    "per_layer_config": {},
    "fusion_config": {},
    "quantization_config": None,
    "compression_config": None,
    "quantization": None,
    "transformers_weights": None,
}
_OF_WEIGHTS = ("quantization_config", "compression_config", "quantization")
_QUANTIZED = (
    ": the weights are quantized ({}), and only others are read; use the folder from which they were made, or "
    "write one with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(OTHER)"
)
_NOT_NULL = ("is_causal",)  # transformers takes null for false


def problems(config: Mapping[str, Any], read: Collection[str], quantized: Collection[str] = ()) -> list[str]:
    """Returns a line for each entry that is unknown, or has an unsupported value.

    `read` are keys that the family reads or ignores, and `quantized` quantization methods that it reads.
    """
    lines = []
    for key, value in config.items():
        if key in ONLY and key not in read:
            is_read = key == "quantization_config" and method(value) in quantized
            if value != ONLY[key] and (value is not None or key in _NOT_NULL) and not is_read:
                remedy = _QUANTIZED.format(method(value)) if key in _OF_WEIGHTS and value else ""
                lines.append(f"{key} = {value!r} is not supported (expected {ONLY[key]!r}){remedy}")
        elif key not in read and key not in WITHOUT_EFFECT and not _is_empty(value) and not key.startswith(_PREFIXES):
            lines.append(
                f"{key} = {_shortened(value)} is not known for this family: take the key out of the file if the model "
                "does not need it"
            )
    return lines


def method(value: Any) -> str:
    """Returns the name of the method in a `quantization_config`, or "an unnamed method"."""
    return str(value.get("quant_method") or "an unnamed method") if isinstance(value, Mapping) else "an unnamed method"


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
