"""Low-rank adapters: the start is the base, only adapters are trained, and a merged model is the adapted one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, slices
from core.checkpoints import published
from core.errors import UserError
from models import lora
from models.agreement_subjects import random_batches
from models.decoder.experts import Experts
from models.decoder.layers import Attention, Matrices
from models.decoder.parts import Part, Result
from models.decoder.published import family_tensors
from models.decoder.transformer import Transformer, preset
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.verify import agreement
from tests.lab.subjects import bind
from tests.models.drawn import drawn

BASE = Transformer(
    vocab_size=96,
    num_layers=4,
    embed_dim=32,
    mlp_dim=48,
    num_heads=8,
    num_kv_heads=4,
    dtype="float32",
    vocab_multiple=32,
)
MODEL = lora.adapted(model=BASE, rank=4, alpha=8.0, base_dtype="float32")


def batch():
    return next(random_batches(BASE.vocab_size, steps=1))


@pytest.fixture(scope="module")
def params():
    return drawn(MODEL.init, batch())


def with_random_b(params):
    """Adapters away from their start, at which B is zero."""
    rng = np.random.default_rng(1)
    return {
        module: {
            name: jnp.asarray(0.1 * rng.normal(size=p.shape), p.dtype) if name.endswith("_lora_b") else p
            for name, p in leaves.items()
        }
        for module, leaves in params.items()
    }


def base_of(params):
    return {module: {n: p for n, p in leaves.items() if "_lora_" not in n} for module, leaves in params.items()}


def merged(params):
    block = dict(params["layers/block"])
    for name in MODEL.lora.targets:
        a, b = block[f"{name}_lora_a"], block[f"{name}_lora_b"]
        block[name] = jax.vmap(lambda w, a, b: w + 2.0 * jnp.tensordot(a, b, 1))(block[name], a, b)
    return base_of({**params, "layers/block": block})


@pytest.mark.slow  # loss and gradients of the merged model are quick
def test_the_start_is_exactly_the_base():
    params = jax.jit(MODEL.init)(jax.random.key(0), batch())
    np.testing.assert_array_equal(
        jax.jit(MODEL.logits)(params, batch()), jax.jit(BASE.logits)(base_of(params), batch())
    )


@pytest.mark.covers("N07")
def test_loss_and_gradients_are_those_of_the_merged_model(params):
    """By the chain rule: dA = s dW B', dB = s A' dW."""
    params = with_random_b(params)

    def loss(model):
        return lambda p: model.loss(p, (), None, batch())[1].loss_sum

    (ours, grads), (theirs, whole) = (
        jax.jit(jax.value_and_grad(loss(m)))(p) for m, p in ((MODEL, params), (BASE, merged(params)))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for name in MODEL.lora.targets:
        dw = whole["layers/block"][name]
        a, b = (params["layers/block"][f"{name}_lora_{part}"] for part in "ab")
        flat = dw.reshape(4, -1, b[0].size // 4)
        want_a = 2.0 * jnp.einsum("lio,lro->lir", flat, b.reshape(4, 4, -1)).reshape(a.shape)
        want_b = 2.0 * jnp.einsum("lir,lio->lro", a.reshape(4, -1, 4), flat).reshape(b.shape)
        for part, want in (("a", want_a), ("b", want_b)):
            found = grads["layers/block"][f"{name}_lora_{part}"]
            np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-5, err_msg=name)


def test_the_merge_in_numpy_is_the_sum(params):
    params = with_random_b(params)
    block = params["layers/block"]
    for name in MODEL.lora.targets:
        parts = (np.asarray(block[n][1]) for n in (name, f"{name}_lora_a", f"{name}_lora_b"))
        np.testing.assert_allclose(
            MODEL.lora.merged(*parts), merged(params)["layers/block"][name][1], rtol=1e-5, atol=1e-6
        )


@pytest.mark.covers("N07")
def test_only_adapters_have_state_and_the_base_keeps_its_bits():
    model = lora.adapted(model=BASE, rank=2, targets=("query", "down"))
    batches = random_batches(BASE.vocab_size, steps=3)
    program = bind(model, agreement.EXAMPLES["fsdp"], batch())
    state = program.init()
    before = jax.device_get(state)
    for each in batches:
        state, _ = program.train_step(state, program.put(each))
    trained = {n for leaves in before.params.values() for n in leaves if "_lora_" in n}
    assert trained == {f"{n}_lora_{part}" for n in ("query", "down") for part in "ab"}
    for module, leaves in state.params.items():
        for name, after in leaves.items():
            same = np.array_equal(after, before.params[module][name])
            assert same == (name not in trained), name
            assert (after.dtype == jnp.bfloat16) == (name not in trained)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * sum(p.size for leaves in state.params.values() for n, p in leaves.items() if n in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(agreement.EXAMPLES))
def test_adapters_with_dropout_agree_with_one_device(name):
    model = lora.adapted(model=BASE, rank=4, dropout=0.2, base_dtype="float32")
    example = agreement.EXAMPLES[name]

    def run(example):
        batches = random_batches(BASE.vocab_size, steps=3)
        return agreement.run(bind(model, example, batch()), batches)

    found = agreement.compare(run(example), run(agreement.Example("v5e-1", strategies.data_parallel())))
    assert not agreement.exceeding(example.strategy.name, found)


def test_dropout_is_applied_in_training_only(params):
    model = dataclasses.replace(MODEL, lora=dataclasses.replace(MODEL.lora, dropout=0.5))
    params, key = with_random_b(params), jax.random.key(3)

    def loss(model, **options):
        return model.loss(params, (), key, batch(), **options)[1].loss_sum

    plain = loss(MODEL)
    assert loss(model, is_training=False) == plain
    assert loss(model, is_training=True) != plain


@pytest.mark.slow  # dropout by row has quick tests in tests/parallel/test_random_bits.py
@pytest.mark.covers("N07", "T12")
def test_dropout_in_a_ring_has_the_bits_of_one_device():
    model = dataclasses.replace(BASE, num_layers=1)
    model = lora.adapted(model=model, rank=2, dropout=0.5, base_dtype="float32", targets=("query", "down"))
    given = jax.tree.map(jnp.asarray, batch())
    params = with_random_b(jax.jit(model.init)(jax.random.key(0), given))

    def loss(params, given):
        return model.loss(params, (), jax.random.key(3), given)[1].loss_sum

    alone = jax.jit(loss)(params, given)
    tables = strategies.context(sequence=4, ring=True)
    with Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices()).tracing():
        around = jax.jit(lambda *args: loss(*args))(params, given)  # traced under these tables
    np.testing.assert_allclose(around, alone, rtol=1e-6)


def test_routers_of_a_frozen_base_stay_in_float32():
    model = dataclasses.replace(BASE, num_layers=1, feed_forward=Experts(num_experts=2, top_k=1, has_biases=True))
    model = lora.adapted(model=model, targets=("query",))
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch())
    kept, rounded = ("router", "router_bias"), ("up", "up_bias", "query")
    for name, dtype in {**dict.fromkeys(kept, "float32"), **dict.fromkeys(rounded, "bfloat16")}.items():
        spec = specs["layers/block"][name]
        assert (shapes["layers/block"][name].dtype, spec.dtype, spec.trainable) == (dtype, dtype, False)


def test_adapters_are_written_as_peft_names_them(params):
    model = lora.adapted(model=BASE, rank=4, targets=("query", "output"))
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch())
    adapters = family_tensors.adapter_sources(model)
    chosen = [{m: {n: v for n, v in e.items() if "_lora_" in n} for m, e in t.items()} for t in (shapes, specs)]
    chosen = [{m: e for m, e in t.items() if e} for t in chosen]
    params = with_random_b(params)
    tensors = dict(
        published.tensors_of(
            lambda path, layer: np.asarray(params["layers/block"][path.rpartition("/")[2]][layer]),
            *chosen,
            adapters,
            limits={},
            dtype=np.float32,
        )
    )
    prefix = "base_model.model.model.layers.1.self_attn"
    a, b = tensors[f"{prefix}.o_proj.lora_A.weight"], tensors[f"{prefix}.o_proj.lora_B.weight"]
    assert (a.shape, b.shape) == ((4, 32), (32, 4))
    block = params["layers/block"]
    want = np.asarray(merged(params)["layers/block"]["output"][1] - block["output"][1]).reshape(32, 32)
    np.testing.assert_allclose(2.0 * (b @ a).T, want, atol=1e-5)
    config = family_tensors.adapter_config(model, "hf://owner/base")
    assert config["target_modules"] == ["o_proj", "q_proj"]
    assert config["base_model_name_or_path"] == "owner/base"
    pinned = family_tensors.adapter_config(model, "hf://owner/base@v2")
    assert (pinned["base_model_name_or_path"], pinned["revision"]) == ("owner/base", "v2")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"targets": ("q_proj", "key")},
            r"no matrix 'q_proj'; expected some of \('query', 'key', 'value', 'output', 'gate', 'up', 'down'\)",
        ),
        ({"targets": ()}, r"targets = \(\): expected at least one matrix"),
        ({"targets": ("key", "key")}, "'key', 'key'.: expected at least one matrix, such as 'query', and each once"),
        ({"rank": 0}, "an integer of at least 1"),
        ({"alpha": 0.0}, "alpha = 0.0: expected a positive number"),
        ({"alpha": float("nan")}, "alpha = nan: expected a positive number"),
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"base_dtype": "int8"}, "expected 'bfloat16' or 'float32'"),
    ],
)
def test_settings_out_of_range_are_refused(options, told):
    with pytest.raises(UserError, match=told):
        lora.adapted(model=BASE, **options)


def test_models_that_cannot_have_adapters_are_refused():
    with pytest.raises(UserError, match=r"lora\.adapted\.model is object, .* expected a decoder"):
        lora.adapted(model=object())
    plain = dataclasses.replace(BASE, gated=False)
    with pytest.raises(UserError, match=r"no matrix 'gate'; expected some of \('query', .*'output', 'up', 'down'\)"):
        lora.adapted(model=plain)
    keys, both = (
        Attention(values_are_keys=True),
        r"no matrix 'value'; expected some of \('query', 'key', 'output', 'gate'",
    )
    with pytest.raises(UserError, match=both):
        lora.adapted(model=dataclasses.replace(BASE, mixer=keys))
    some = dataclasses.replace(BASE, mixer=(keys, Attention()))
    assert "value" in lora.adapted(model=some).lora.targets
    gpt2 = preset("gpt2", num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24)
    adapted = lora.adapted(model=gpt2, targets=("query",))
    with pytest.raises(UserError, match="give --merge"):
        family_tensors.adapter_sources(adapted)
    config = family_tensors.adapter_config(lora.adapted(model=gpt2, targets=("up", "output")), "gpt2")
    assert config["target_modules"] == ["attn.c_proj", "c_fc"]


@dataclasses.dataclass(frozen=True)
class Shifted(Part):
    """A mixer of a user: a matrix times the token before."""

    name = "shifted"
    matrices = ("before",)

    def __call__(self, decoder, x, call):
        of, d = Matrices(decoder), decoder.embed_dim
        axes = (("embed",), (None,))
        x = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return Result(
            of.product(
                "before", "btd,de->bte", x, of.weight("before", (d, d), ("embed", None), fan_in=d), call.side, axes
            )
        )


def test_matrices_of_a_part_of_one_s_own_can_have_adapters():
    base = dataclasses.replace(BASE, num_layers=1, mixer=Shifted(), feed_forward=None)
    model = lora.adapted(model=base, rank=2, targets=("before",))
    made = jax.eval_shape(model.init, jax.random.key(0), batch())["layers/block"]
    assert (made["before_lora_a"].shape, made["before_lora_b"].shape) == ((1, 32, 2), (1, 2, 32))
    with pytest.raises(UserError, match=r"no matrix 'befor'; expected some of \('before',\)"):
        lora.adapted(model=base, targets=("befor",))
