"""Tiny models of every published family against transformers, which `fixtures/families/make.py` ran."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, parameters
from core.checkpoints import published
from core.errors import UserError
from models import lora, pretrained
from models.decoder import presets, rotary, transformer
from models.decoder.experts import Experts
from models.decoder.layers import Attention, Mlp
from models.decoder.published import families, family_tensors
from models.derivatives import ClampedGate
from models.mixers.gated_delta import GatedDelta
from models.mixers.latent_attention import LatentAttention

HERE = pathlib.Path(__file__).parents[2] / "fixtures" / "families"
FAMILIES = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir())
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
# Latent attention after which experts follow dense layers; learned positions, a plain MLP and biases; caps of logits
# and two kinds of layers; inputs of layers, shared keys and norms of heads; layers without positions; joined matrices;
# a delta rule. The logits of gpt_oss are in the quick test of packed documents, its gradients in test_experts.py.
QUICK = ("deepseek_v3", "gpt2", "gemma2", "gemma4_e4b", "granite4_nope", "phi3", "qwen3_5")


def batch_of(ids):
    """A batch that predicts every next token of `ids` [B, T]; the last position is not supervised."""
    ids = jnp.asarray(ids, jnp.int32)
    weights = jnp.ones(ids.shape, jnp.float32).at[:, -1].set(0)
    return {
        "inputs": ids,
        "targets": jnp.roll(ids, -1, axis=1),
        "weights": weights,
        "segment_ids": jnp.ones(ids.shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
    }


@functools.cache
def loaded(name):
    """The model, its parameters, their axes and the reference of a family."""
    model = pretrained.model(str(HERE / name), dtype="float32", vocab_multiple=8)
    reference = np.load(HERE / name / "reference.npz")
    shapes, axes = logical.abstract_init(model.init, jax.random.key(0), batch_of(reference["input_ids"]))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    return model, model.published(str(HERE / name)).load(abstract, axes), axes, reference


@functools.cache
def logits_of(name):
    return jax.jit(loaded(name)[0].logits)


def relative_error(ours, want):
    largest = np.max(np.abs(want)) or 1.0  # an expert that no token chose has no gradient
    return float(np.max(np.abs(np.asarray(ours, np.float64) - want)) / largest)


@pytest.mark.covers("N01", "N02", "N03", "C16")
@pytest.mark.parametrize("name", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in FAMILIES])
def test_logits_loss_and_every_gradient_equal_those_of_transformers(name):
    model, params, axes, reference = loaded(name)
    batch = batch_of(reference["input_ids"])

    def mean_loss(params):
        _, out = model.loss(params, (), None, batch)
        return out.loss_sum / out.weight_sum

    logits = logits_of(name)(params, batch)
    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    # transformers in float32 differs from its own float64 by up to 2.5e-6 of the largest logit; by 4e-6 with a delta
    # rule, which normalizes short vectors, and by 1.4e-5 with six such layers of eight. There our rounding, in an order
    # that depends on the processor, was at most 2.9 times as large as its own.
    bound, of_gradients = 5e-6, 2e-5
    if name in DELTA:
        bound, of_gradients = (3.5 * float(reference[f"float32_{key}"]) for key in ("error", "gradient_error"))
    assert relative_error(logits, reference["logits"]) < bound
    np.testing.assert_allclose(loss, reference["loss"], rtol=0.4 * bound)
    by_path = {parameters.path_name(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    tensors = published.tensors_of(
        lambda path, layer: by_path[path] if layer is None else by_path[path][layer],
        grads,
        axes,
        family_tensors.named_sources(model, json.loads((HERE / name / "config.json").read_text())["model_type"]),
        limits={"vocab": model.vocab_size},
        dtype=np.float32,
    )
    ours = dict(tensors)
    for name_ in [tensor for tensor in ours if tensor.endswith(("e_score_correction_bias", "layer_scalar"))]:  # frozen
        assert not np.any(ours.pop(name_))
    assert {f"grad/{tensor}" for tensor in ours} == {key for key in reference if key.startswith("grad/")}
    for tensor, gradient in ours.items():
        assert relative_error(gradient, reference[f"grad/{tensor}"]) < of_gradients, tensor


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        "granite4_nope",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("deepseek_v3", "gemma4", "gemma4_e2b", "gemma4_experts", "granite4")
        ),
    ],
)
def test_packed_documents_do_not_see_one_another(name):
    """Neither through sinks, which have no value, nor through windows, latent attention, experts or no positions."""
    _, params, _, reference = loaded(name)
    ids = reference["input_ids"]
    rows = batch_of(np.concatenate([ids[:, :9], ids[::-1, :15]], axis=1))
    rows["segment_ids"] = jnp.asarray([[1] * 9 + [2] * 15] * 2, jnp.int32)
    rows["positions"] = jnp.asarray([[*range(9), *range(15)]] * 2, jnp.int32)
    packed = logits_of(name)(params, rows)
    assert relative_error(packed[:, :9], reference["logits"][:, :9]) < 5e-6
    assert relative_error(packed[:, 9:], reference["logits"][::-1, :15]) < 5e-6


def test_adapters_of_gpt_oss_are_those_of_attention_with_the_names_of_peft():
    model = lora.adapted(model=pretrained.model(str(HERE / "gpt_oss")), rank=2, targets=Attention.matrices)
    names = {source.tensor((1,)) for source in family_tensors.adapter_sources(model).values()}
    start = "base_model.model.model.layers.1.self_attn"
    assert names == {f"{start}.{name}_proj.lora_{part}.weight" for name in "qkvo" for part in "AB"}
    assert family_tensors.adapter_config(model, "base")["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    said = r"gate, up, down are matrices of experts, .*; expected some of \('query', 'key', 'value', 'output'\)"
    with pytest.raises(UserError, match=said):
        lora.adapted(model=pretrained.model(str(HERE / "gpt_oss")))


def test_adapters_of_granite_4_are_those_of_attention_and_of_the_last_matrix():
    """PEFT has one adapter for the tensor that joins gate and up."""
    plain = pretrained.model(str(HERE / "granite4_nope"))
    model = lora.adapted(model=plain, rank=2, targets=(*Attention.matrices, "down"))
    projections = ["k_proj", "o_proj", "output_linear", "q_proj", "v_proj"]
    assert family_tensors.adapter_config(model, "base")["target_modules"] == projections
    joined = lora.adapted(model=plain, rank=2)
    with pytest.raises(UserError, match=r"several matrices in one tensor.*give --merge"):
        family_tensors.adapter_sources(joined)


def test_adapters_of_gemma_4_are_of_values_where_there_are_matrices_of_values():
    model = lora.adapted(model=pretrained.model(str(HERE / "gemma4")), rank=2)
    names = {source.tensor((i,)) for source in family_tensors.adapter_sources(model).values() for i in (0, 1)}
    of_attention = {name.partition("self_attn.")[2] for name in names if "self_attn" in name}
    assert {name.split(".")[0] for name in of_attention} == {f"{name}_proj" for name in "qkvo"}
    with_values = {name.split(".")[4] for name in names if "v_proj" in name}
    assert with_values == {"0", "2"}  # with a window
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch_of(np.zeros((1, 2))))
    assert {path for path in family_tensors.adapter_sources(model)} == {
        f"{module}/{name}" for module, made in shapes.items() for name in made if "_lora_" in name
    }


def test_adapters_of_gemma_4_with_experts_are_those_of_attention():
    plain = pretrained.model(str(HERE / "gemma4_experts"))
    model = lora.adapted(model=plain, rank=2, targets=Attention.matrices)
    assert family_tensors.adapter_config(model, "base")["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    tensors = {source.tensor((i,)) for source in family_tensors.adapter_sources(model).values() for i in (0, 1)}
    assert all(".self_attn." in tensor for tensor in tensors)
    with pytest.raises(UserError, match="gate, up, down are matrices of experts"):
        lora.adapted(model=plain)


def test_adapters_of_gemma_4_are_of_keys_where_layers_have_keys_of_their_own():
    model = lora.adapted(model=pretrained.model(str(HERE / "gemma4_e2b")), rank=2)
    found = family_tensors.adapter_sources(model)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch_of(np.zeros((1, 2))))
    assert set(found) == {f"{module}/{name}" for module, made in shapes.items() for name in made if "_lora_" in name}
    tensors = {
        source.tensor((i,))
        for path, source in found.items()
        for i in range(len(shapes[path.rpartition("/")[0]]["query"]))
    }
    layers_of = {
        name: {tensor.split(".")[4] for tensor in tensors if f".{name}_proj." in tensor}
        for name in ("q", "k", "v", "up")
    }
    assert layers_of == {"q": set("01234567"), "k": set("0123"), "v": set("0123"), "up": set("01234567")}


def test_adapters_of_deepseek_are_those_of_latent_attention_with_the_names_of_peft():
    plain = pretrained.model(str(HERE / "deepseek_v3"))
    model = lora.adapted(model=plain, rank=2, targets=plain.mixer.matrices)
    names = {source.tensor((1,)) for source in family_tensors.adapter_sources(model).values()}
    projections = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert names == {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
        for layer in (1, 3)
        for name in projections
        for part in "AB"
    }
    assert family_tensors.adapter_config(model, "base")["target_modules"] == sorted(projections)
    own = re.escape(f"; expected some of {plain.mixer.matrices}")
    for targets in (lora.TARGETS, Attention.matrices):  # by default, and of other attention
        with pytest.raises(UserError, match=own):
            lora.adapted(model=plain, targets=targets)


def test_a_folder_with_another_number_of_experts_is_refused_with_both_numbers():
    model = pretrained.model(str(HERE / "mixtral"), dtype="float32", vocab_multiple=8)
    wider = dataclasses.replace(model, feed_forward=dataclasses.replace(model.feed_forward, num_experts=8))
    source = wider.published(str(HERE / "mixtral"))
    assert any(
        note.startswith("experts.num_experts = 6 in ") and note.endswith("8 in the model") for note in source.notes
    )
    wanted = logical.abstract_init(wider.init, jax.random.key(0), batch_of(np.zeros((1, 2))))
    said = "\n".join(source.problems(*wanted))
    assert "missing: model.layers.0.block_sparse_moe.experts.6.w1.weight [44, 24]" in said
    assert "block_sparse_moe.gate.weight: shape [6, 24], the model needs [8, 24]" in said


_gemma2 = functools.partial(Attention, scale=7**-0.5, softcap=2.0)
_gemma3 = functools.partial(Attention, scale=7**-0.5, qk_norm=True)
# A mutation of each feature of a family, by the field that it changes.
MUTATIONS = {
    "gpt2": [
        {"norm_eps": 1e-2},
        {"activation": "silu"},
        {"activation": "gelu"},
        {"mixer": Attention(scale=0.3)},
    ],
    "llama2": [{"rope_theta": 5e5}, {"norm_eps": 1e-3}, {"activation": "gelu"}],
    "llama3": [{"rope_scaling": None}, {"rope_theta": 1e4}],
    "mistral": [{"mixer": Attention()}, {"mixer": Attention(window=6)}],
    "qwen2": [{"rope_scaling": None}],
    "qwen3": [{"norm_eps": 1e-3}],
    "gemma2": [
        {"mixer": (_gemma2(window=5, softcap=None), _gemma2(window=None))},
        {"logit_softcap": None},
        {"mixer": (_gemma2(window=5), _gemma2(window=None, scale=None))},
        {"scaled_embedding": False},
        {"mixer": (_gemma2(window=6), _gemma2(window=None))},
        {"mixer": (_gemma2(window=None), _gemma2(window=5))},
        {"norm": "rms"},
        {"activation": "gelu"},
    ],
    "gemma3": [
        {"mixer": (*[_gemma3(window=5)] * 2, _gemma3(window=None))},
        {"mixer": (*[_gemma3(window=5, rope_theta=1e4)] * 2, _gemma3(window=None))},
        {"rope_scaling": None},
        {"rope_theta": 1e4},
        {"mixer": (_gemma3(window=5, rope_theta=100.0), _gemma3(window=None))},
        {"mixer": (*[_gemma3(window=5, rope_theta=100.0)] * 2, _gemma3(window=None, scale=None))},
    ],
}
MUTATIONS |= {
    "mixtral": [
        {"feed_forward": Experts(num_experts=6, top_k=1)},
        {"feed_forward": Experts(num_experts=6, top_k=2, normalized=False)},
    ],
    "qwen3_moe": [{"feed_forward": Experts(num_experts=10, top_k=4, mlp_dim=20)}, {"mixer": Attention()}],
    "qwen3_moe_sparse": [
        {"feed_forward": (*[Mlp()] * 3, Experts(num_experts=5, top_k=2, mlp_dim=12, normalized=False))}
    ],
}
_turning, _still = Attention(), Attention(rotary_fraction=0.0)
_olmo = functools.partial(Attention, qk_norm="all_heads")
_phi3 = functools.partial(Attention, window=9, rotary_fraction=0.75)
MUTATIONS |= {
    "smollm3": [{"mixer": _turning}, {"mixer": _still}, {"mixer": (_still, _turning)}],
    "olmo2": [{"norm_eps": 1e-2}, {"mixer": _olmo(scale=0.5)}],
    "olmo3": [
        {"mixer": (_olmo(window=6, rope_theta=5e5), _olmo())},
        {"mixer": (_olmo(window=5), _olmo())},
        {"mixer": (_olmo(), _olmo(window=5, rope_theta=5e5))},
        {"rope_scaling": None},
    ],
    "granite": [
        {"scaled_embedding": False},
        {"scaled_embedding": True},
        {"residual_scale": 1.0},
        {"logit_scale": 1.0},
        {"mixer": Attention()},
    ],
    "granite4": [{"mixer": Attention(scale=0.25, rotary_fraction=0.0)}, {"residual_scale": 1.0}],
    "granite4_nope": [{"mixer": Attention(scale=0.25)}, {"mixer": Attention(rotary_fraction=0.0)}],
    "phi3": [{"rope_scaling": None}, {"mixer": _phi3(window=None)}, {"mixer": _phi3(rope_theta=1e4)}],
    "phi4": [{"rope_theta": 1e5}],
}
_gpt_oss = functools.partial(Attention, sinks=True)
_experts = functools.partial(Experts, num_experts=6, top_k=3, has_biases=True)
MUTATIONS["gpt_oss"] = [
    {"rope_scaling": None},
    {"mixer": (_gpt_oss(window=6), _gpt_oss())},
    {"mixer": (_gpt_oss(), _gpt_oss(window=5))},
    {"mixer": (_gpt_oss(window=5, rope_theta=150000.0), _gpt_oss())},  # YaRN is of all layers
    {"mixer": (Attention(window=5), Attention())},
    {"bias": "qkv"},
    {"feed_forward": _experts(clamped_gate=ClampedGate(slope=1.3, limit=7.0))},
    {"feed_forward": _experts(clamped_gate=ClampedGate(slope=1.702, limit=1.5))},
    {"feed_forward": _experts(clamped_gate=ClampedGate(slope=1.3, limit=1.5), has_biases=False), "bias": "qkv"},
    {"feed_forward": _experts(clamped_gate=ClampedGate(slope=1.3, limit=1.5), top_k=2)},
]
_gemma4 = functools.partial(Attention, scale=1.0, qk_norm=True, value_norm=True)
_local4 = functools.partial(_gemma4, window=5, rope_theta=100.0)
_full4 = functools.partial(_gemma4, head_dim=10, num_kv_heads=2, values_are_keys=True)
_experts4 = functools.partial(
    Experts, num_experts=10, top_k=4, mlp_dim=20, shared_mlp_dim=44, separate_norms=True, output_scales=True
)


def _of_sharing(*mixers):
    """The layers of `gemma4_e2b` with this attention."""
    later = tuple(dataclasses.replace(part, shares_keys=True) for part in mixers)
    return {"first_mixer": mixers * 2, "mixer": later}


MUTATIONS |= {
    "gemma4": [
        {"layer_scale": False},
        {"rope_scaling": None},
        {"rope_scaling": rotary.Proportional(fraction=0.6)},
        {"rope_theta": 100.0},
        {"norm": "rms_offset"},
        {"logit_softcap": None},
        {"mixer": (_local4(window=6), _full4())},
        {"mixer": (_local4(scale=None), _full4())},
        {"mixer": (_local4(), _full4(scale=None))},
        {"mixer": (_local4(value_norm=False), _full4())},
        {"mixer": (_local4(), _full4(value_norm=False))},
        {"mixer": (_local4(rope_theta=None), _full4())},
    ],
    "gemma4_experts": [
        {"feed_forward": _experts4(top_k=3)},
        {"feed_forward": _experts4(output_scales=False)},
        {"feed_forward": _experts4(separate_norms=False)},
    ],
    "gemma4_e2b": [
        {"layer_inputs": None},
        {"layer_scale": False},
        {"activation": "silu"},
        _of_sharing(_local4(window=6), _full4(values_are_keys=False)),
        _of_sharing(_local4(), _full4(values_are_keys=False, value_norm=False)),
    ],
    "gemma4_e4b": [{"layer_inputs": None}, {"logit_softcap": None}, {"rope_scaling": None}],
    "gemma4_unified": [{"rope_scaling": rotary.Proportional(fraction=0.5)}, {"activation": "silu"}],
}
_delta = functools.partial(GatedDelta, key_heads=2, value_heads=6, key_dim=12, value_dim=10)
_gated = functools.partial(Attention, qk_norm=True, output_gate=True, rotary_fraction=0.5)
MUTATIONS |= {
    "qwen3_next": [{"norm_eps": 1e-3}, {"activation": "gelu"}],
    "qwen3_5": [
        {"mixer": (_delta(), _gated(rotary_fraction=1.0))},
        {"mixer": (_delta(), _gated(rope_theta=1e4))},
        {"activation": "gelu"},
        {"norm_eps": 1e-3},
    ],
    "qwen3_5_moe": [
        {"feed_forward": Experts(num_experts=10, top_k=2, mlp_dim=20, shared_mlp_dim=28, shared_gate=True)},
        {"feed_forward": Experts(num_experts=10, top_k=4, mlp_dim=20, shared_mlp_dim=28)},
    ],
}
_latent = functools.partial(
    LatentAttention, latent_dim=12, plain_dim=10, rotary_dim=6, value_dim=8, query_latent_dim=16, score_sharpening=0.7
)
_sparse = functools.partial(
    Experts, num_experts=15, top_k=4, mlp_dim=20, shared_mlp_dim=40, scores="sigmoid", has_correction=True, scale=1.7
)
MUTATIONS |= {
    "deepseek_v3": [
        {"rope_scaling": None},
        {"rope_theta": 1e3},
        {"mixer": _latent(interleaved=False)},
        {"mixer": _latent(score_sharpening=0.0)},
        {"feed_forward": _sparse(num_groups=5, top_groups=2)},
        {"feed_forward": _sparse(num_groups=3, top_groups=2)},
        {"feed_forward": _sparse(num_groups=5, top_groups=3, scale=1.0)},
        {"feed_forward": _sparse(num_groups=5, top_groups=3, normalized=False)},
        {"feed_forward": _sparse(num_groups=5, top_groups=3, has_correction=False)},
        {"feed_forward": _sparse(num_groups=5, top_groups=3, scores="softmax")},
    ],
    "deepseek_v3_plain": [{"norm_eps": 1e-2}, {"activation": "gelu"}],
}
CASES = [(name, change) for name, changes in MUTATIONS.items() for change in changes]


@pytest.mark.slow  # 26 models; the agreement with the reference above is quick
@pytest.mark.parametrize(("name", "change"), CASES, ids=[f"{n}-{'-'.join(c)}-{i}" for i, (n, c) in enumerate(CASES)])
def test_the_reference_notices_a_change_of_each_feature(name, change):
    model, params, _, reference = loaded(name)
    ids = reference["input_ids"]
    changed = dataclasses.replace(model, **change)
    assert relative_error(jax.jit(changed.logits)(params, batch_of(ids)), reference["logits"]) > 1e-4


# As published (transformers counts a tied head twice; here it is counted once).
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.slow  # 30 models are traced
def test_presets_have_the_published_numbers_of_parameters():
    ids = np.zeros((1, 2), np.int32)
    ours = {}
    for name in COUNTS:
        model = transformer.preset(name, vocab_multiple=1)
        shapes = jax.eval_shape(model.init, jax.random.key(0), batch_of(ids))
        ours[name] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert ours == COUNTS
    published = {name for name, fields in presets.FIELDS.items() if not callable(fields)}  # without those of parts
    assert set(COUNTS) | {"tiny", "125m", "1b", "7b"} == published


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("gpt-oss-120b", "gpt_oss", 116_829_156_672), ("deepseek-v3", "deepseek_v3", 671_026_419_200)],
)
def test_presets_of_whole_configurations_have_the_published_numbers_of_parameters(name, kind, count):
    model = transformer.preset(name, vocab_multiple=1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch_of(np.zeros((1, 2), np.int32)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
    assert families.family(model) == kind


# Of the published `config.json`: model_type, positions, rope_theta, eps, tied, sliding_window.
PUBLISHED = {
    "gpt2": ("gpt2", 1024, None, 1e-5, True, None),
    "gpt2-medium": ("gpt2", 1024, None, 1e-5, True, None),
    "gpt2-large": ("gpt2", 1024, None, 1e-5, True, None),
    "gpt2-xl": ("gpt2", 1024, None, 1e-5, True, None),
    "llama-2-7b": ("llama", 4096, 1e4, 1e-5, False, None),
    "llama-3.1-8b": ("llama", 131072, 5e5, 1e-5, False, None),
    "llama-3.1-70b": ("llama", 131072, 5e5, 1e-5, False, None),
    "llama-3.2-1b": ("llama", 131072, 5e5, 1e-5, True, None),
    "llama-3.2-3b": ("llama", 131072, 5e5, 1e-5, True, None),
    "mistral-7b-v0.1": ("mistral", 32768, 1e4, 1e-5, False, 4096),
    "mistral-7b-v0.3": ("llama", 32768, 1e6, 1e-5, False, None),  # without a window, Mistral is Llama
    "mixtral-8x7b": ("mixtral", 32768, 1e6, 1e-5, False, None),
    "qwen2.5-0.5b": ("qwen2", 32768, 1e6, 1e-6, True, None),
    "qwen2.5-1.5b": ("qwen2", 131072, 1e6, 1e-6, True, None),
    "qwen2.5-7b": ("qwen2", 131072, 1e6, 1e-6, False, None),
    "qwen3-0.6b": ("qwen3", 40960, 1e6, 1e-6, True, None),
    "qwen3-1.7b": ("qwen3", 40960, 1e6, 1e-6, True, None),
    "qwen3-4b": ("qwen3", 40960, 1e6, 1e-6, True, None),
    "qwen3-8b": ("qwen3", 40960, 1e6, 1e-6, False, None),
    "qwen3-14b": ("qwen3", 40960, 1e6, 1e-6, False, None),
    "qwen3-32b": ("qwen3", 40960, 1e6, 1e-6, False, None),
    "qwen3-30b-a3b": ("qwen3_moe", 40960, 1e6, 1e-6, False, None),
    "gemma-2-2b": ("gemma2", 8192, 1e4, 1e-6, True, 4096),
    "gemma-2-9b": ("gemma2", 8192, 1e4, 1e-6, True, 4096),
    "gemma-2-27b": ("gemma2", 8192, 1e4, 1e-6, True, 4096),
    "gemma-3-1b": ("gemma3_text", 32768, 1e6, 1e-6, True, 512),
    "gemma-3-4b": ("gemma3_text", 131072, 1e6, 1e-6, True, 1024),
    "gemma-3-12b": ("gemma3_text", 131072, 1e6, 1e-6, True, 1024),
    "gemma-3-27b": ("gemma3_text", 131072, 1e6, 1e-6, True, 1024),
    "smollm2-135m": ("llama", 8192, 1e5, 1e-5, True, None),
    "smollm2-360m": ("llama", 8192, 1e5, 1e-5, True, None),
    "smollm2-1.7b": ("llama", 8192, 1.3e5, 1e-5, True, None),
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 8.0}
# query_pre_attn_scalar, number of local layers, final_logit_softcapping.
GEMMAS = {
    "gemma-2-2b": (256, 13, 30.0),
    "gemma-2-9b": (256, 21, 30.0),
    "gemma-2-27b": (144, 23, 30.0),
    "gemma-3-1b": (256, 22, None),
    "gemma-3-4b": (256, 29, None),
    "gemma-3-12b": (256, 40, None),
    "gemma-3-27b": (168, 52, None),
}


def test_presets_have_the_published_configurations():
    assert set(PUBLISHED) == set(COUNTS)
    for name, (kind, positions, theta, eps, tied, window) in PUBLISHED.items():
        model = transformer.preset(name)
        written = families.config(model, kind)
        assert families.differences(model, written) == [], name
        found = [written.get(key) for key in ("rope_theta", "tie_word_embeddings", "sliding_window")]
        assert found == [theta, tied, window], name
        assert (model.max_positions, model.norm_eps) == (positions, eps), name
        scalings = {"llama-3.1": LLAMA3 | {"factor": 8.0}, "llama-3.2": LLAMA3 | {"factor": 32.0}}
        scalings |= dict.fromkeys(("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"), LINEAR)
        scaling = next((one for start, one in scalings.items() if name.startswith(start)), None)
        assert written.get("rope_scaling") == scaling, name
    for name, (scalar, locals_, softcap) in GEMMAS.items():
        written = families.config(transformer.preset(name), PUBLISHED[name][0])
        found = [written["query_pre_attn_scalar"], written["layer_types"].count("sliding_attention")]
        assert [*found, written["final_logit_softcapping"]] == [scalar, locals_, softcap], name


FIRST = {kind: name for name, (kind, *_) in reversed(PUBLISHED.items())}.values()  # a preset of each family
OTHERS = pytest.param(PUBLISHED.keys() - FIRST, marks=pytest.mark.slow)  # of other sizes


@pytest.mark.parametrize("names", [FIRST, OTHERS], ids=["first", "others"])
def test_presets_are_of_their_families(names):
    found = {name: families.family(transformer.preset(name)) for name in names}
    assert found == {name: PUBLISHED[name][0] for name in names}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_is_written_as_it_was_read(name):
    model = pretrained.model(str(HERE / name), vocab_multiple=8)
    kind = families.family(model)
    same = {"phi4": "llama", "granite4": "granite"}  # matrices that are not joined
    same["gemma4_unified"] = "gemma4_text"  # the same without images
    assert kind == same.get(name, json.loads((HERE / name / "config.json").read_text())["model_type"])
    again = transformer.Transformer(**families.fields(families.config(model, kind)), vocab_multiple=8)
    assert dataclasses.replace(again, head_dim=again.head_width) == dataclasses.replace(
        model, head_dim=model.head_width
    )


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "mixtral",
            {"feed_forward": Experts(num_experts=6, top_k=2, scores="sigmoid")},
            "needs experts.scores = 'softmax' (here",
        ),
        ("llama2", {"logit_softcap": 30.0}, "the nearest is llama, which needs logit_softcap = None (here 30.0)"),
        ("llama2", {"scaled_embedding": True}, "scaled_embedding = False (here True)"),
        ("mistral", {"rope_theta": 5.0, "logit_softcap": 3.0}, "the nearest is mistral, which needs logit_softcap"),
        (
            "qwen3",
            {"mixer": Attention(window=5, qk_norm=True)},
            "nearest is qwen3, which needs attention.window = None (here 5)",
        ),
        ("gpt2", {"head_dim": 8}, "nearest is gpt2, which needs head_dim = None (here 8)"),
        ("deepseek_v3", {"head_dim": 20}, "nearest is deepseek_v3, which needs head_dim = 6 (here 20)"),
        ("llama2", {"attention": "none"}, "needs attention = 'auto' (here 'none')"),
        ("llama2", {"feed_forward": Mlp(mlp_dim=40)}, "the nearest is llama, which needs mlp_dim = 44 (here 40)"),
        ("llama2", {"first_feed_forward": (Mlp(mlp_dim=48),)}, "needs mlp_dim = 44 (here (48, 44, 44))"),
        ("llama2", {"feed_forward": (Mlp(), Mlp(), Mlp(mlp_dim=40))}, "needs mlp_dim = 44 (here (44, 44, 40))"),
        ("gemma4_e2b", {"feed_forward": Mlp(mlp_dim=132)}, "mlp_dim = 44 (here (44, 44, 44, 44, 132, 132, 132, 132))"),
    ],
)
def test_a_model_of_no_family_is_refused_with_what_differs(name, change, says):
    model = dataclasses.replace(pretrained.model(str(HERE / name)), **change)
    with pytest.raises(UserError) as caught:
        families.family(model)
    assert says in str(caught.value)


def test_a_width_that_only_layers_have_differs_from_a_configuration():
    config = json.loads((HERE / "llama2" / "config.json").read_text())
    model = pretrained.model(str(HERE / "llama2"))
    assert families.differences(dataclasses.replace(model, feed_forward=Mlp(mlp_dim=44)), config) == []
    (line,) = families.differences(dataclasses.replace(model, feed_forward=Mlp(mlp_dim=40)), config)
    assert line == "mlp_dim = 44 in config.json, 40 in the model"


def test_long_rope_is_written_where_the_length_before_it_has_a_key_of_its_own():
    scaling = rotary.LongRope(short=(1.0,) * 4, long=(2.0,) * 4, original_length=16)
    model = transformer.Transformer(
        vocab_size=59, num_layers=1, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=1, rope_scaling=scaling
    )
    assert families.family(model) == "phi3"
    with pytest.raises(UserError, match="llama"):
        families.config(model, "llama")
    written = families.config(model, "phi3")
    with pytest.raises(UserError, match="above 1"):
        families.fields(written | {"original_max_position_embeddings": 1, "max_position_embeddings": 40})
