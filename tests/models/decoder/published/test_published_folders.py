"""Published folders: every key is read as transformers reads it, known to be without effect, or an error.

Every tensor is read, listed, or an error.

`fixtures/configurations/make.py` computed the logits of transformers for every case.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from core import logical, parameters
from core.checkpoints import published, warm_start
from core.errors import UserError
from models import pretrained
from models.decoder.config import DecoderConfig
from models.decoder.layers import Attention
from models.decoder.published import families, family_tensors, published_keys

HERE = pathlib.Path(__file__).parents[2] / "fixtures" / "configurations"
RECORD = json.loads((HERE / "record.json").read_text())
AS_BASE = set(RECORD["as_base"])  # cases whose logits, in transformers, are those of the family's base


def _module():
    spec = importlib.util.spec_from_file_location("configuration_cases", HERE / "cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = _module()
CASES = cases.cases()
KNOWN = families.known()
LLAMA, GEMMA2, GEMMA3 = (cases.BASES[family] for family in ("llama", "gemma2", "gemma3_text"))


def batch():
    ids = np.array([cases.IDS], np.int32)
    every = {"inputs": ids, "targets": ids, "segment_ids": np.ones_like(ids), "weights": np.ones(ids.shape, "f4")}
    return {**every, "positions": np.arange(ids.shape[1], dtype=np.int32)[None]}


@functools.lru_cache(maxsize=2)
def traced(model):
    """The shapes and specs of its parameters: of one case, to write its folder and to read it, also untied."""
    return logical.abstract_init(model.init, jax.random.key(0), batch())


def expected(config, model, shapes, specs):
    """Yields the names of the tensors that we expect in a folder, with zeros of their shapes."""
    special = dict.fromkeys(("gemma3", "gemma4", "gemma4_unified"), "model.language_model.") | {"gpt2": "transformer."}
    prefix = special.get(config["model_type"], "model.")
    by_path = {parameters.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    yield from published.tensors_of(
        lambda path, layer: np.zeros(by_path[path].shape[layer is not None :]),
        shapes,
        specs,
        {path: source.prefixed(prefix) for path, source in family_tensors.sources(model, config["model_type"]).items()},
        limits={"vocab": model.vocab_size},
        dtype=np.float32,
    )


def written(config, folder, beginnings=(), **others):
    """Writes the folder of a configuration, whose tensors have the names and shapes that we expect.

    Random numbers follow from the usual names and shapes, so others than those of transformers give other logits.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=1)
    shapes, specs = traced(model)
    tensors = {name: cases.tensor(name, zeros.shape) for name, zeros in expected(config, model, shapes, specs)}
    save_file({**cases.renamed(tensors, dict(beginnings)), **others}, folder / "model.safetensors")
    return folder


def load(folder, **changes):
    """The decoder of a folder and its parameters, after the checks of a start."""
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=1, **changes)
    shapes, specs = traced(model)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    source = model.published(str(folder))
    warm_start.require_fit(source, shapes, specs, ("*",))
    return model, source.load(abstract, specs)


def logits(config, folder):
    model, params = load(written(config, folder))
    with jax.disable_jit():
        return np.asarray(model.logits(params, batch()), np.float64)[0]


def text_of(change):
    return change.get("text_config", change)


def is_named(name, change):
    """Returns whether published folders are known to have this change."""
    family, change = name.split("/")[0], text_of(change)
    if family == "llama":
        return cases.LENGTHENED in change or set(change) == {"rope_scaling", "rope_parameters"} or "beta" in str(change)
    kinds = change.get("layer_types", ())
    mixed = "rope_parameters" in change and len(str(change)) > 150
    return (
        name in ("gemma4/base", "gemma4_unified/base")  # their keys are inside text_config
        or (family == "mistral" and kinds == [cases.SLIDING, cases.FULL])
        or (family == "gemma2" and kinds == [cases.FULL] * 4)
        or (family == "gemma3_text" and (change.get("sliding_window_pattern") == 1 or mixed))
    )


EFFECTIVE = {name: change for name, (change, _) in CASES.items() if name not in AS_BASE}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (not is_named(n, change))) for n, change in EFFECTIVE.items()]
)
def test_a_changed_key_changes_our_logits_as_it_changes_those_of_transformers(name, tmp_path):
    wanted = np.load(HERE / "logits.npz")
    want, base = wanted[name], wanted[f"{name.split('/')[0]}/base"]
    # Norms of Gemma in float32 have the largest errors: 1.0e-5 of the largest logit, and 2.2e-5 (gemma4_text/19) with
    # the less optimized machine code of tests/run.sh. Errors of other families are below 5e-6.
    tolerated = 2.5e-5 * np.abs(want).max()
    # The smallest changes are between forms of GELU.
    assert name.endswith("base") or want.shape != base.shape or np.abs(want - base).max() > 3 * tolerated
    ours = logits(CASES[name][1], tmp_path)[cases.SHOWN]
    assert np.abs(ours - want).max() < tolerated


@pytest.mark.parametrize("name", sorted(AS_BASE))
def test_a_key_that_transformers_does_not_read_changes_no_setting(name):
    ours, base = (DecoderConfig(**families.fields(CASES[case][1])) for case in (name, f"{name.split('/')[0]}/base"))
    assert dataclasses.replace(ours, max_positions=base.max_positions).settings() == base.settings()


# Keys of transformers' classes that its logits cannot show, with the reason.
JUSTIFIED = {
    "dtype": "torch_dtype is its older name, which is among the cases",
    "output_attentions": "what is returned besides logits",
    "problem_type": "of heads for classification",
    "return_dict": "the form of what is returned",
    "use_cache": "how generation computes",
    "is_encoder_decoder": "an error",
    "enable_moe_block": "an error unless it is false",
    "num_local_experts": "an error unless it is 0; of other families among the cases",
    "summary_activation": "of heads for classification",
    "summary_proj_to_labels": "of heads for classification",
    "summary_use_proj": "of heads for classification",
    "pad_token_id": "the row of a padding token is read as stored",
    "max_position_embeddings": "rotary embeddings have no limit; that of a scaling's length is among the cases",
}
# Keys of published files that transformers 5 has in no class, and whether they are accepted with these values.
PUBLISHED = {
    "_name_or_path": ("some/model", True),
    "transformers.js_config": ({"dtype": "q4"}, True),
    "is_llama_config": (True, True),
    "rope_interleaved": (True, False),
    "use_mrope": (True, False),
    "quantization": ({"bits": 4}, False),
    "auto_map": ({"AutoConfig": "other.Config"}, True),
    "unsloth_version": ("2025.1", True),
    "another_key": (1, False),
    "an_empty_key": (None, True),
}


@pytest.mark.parametrize("family", cases.BASES)
def test_every_key_of_a_class_of_transformers_is_read_or_known(family):
    of_family = {name: text_of(change) for name, (change, _) in CASES.items() if name.startswith(f"{family}/")}
    shown = {key for change in of_family.values() for key in change}
    whole = set(RECORD["keys"][family]) | (set(RECORD["keys"]["gemma3_text"]) if family == "gemma3" else set())
    around = {"text_config", *KNOWN[family].around}
    assert whole - shown - set(published_keys.ONLY) - set(JUSTIFIED) - around == set()


NOT_READ = [(f, key) for f, key in itertools.product(cases.BASES, published_keys.ONLY) if key not in KNOWN[f].keys]


@pytest.mark.parametrize(("family", "key"), NOT_READ)
def test_another_value_than_the_supported_one_is_an_error_with_key_and_value(family, key):
    only = published_keys.ONLY[key]
    other = {"is_causal": None}.get(key, not only if isinstance(only, bool) else {"bits": 4} if not only else 0.5)
    for value in (other, False) if key == "is_causal" else (other,):
        said = refusal(cases.changed(cases.BASES[family], {key: value}))
        assert f"{key} = {value!r} is not supported (expected {only!r})" in said
    families.fields(cases.changed(cases.BASES[family], {key: only}))


# Keys of published files that say nothing about logits, by their family.
FOUND = {
    "gpt2": {"n_ctx": 30, "n_special": 0, "predict_special_tokens": True, "_num_labels": 1, "output_past": True},
    "llama": {"max_sequence_length": 2048, "pretraining_tp": 1, "rope_interleaved": False, "mlp_only_layers": []},
    "mistral": {"_flash_attn_2_enabled": True, "_attn_implementation_autoset": True},
    "qwen2": {"use_mrope": False, "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False},
    "gemma2": {"cache_implementation": "hybrid", "sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {"eos_token_id": [1, 106], "initializer_range": 0.02, "boi_token_id": 14},
}


@pytest.mark.parametrize("family", FOUND)
def test_published_files_are_read_in_spite_of_keys_without_effect(family):
    base = cases.BASES[family]
    assert families.fields({**base, **FOUND[family]}) == families.fields(base)


@pytest.mark.parametrize("key", PUBLISHED)
def test_keys_of_published_files_are_known_or_named(key):
    value, is_accepted = PUBLISHED[key]
    for config in (cases.changed(LLAMA, {key: value}), cases.changed(cases.BASES["gemma3"], {key: value})):
        if is_accepted:
            families.fields(config)
        else:
            assert f"{key} = " in refusal(config)


def refusal(config):
    with pytest.raises(UserError) as caught:
        families.fields(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        ("qwen2", {"layer_types": ["full_attention", "other"]}, "layer_types has other; expected"),
        ("llama", {"layer_types": [cases.FULL, cases.SLIDING]}, "layer_types has sliding_attention"),
        ("llama", {"sliding_window": 4}, "sliding_window = 4 is not known for this family"),
        ("mistral", {"layer_types": [cases.SLIDING] * 2, "sliding_window": None}, "sliding_window = null"),
        ("gemma2", {"sliding_window": None}, "sliding_window = null, but there are layers of the type sliding"),
        ("llama", {"rope_parameters": {cases.FULL: cases.ROPE}}, "full_attention = {"),
        ("llama", {"rope_scaling": {**cases.LINEAR, "other": 2}}, "other = 2, which is not known"),
        (
            "gemma3_text",
            {"rope_parameters": cases.ROPE},
            'rope_parameters has rope_theta = 30.0, rope_type = "default"',
        ),
        (
            "gemma3_text",
            {"rope_parameters": {cases.FULL: {**cases.YARN, "truncate": False}}},
            "truncate = false is not supported",
        ),
        ("gemma3_text", {"rope_parameters": {cases.SLIDING: cases.LINEAR}}, "rope_parameters.sliding_attention = {"),
        ("gemma3", {"text_config": {"model_type": "gemma2"}}, "text_config has model_type = 'gemma2'"),
        ("gemma3", {"is_causal": False}, "is_causal = False is not supported"),
        ("gemma3", {"text_config": {"another": 1}}, "another = 1 is not known"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads = 2 is not a multiple of num_key_value_heads = 3"),
        ("qwen2", {"num_attention_heads": 3}, "num_attention_heads = 3"),
        ("llama", {"head_dim": 7}, "head_dim = 7: rotary embeddings need an even size"),
        ("gpt2", {"n_head": 3}, "n_embd = 16 is not a multiple of n_head = 3"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4: rotates 3 of 8 dimensions of a head"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: expected a number above 0, at most 1"),
        ("qwen3_next", {"partial_rotary_factor": 0.4}, "rotates 3 of 8 dimensions of a head"),
        ("qwen3_next", {"layer_types": [cases.SLIDING] * 2}, "layer_types has sliding_attention; expected linear_"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads = 3: expected a multiple of linear_num_k",
        ),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob = false is not known for this family"),
        ("phi3", {"rope_scaling": cases.LINEAR}, "rope scaling 'linear' is not known for this family"),
        (
            "phi3",
            {"rope_scaling": {**cases.LONGROPE, "long_factor": [1.0]}},
            "long_factor has 1 numbers; expected 3, half of the rotated dimensions",
        ),
        ("phi3", {"rope_scaling": {"rope_type": "longrope"}}, "has short_factor = null: expected numbers"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, and num_hidden_layers = 3"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers = [1, 2, 0]: expected a list of 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0: expected a number above 0"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention"]},
            "layer_types has 'mamba' in 1 of 2 layers, which",
        ),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 2}, "in 2 of 2 layers, which is Mamba-2; only"),
        ("granitemoehybrid", {"layer_types": ["attention", "other"]}, "layer_types has other; expected attention or"),
        ("granitemoehybrid", {"layer_types": cases.ABSENT}, "layer_types is missing, so all layers have Mamba-2; only"),
        ("granitemoehybrid", {"num_local_experts": 62}, "num_local_experts = 62: expected 0 (an absent key means 8)"),
        ("granitemoehybrid", {"num_local_experts": cases.ABSENT}, "num_local_experts = 8: expected 0 (an absent key"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            'position_embedding_type = "alibi": expected "rope"',
        ),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, 'normalization_function = "layernorm": expected'),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": cases.ABSENT},
            "vocab_size_per_layer_input = 262144 (an absent key means 262144): expected vocab_size = 17",
        ),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 16},
            "vocab_size_per_layer_input = 16 (an absent key means 262144): expected vocab_size = 17",
        ),
        ("gemma4_text", {"hidden_size_per_layer_input": -1}, "= -1: expected a whole number of at least 0"),
        ("gemma4_text", {"num_kv_shared_layers": True}, "num_kv_shared_layers = true: expected a whole number of at"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3: of 4 layers, expected so many that"),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "types of layer_types, full_attention and sliding_attention"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 2, "enable_moe_block": True},
            "num_kv_shared_layers = 2 and enable_moe_block = true are not supported together",
        ),
        ("gemma4_text", {"use_double_wide_mlp": 2}, "use_double_wide_mlp = 2: expected true or false"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block = true, but num_experts is null or missing"),
        (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 4, "moe_intermediate_size": 6},
            "top_k_experts = 4: expected at most num_experts = 3",
        ),
        (
            "gemma4_text",
            {"use_bidirectional_attention": "all"},
            'use_bidirectional_attention = "all": expected "vision"',
        ),
        (
            "gemma4_text",
            {"global_head_dim": 7},
            "have 1 key/value heads of 7 (num_global_key_value_heads, global_head_",
        ),
        (
            "gemma4_text",
            {"num_global_key_value_heads": 3},
            "expected a divisor of num_attention_heads = 4, and an even",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"head_dim": 12}}},
            "expected the same for all layers with full_atte",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"0": {"head_dim": 12}}},
            "(1, 3, counted from 0), and nothing for others",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"skip": ["mlp"]}}},
            "expected numbers of layers, each with head_dim",
        ),
        (
            "gemma4_text",
            {"per_layer_config": [1]},
            "per_layer_config = [1]: expected numbers of layers, each with head",
        ),
        ("gemma4_text", {"rope_parameters": [1]}, "rope_parameters = [1]: expected an object or null"),
        ("gemma4_text", {"rope_parameters": {cases.FULL: cases.ROPE}}, "rope_theta = null: expected a number above 0"),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    cases.FULL: {**cases.PROPORTIONAL, "partial_rotary_factor": 1.5},
                    "sliding_attention": cases.ROPE,
                }
            },
            "rope scaling 'proportional' has partial_rotary_factor = 1.5: expected at most 1",
        ),
        ("gemma4_text", {"rope_theta": 1e4}, "rope_theta = 10000.0 is not known for this family"),
        ("gemma4_unified_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8: expected 0"),
        ("gemma4_unified_text", {"enable_moe_block": True}, "enable_moe_block = true: expected false; experts, which"),
        ("gemma4", {"text_config": {"enable_moe_block": True}}, "enable_moe_block = true, but num_experts is null"),
        ("granitemoehybrid", {"head_dim": 7}, "head_dim = 7: rotary embeddings need an even size"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads = 1: expected num_attention_heads = 2"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3: rotary embeddings need an even size"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim = 8: expected qk_rope_head_dim = 4"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3, topk_group = 2: expected groups of at least 2"),
        ("deepseek_v3", {"n_group": 8}, "n_group = 8, topk_group = 2: expected groups of at least 2"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group with num_experts_per_tok = 3 experts or more"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = \"softmax\": expected 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = \"greedy\": expected 'noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: expected 1"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1: expected a whole number of at"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts = -1: expected a whole number of at least 0"),
        ("deepseek_v3", {"num_nextn_predict_layers": "1"}, 'num_nextn_predict_layers = "1": expected a whole number'),
        ("deepseek_v3", {"num_mtp_layers": -1}, "num_nextn_predict_layers = -1: expected a whole number of at least 0"),
        (
            "deepseek_v3",
            {"rope_scaling": {**cases.LONGROPE, "mscale_all_dim": 1.0}},
            "mscale_all_dim of rope scaling 'longrope' is not supported",
        ),
        ("olmo3", {"layer_types": [cases.FULL]}, "layer_types has 1 entries, and num_hidden_layers = 4"),
    ],
)
def test_errors_name_the_keys_of_the_file(base, change, says):
    said = refusal(cases.changed(cases.BASES[base], change))
    assert says in said
    assert "Transformer." not in said


def test_kimi_k2_is_exported_as_a_deepseek():
    base = cases.changed(cases.BASES["deepseek_v3"], cases.KIMI_K2)
    model = DecoderConfig(**families.fields({**base, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "a.Other"}}))
    assert model == DecoderConfig(**families.fields(base))
    assert (model.feed_forward.num_groups, model.num_first_layers, model.rope_scaling.beta_fast) == (1, 1, 1.0)
    assert families.family(model) == "deepseek_v3"
    exported = families.config(model, "deepseek_v3")
    assert exported["num_nextn_predict_layers"] == 0
    assert DecoderConfig(**families.fields(exported)).settings() == model.settings()


@pytest.mark.slow
def test_kimi_k2_has_the_logits_of_transformers_and_its_export_too(tmp_path):
    (name,) = (name for name, (change, _) in CASES.items() if change is cases.KIMI_K2)
    want = np.load(HERE / "logits.npz")[name]
    model, params = load(written({**CASES[name][1], "model_type": "kimi_k2"}, tmp_path / "read"))
    _, specs = logical.abstract_init(model.init, jax.random.key(0), batch())
    by_path = {parameters.path_name(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(params)}
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps(families.config(model, families.family(model))))
    tensors = published.tensors_of(
        lambda path, layer: by_path[path] if layer is None else by_path[path][layer],
        params,
        specs,
        family_tensors.named_sources(model),
        limits={"vocab": model.vocab_size},
        dtype=np.dtype(np.float32),
    )
    published.write(exported, tensors)
    again, same = load(exported)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    for one, weights in ((model, params), (again, same)):
        with jax.disable_jit():
            ours = np.asarray(one.logits(weights, batch()), np.float64)[0][cases.SHOWN]
        assert np.abs(ours - want).max() < 2e-5 * np.abs(want).max()


def test_a_deepseek_without_shared_experts_is_exported_as_it_was_read():
    model = DecoderConfig(**families.fields(cases.changed(cases.BASES["deepseek_v3"], {"n_shared_experts": 0})))
    assert model.feed_forward.shared_mlp_dim is None
    assert not [path for path in family_tensors.sources(model) if "/shared_" in path]
    exported = families.config(model, families.family(model))
    assert exported["n_shared_experts"] == 0
    assert DecoderConfig(**families.fields(exported)).settings() == model.settings()


@pytest.mark.slow
def test_the_empty_matrices_of_no_shared_experts_hold_no_parameter(tmp_path):
    """transformers writes them."""
    wide = np.zeros((0, 16), np.float32)
    matrices = {"gate_proj": wide, "up_proj": wide, "down_proj": wide.T}
    empty = {f"model.layers.1.mlp.shared_experts.{name}.weight": matrix for name, matrix in matrices.items()}
    load(written(cases.changed(cases.BASES["deepseek_v3"], {"n_shared_experts": 0}), tmp_path, **empty))


def test_models_without_windows_are_exported_as_they_were_read():
    for base, change in ((GEMMA2, {"layer_types": [cases.FULL] * 4}), (GEMMA3, {"sliding_window_pattern": 1})):
        model = DecoderConfig(**families.fields(cases.changed(base, change)))
        assert isinstance(model.mixer, Attention)
        assert model.mixer.window is None
        written = families.config(model, families.family(model))
        assert written["sliding_window"] > 0  # transformers makes a mask of it in any case
        assert DecoderConfig(**families.fields(written)).settings() == model.settings()


def test_a_mistral_with_two_kinds_of_layers_is_exported_as_it_was_read():
    model = DecoderConfig(
        **families.fields(
            cases.changed(cases.BASES["mistral"], {"layer_types": ["sliding_attention", "full_attention"]})
        )
    )
    written = families.config(model, families.family(model))
    assert (written["model_type"], written["layer_types"]) == ("mistral", ["sliding_attention", "full_attention"])
    assert "layer_types" not in families.config(DecoderConfig(**families.fields(cases.BASES["mistral"])), "mistral")


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_tensors_have_other_names_where_transformers_reads_them(layout, tmp_path):
    assert layout in RECORD["layouts"]
    family, change, beginnings = cases.LAYOUTS[layout]
    config = cases.changed(cases.BASES[family], change)
    usual, other = (load(written(config, tmp_path / name, how))[1] for name, how in (("a", ()), ("b", beginnings)))
    jax.tree.map(np.testing.assert_array_equal, usual, other)


HEADED = [("llama", cases.TIED, "model.embed_tokens.weight"), ("gemma2", {}, "model.embed_tokens.weight")]
HEADED += [("gpt2", {}, "transformer.wte.weight")]


@pytest.mark.parametrize(("family", "change", "embedding"), HEADED)
def test_a_head_beside_a_tied_embedding_is_its_copy_or_an_error(family, change, embedding, tmp_path):
    config = cases.changed(cases.BASES[family], change)
    head = cases.tensor(embedding, (17, 16))
    load(written(config, tmp_path, **{"lm_head.weight": head}))
    for row in (3, 16):  # the last one is compared when all rows are read
        other = head.copy()
        other[row, 5] += 1e-3
        folder = written(config, tmp_path, **{"lm_head.weight": other})
        with pytest.raises(UserError, match=f"lm_head.weight is not a copy of {embedding}.*tie_word_embeddings = true"):
            load(folder)
        _, params = load(folder, tied=False)
        np.testing.assert_array_equal(params["~"]["unembedding"].T, other)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_named_at_the_load(wrong, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = cases.tensor(name, (10, 16))
    tensor[7, 2:5] = wrong
    folder = written(LLAMA, tmp_path, **{name: tensor})
    with pytest.raises(UserError, match=rf"model.safetensors: {name} has 3 numbers that are not finite \({wrong}\)"):
        load(folder)


def test_what_is_not_read_is_listed(tmp_path):
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, "f4") for layer in range(2)}
    folder = written(LLAMA, tmp_path, **buffers)
    save_file({"a": np.ones(2, "f4")}, folder / "consolidated.safetensors")
    assert pretrained.model(str(folder), vocab_multiple=1).published(str(folder)).notes == (
        "not read: 2 tensors *.rotary_emb.inv_freq, such as model.layers.0.self_attn.rotary_emb.inv_freq",
        "not read: consolidated.safetensors",
    )


def test_vision_and_heads_for_later_tokens_of_qwen_are_listed(tmp_path):
    """As published: the language model inside, with the other parts beside it."""
    others = dict.fromkeys(("mtp.fc.weight", "mtp.norm.weight", "model.visual.merger.norm.weight"), np.ones(4, "f4"))
    for kind in ("qwen3_5", "qwen3_5_moe"):
        folder = written(cases.BASES[kind], tmp_path / kind, {"model.": "model.language_model."}, **others)
        model, _ = load(folder)
        assert model.published(str(folder)).notes == (
            "not read: 1 tensor *visual.*, such as model.visual.merger.norm.weight",
            "not read: 2 tensors mtp.*, such as mtp.fc.weight",
        )


def test_layers_for_later_tokens_of_deepseek_are_as_many_as_the_configuration_says(tmp_path):
    base = cases.BASES["deepseek_v3"]
    later = [f"model.layers.{layer}.eh_proj.weight" for layer in (2, 3)]  # after two layers
    folder = written(base, tmp_path, **dict.fromkeys(later, np.ones(4, "f4")))
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=1)
    wanted = traced(model)
    for change, count in (
        ({}, 1),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 2}, 2),
        ({"num_nextn_predict_layers": 2, "num_mtp_layers": 0}, 0),
        ({"num_mtp_layers": 2}, 2),
    ):
        (folder / "config.json").write_text(json.dumps({**base, **change}))
        source = model.published(str(folder))
        assert [note.rpartition(" ")[2] for note in source.notes] == later[:count], change
        assert source.problems(*wanted) == [f"left over: {name} [4]" for name in later[count:]], change


def test_keys_that_layers_inside_text_config_share_are_not_read(tmp_path):
    base = cases.BASES["gemma4_unified"]
    config = {**base, "text_config": {**base["text_config"], "num_kv_shared_layers": 2}}
    layers = base["text_config"]["num_hidden_layers"]
    left = [f"model.language_model.layers.{layer}.self_attn.k_proj.weight" for layer in (layers - 2, layers - 1)]
    folder = written(config, tmp_path, **dict.fromkeys(left, np.ones(4, "f4")))
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=1)
    source = model.published(str(folder))
    assert [note.rpartition(" ")[2] for note in source.notes] == left
    assert source.problems(*traced(model)) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_a_model_is_an_error(name, tmp_path):
    folder = written(LLAMA, tmp_path)
    (folder / name).write_bytes(b"{}")
    with pytest.raises(UserError, match=f"{folder} has {name}: an adapter beside a model"):
        load(folder)


def test_a_tensor_that_the_index_leaves_out_is_left_over(tmp_path):
    folder = written(LLAMA, tmp_path, extra=np.ones(3, "f4"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_file(folder / "model-00001-of-00001.safetensors").keys() - {"extra"}
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"left over: extra \[3\]"):
        load(folder)
