"""`config.json` of published folders: what is read where keys are absent, and what is refused; exports of each."""

import dataclasses
import json
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from core import logical, parameters
from core.checkpoints import published
from core.errors import UserError
from models import pretrained
from models.decoder.config import DecoderConfig
from models.decoder.experts import experts_of
from models.decoder.layers import Mlp
from models.decoder.published import families, family_tensors

HERE = pathlib.Path(__file__).parents[2] / "fixtures" / "families"
DEFAULTS = json.loads((HERE / "defaults.json").read_text())  # from transformers, by `make.py`
FAMILIES = sorted(folder.name for folder in HERE.iterdir() if (folder / "config.json").exists())
QUICK = ("gemma3", "gpt2", "mixtral", "qwen2", "qwen3")  # test_families.py has quick tests of more
LLAMA = json.loads((HERE / "llama2" / "config.json").read_text())
GEMMA2 = json.loads((HERE / "gemma2" / "config.json").read_text())
QWEN3_MOE = json.loads((HERE / "qwen3_moe" / "config.json").read_text())
GEMMA3 = json.loads((HERE / "gemma3" / "config.json").read_text())


def refusal(config):
    with pytest.raises(UserError) as caught:
        families.fields(config, where="folder/config.json")
    return str(caught.value)


@pytest.mark.covers("C16")
@pytest.mark.parametrize("kind", DEFAULTS)
def test_absent_keys_have_the_values_of_transformers(kind):
    """transformers' own configuration of the same sizes, with every key written out, gives the same decoder."""
    sparse, whole = (DecoderConfig(**families.fields(DEFAULTS[kind][key])) for key in ("given", "whole"))
    if kind not in ("gpt2", "gemma3"):  # an absent limit is none: rotary embeddings have no limit of their own
        assert sparse.max_positions is None
        sparse = dataclasses.replace(sparse, max_positions=whole.max_positions)
    assert sparse.settings() == whole.settings()


def test_gemma_2_has_softcaps_if_its_configuration_omits_them():
    config = {key: value for key, value in GEMMA2.items() if "softcapping" not in key and "activation" not in key}
    found = families.fields(config)
    assert [part.softcap for part in found["mixer"]] == [50.0, 50.0]
    assert (found["logit_softcap"], found["activation"]) == (30.0, "gelu_tanh")
    found = families.fields({**config, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert [found["logit_softcap"], *(part.softcap for part in found["mixer"])] == [None] * 3


@pytest.mark.parametrize(
    ("step", "listed", "kinds"),
    [
        (1, [], ("experts",)),
        (1, None, ("experts",)),
        (2, [], ("mlp", "experts")),
        (3, [], ("mlp", "mlp", "experts")),
        (4, [], ("mlp", "mlp", "mlp", "experts", "mlp", "mlp")),  # 6 layers are no multiple of 4
        (1, [0], ("mlp", *["experts"] * 5)),
        (1, [1, 3, 5, 9], ("experts", "mlp")),
        (2, [3], ("mlp", "experts", "mlp", "mlp", "mlp", "experts")),
    ],
)
def test_layers_of_qwen_3_without_experts_become_a_group_and_are_exported(step, listed, kinds):
    """transformers gives layer l, from 0, experts if the step divides l + 1 and the list lacks l."""
    change = {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": listed}
    fields = families.fields({**QWEN3_MOE, **change})
    found = fields["feed_forward"]
    assert tuple(part.name for part in (found if isinstance(found, tuple) else (found,))) == kinds
    model = DecoderConfig(**fields)
    sparse = [layer for layer in range(6) if model.layer_kind(layer).feed_forward.name == "experts"]
    assert sparse == [layer for layer in range(6) if (layer + 1) % step == 0 and layer not in (listed or [])]
    assert families.family(model) == "qwen3_moe"
    routers = [source for path, source in family_tensors.sources(model).items() if path.endswith("/router")]
    layers = [source.tensor((i,)) for i in range(6 // model.group) for source in routers]
    assert layers == [f"layers.{layer}.mlp.gate.weight" for layer in sparse]


def test_both_widths_of_a_model_with_and_without_experts_are_compared():
    model = DecoderConfig(**families.fields({**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2}))
    for change in ({"mlp_dim": 48}, {"feed_forward": (Mlp(), dataclasses.replace(experts_of(model), mlp_dim=28))}):
        other = dataclasses.replace(model, **change)
        assert len(families.differences(other, families.config(model, "qwen3_moe"))) == 1, change


def test_missing_and_null_keys_are_named_together_with_the_file():
    config = {key: value for key, value in LLAMA.items() if key not in ("hidden_size", "num_hidden_layers")}
    said = refusal({**config, "rms_norm_eps": None, "vocab_size": "83", "tie_word_embeddings": 0})
    assert said.startswith("folder/config.json (model_type llama): ")
    assert "hidden_size is missing; num_hidden_layers is missing" in said
    assert "rms_norm_eps = null: expected a number above 0" in said
    assert 'vocab_size = "83": expected a whole number above 0' in said
    assert "tie_word_embeddings = 0: expected true or false" in said
    assert "text_config = None" in refusal({"model_type": "gemma3"})
    assert "head_dim = null" in refusal({**GEMMA2, "head_dim": None})
    assert families.fields({**LLAMA, "num_key_value_heads": None, "head_dim": None})["num_kv_heads"] == 4


def test_a_feature_of_the_language_model_inside_of_gemma_3_is_refused():
    nested = {**GEMMA3, "attention_bias": True, "use_bidirectional_attention": True}
    said = refusal({"model_type": "gemma3", "text_config": nested, "quantization_config": {"bits": 4}})
    assert "quantization_config = {'bits': 4} is not supported" in said
    assert "attention_bias = True is not supported (expected False)" in said
    assert "use_bidirectional_attention = True" in said
    plain, untied = (
        families.fields({"model_type": "gemma3", "text_config": GEMMA3, **other})
        for other in ({}, {"tie_word_embeddings": False})
    )
    assert plain == families.fields(GEMMA3)
    assert untied == {**plain, "tied": False}


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' has factor = null"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (GEMMA2, {"layer_types": ["full_attention", "chunked_attention"] * 2}, "has chunked_attention"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: expected a whole number above 0"),
        (QWEN3_MOE, {"mlp_only_layers": ["0"]}, 'mlp_only_layers = ["0"]: expected a list of numbers of layers'),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2]}, "leave none of 3 layers with experts"),
        (GEMMA2, {"layer_types": ["full_attention"]}, "layer_types has 1 entries, and num_hidden_layers = 4"),
        (
            {**LLAMA, "model_type": "qwen3"},
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types has sliding_attention",
        ),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "expected no scaling",
        ),
    ],
)
def test_unsupported_features_are_refused(config, change, says):
    assert says in refusal({**config, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"quantization_config": {"quant_method": name}}, f"quantized ({name})") for name in ("gptq", "awq", "fp8")),
        ({"quantization_config": {"bits": 4}}, ".dequantize().save_pretrained(OTHER)"),
        ({"model_type": "other", "auto_map": {"AutoConfig": "other.Config"}}, "(auto_map), which are never run"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "text_config is a llama, which can be read"),
        ({"new_key_of_a_newer_release": 3}, "new_key_of_a_newer_release = 3 is not known for this family"),
    ],
)
def test_folders_of_other_kinds_are_errors_that_say_what_to_do(change, says):
    assert says in refusal({**LLAMA, **change})


def test_rotary_settings_are_found_where_each_version_writes_them():
    def theta(**change):
        found = families.fields({**{k: v for k, v in LLAMA.items() if k != "rope_theta"}, **change})
        return found["rope_theta"], found["rope_scaling"] and found["rope_scaling"].factor

    assert theta() == (10000.0, None)
    assert theta(rope_parameters=None, rope_theta=5e5) == (5e5, None)
    assert theta(rope_parameters={"rope_type": "default"}, rope_theta=5e5) == (5e5, None)
    assert theta(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}) == (1e6, 2.0)
    assert theta(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=1e6) == (1e6, 4.0)


def test_a_decoder_that_differs_from_the_folder_is_refused_with_both_values():
    model = pretrained.model(str(HERE / "llama2"), rope_theta=5e5, norm_eps=1e-6, remat="full")
    source = model.published(str(HERE / "llama2"))
    where = HERE / "llama2" / "config.json"
    assert source.notes == (
        f"norm_eps = 1e-05 in {where}, 1e-06 in the model",
        f"rope_theta = 10000.0 in {where}, 500000.0 in the model",
    )
    assert pretrained.model(str(HERE / "gemma3")).published(str(HERE / "gemma3")).notes == ()


def read(folder):
    """The decoder of a family with its parameters, from a folder."""
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=8)
    batch = {key: np.zeros((1, 4), np.int32) for key in ("inputs", "targets", "segment_ids", "positions")}
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), {**batch, "weights": np.zeros((1, 4), "f4")})
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    return model, model.published(str(folder)).load(abstract, specs), specs


def export(name, folder):
    """Writes the tiny model of a family as `launch/run export` does."""
    model, params, specs = read(HERE / name)
    by_path = {parameters.path_name(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(params)}
    sources, limits = family_tensors.named_sources(model), {"vocab": model.vocab_size}

    def of_layer(path, layer):
        return by_path[path] if layer is None else by_path[path][layer]

    folder.mkdir()
    published.write(
        folder, published.tensors_of(of_layer, params, specs, sources, limits=limits, dtype=np.dtype(np.float32))
    )
    (folder / "config.json").write_text(json.dumps(families.config(model, families.family(model))))
    return model, params


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3", {"hidden_size": float("inf")}, "hidden_size = Infinity: expected a whole number above 0"),
        ("llama3", {"hidden_size": 24.0}, "hidden_size = 24.0: expected a whole number above 0"),
        ("gemma2", {"query_pre_attn_scalar": float("nan")}, "query_pre_attn_scalar = NaN: expected a number above 0"),
        ("llama3", {"rope_parameters": [1]}, r"rope_parameters = \[1\]: expected an object or null"),
        ("gemma3", {"rope_parameters": {"full_attention": 1}}, "full_attention = 1: expected an object or null"),
        ("llama3", {"rope_scaling": "yarn"}, 'rope_scaling = "yarn": expected an object or null'),
        ("llama3", {"rope_scaling": {"rope_type": []}}, r"rope scaling \[\] is not known"),
        ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor = -2: expected a number above 0"),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor = 4 and high_freq_factor = 4: expected the first to be less",
        ),
        ("llama2", {"rope_parameters": {"rope_theta": "a"}}, 'rope_theta = "a": expected a number above 0'),
        ("qwen2", {"layer_types": 1}, "layer_types = 1: expected a list of full_attention or sliding_attention"),
        ("gemma3", {"layer_types": [1]}, r"layer_types = \[1\]: expected a list of"),
        ("llama3", {"model_type": []}, r"model_type = \[\] is not known"),
    ],
)
def test_malformed_values_are_refused_with_file_and_key(name, changes, message, tmp_path):
    config = json.loads((HERE / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=f"{tmp_path}/config.json.*{message}"):
        pretrained.model(str(tmp_path))


@pytest.mark.covers("C17")
@pytest.mark.parametrize("name", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in FAMILIES])
def test_an_export_is_read_again_bit_for_bit(name, tmp_path):
    model, params = export(name, tmp_path / name)
    again, same, _ = read(tmp_path / name)
    assert again.settings() == model.settings()
    jax.tree.map(np.testing.assert_array_equal, same, params)
    original, exported = (load_file(folder / "model.safetensors") for folder in (HERE / name, tmp_path / name))
    if families.family(model) != json.loads((HERE / name / "config.json").read_text())["model_type"]:
        return  # of several families that can express it, an export has the one with the fewest keys
    assert original.keys() == exported.keys()
    assert all(np.array_equal(original[key], exported[key]) for key in original)


if PYTHON := os.environ.get("TRANSFORMERS_PYTHON"):  # of an environment with torch and transformers: see `make.py`

    @pytest.mark.slow  # transformers loads a model of each family
    @pytest.mark.covers("C17")
    def test_transformers_loads_an_export_and_gives_equal_logits(tmp_path):
        ids = np.load(HERE / "llama2" / "reference.npz")["input_ids"]
        np.save(tmp_path / "ids.npy", ids)
        models = {name: export(name, tmp_path / name) for name in FAMILIES}
        folders = [str(tmp_path / name) for name in FAMILIES]
        subprocess.run([PYTHON, HERE / "logits.py", tmp_path / "ids.npy", *folders], check=True)
        batch = {"inputs": ids, "targets": ids, "segment_ids": np.ones_like(ids), "weights": np.ones(ids.shape, "f4")}
        batch["positions"] = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        for name, (model, params) in models.items():
            ours = np.asarray(jax.jit(model.logits)(params, batch), np.float64)
            theirs, exact = (np.load(tmp_path / name / file) for file in ("logits.npy", "logits64.npy"))
            largest = np.abs(exact).max()
            error, their_error = np.abs(ours - exact).max() / largest, np.abs(theirs - exact).max() / largest
            print(f"{name}: {error:.1e} of the largest logit; transformers in float32 {their_error:.1e}")
            assert error < max(5e-6, 2 * their_error)  # a delta rule amplifies rounding in both
