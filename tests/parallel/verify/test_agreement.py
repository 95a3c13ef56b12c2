"""A strategy changes speed and memory, never numbers: every strategy on 16 devices against one device, in float32."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, slices
from core.batches import Field
from core.stack import layer_stack
from models import losses
from models.agreement_subjects import MODEL, random_batches
from models.decoder.attention import attention
from parallel import accumulation, partitioner, strategies
from parallel.verify import agreement
from tests.haiku_model import HaikuModel
from tests.lab.subjects import bind

CASES = {
    **agreement.EXAMPLES,
    "whole key heads": agreement.Example(
        "v4-32",
        strategies.override(
            strategies.fsdp_tensor(tensor=8), param_rules={"kv_heads": None}, activation_rules={"kv_heads": None}
        ),
    ),
}
SLOW = {  # by what is quick and splits in the same way
    "data_parallel": "mesh3d: data, fsdp and tensor together",
    "zero1": "mesh3d",
    "fsdp": "mesh3d",
    "hsdp": "mesh3d",
    "fsdp_overlapped": "tests/parallel/test_overlapped.py",
    "fsdp_tensor": "mesh3d",
    "tensor": "mesh3d",
    "sequence_tensor": "mesh3d, which splits by tensor, and context, which splits rows",
    "context_ring": "tests/models/decoder/attention/test_ring_attention.py",
    "multislice": "mesh3d, which splits rows over two axes too",
    "experts": "test_experts_agree.py, whose model has experts",
    "whole key heads": "mesh3d, but that key heads may stay whole is seen only here",
    **{n: "tests/parallel/pipeline" for n in CASES if n.startswith("pipeline")},
}
STEPS = 20
QUICK_STEPS = 6  # those of the warmup, and one more


def batches(steps=STEPS):
    return random_batches(MODEL.vocab_size, steps=steps)


def program(tables, slice_name, **options):
    return bind(MODEL, agreement.Example(slice_name, tables), next(batches()), **options)


@pytest.fixture(scope="module")
def one_device():
    return run_alone(QUICK_STEPS)


@functools.cache
def run_alone(steps):
    return agreement.run(program(strategies.data_parallel(), "v5e-1"), batches(steps))


@pytest.mark.covers("M04", "M06", "M07", "M08", "M09", "M10", "M13", "M16", "R11")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_numbers_do_not_depend_on_the_strategy(name):
    case, steps = CASES[name], STEPS if name in SLOW else QUICK_STEPS
    found = agreement.compare(agreement.run(program(case.strategy, case.slice), batches(steps)), run_alone(steps))
    assert not agreement.exceeding(case.strategy.name, found)


def test_every_strategy_was_measured():
    assert set(agreement.EXAMPLES) <= set(agreement.MEASURED)


WRONG = {
    "zero": np.zeros_like,
    "1 % off": lambda a: a * 1.01 if np.issubdtype(a.dtype, np.floating) else a + 1,
    "not a number": lambda a: np.full_like(a, np.nan, dtype=np.result_type(a, np.float16)),
    "infinite": lambda a: np.full_like(a, np.inf, dtype=np.result_type(a, np.float16)),
    "another shape": lambda a: a[None],
}


@pytest.fixture(scope="module")
def with_carry(one_device):
    """The decoder's trajectory, with a carry such as a recurrent model has."""
    return one_device._replace(carry={"carry": {"state": np.linspace(-1, 1, 6), "steps": np.arange(1, 4)}})


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("field", [name for name in agreement.Trajectory._fields if name != "is_whole"])
def test_a_wrong_leaf_anywhere_is_seen(field, how, with_carry):
    """Changes one leaf at a time by more than the widest tolerance; counts are reported only if they are not finite."""
    leaves, structure = jax.tree.flatten(getattr(with_carry, field))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(getattr(with_carry, field))]
    assert leaves
    for i, path in enumerate(paths):
        planted_leaf = WRONG[how](leaves[i])
        if planted_leaf.dtype != leaves[i].dtype:
            continue  # no integer is infinite or not a number
        wrong = jax.tree.unflatten(structure, [*leaves[:i], planted_leaf, *leaves[i + 1 :]])
        planted = with_carry._replace(**{field: wrong})
        is_count = path in ("['accuracy']", "['carry']['steps']")
        part = "counts" if is_count else field
        for pair in ((planted, with_carry), (with_carry, planted)):
            found = agreement.compare(*pair)
            assert found[part].where == (f"['{field}']{path}" if is_count else path)
            judged = not is_count or how in ("not a number", "infinite", "another shape")
            assert list(agreement.exceeding("nobody's", found)) == ([part] if judged else [])


def test_metrics_whose_sums_are_whole_are_counts(one_device):
    assert [name for name, is_whole in one_device.is_whole.items() if is_whole] == ["accuracy"]
    assert (
        set(one_device.is_whole) == set(one_device.metrics) == {"accuracy", "gradient_norm", "learning_rate", "weight"}
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_entries_that_are_not_finite_do_not_agree(value):
    tree = {"a": np.ones(3), "b": np.array([1.0, value])}
    assert agreement.difference(tree, tree) == (np.inf, np.inf, "['b']", np.inf)


@dataclasses.dataclass(frozen=True)
class Biased(HaikuModel):
    """One layer of attention with biases that start at zero; the gradient of the keys' is zero but for rounding."""

    def _loss(self, batch):
        vocab, init = MODEL.stored_vocab_size, hk.initializers.RandomNormal(0.1)
        table = logical.param("embedding", (vocab, 32), ("vocab", "embed"), init)
        x = logical.constrain(table[batch["inputs"]], "batch", "length", "embed")
        x = layer_stack(self._block, 1)(x, batch["segment_ids"])
        x = x @ logical.param("unembedding", (32, vocab), ("embed", "vocab"), init)
        return losses.cross_entropy(x, batch["targets"], batch["weights"], vocab_size=MODEL.vocab_size)

    def _block(self, x, segment_ids):
        q, k, v = (self._projected(x, name) for name in ("query", "key", "value"))
        mixed = attention.attend(q, k, v, segment_ids, choice="plain")  # [B, T, 4, 8]
        out = logical.param("output", (4, 8, 32), ("heads", "head_dim", "embed"), hk.initializers.RandomNormal(0.1))
        return x + jnp.einsum("bthk,hkd->btd", mixed, out)

    def _projected(self, x, name):
        axes = ("heads", "head_dim") if name == "query" else ("kv_heads", "head_dim")
        w = logical.param(name, (32, 4, 8), ("embed", *axes), hk.initializers.RandomNormal(0.1))
        bias = logical.param(f"{name}_bias", (4, 8), axes, hk.initializers.Constant(0.0))
        return jnp.einsum("btd,dhk->bthk", x, w) + bias


@pytest.fixture(scope="module")
def biased():
    data = list(random_batches(MODEL.vocab_size, steps=2))
    examples = (agreement.Example("v5e-1", strategies.data_parallel()), agreement.EXAMPLES["tensor"])
    return [agreement.run(bind(Biased(), example, data[0]), data) for example in examples]


def test_leaves_with_only_rounding_errors_agree(biased):
    one, split = biased
    key = one.gradients["layers/~"]["key_bias"]
    assert 0 < np.max(np.abs(key)) < 1e-6 * np.max(np.abs(one.gradients["layers/~"]["value_bias"]))
    assert agreement.difference(split.gradients, one.gradients).ulp > 1e5
    assert not agreement.exceeding("tensor", agreement.compare(split, one))


@pytest.mark.parametrize("part", ["gradients", "params"])
def test_a_fault_in_a_bias_is_seen_under_the_floor(part, biased):
    """1 % of a bias, or a thousandth of another bias in that of the keys: a sum that should have canceled."""
    one, _ = biased
    tree = getattr(one, part)["layers/~"]
    for name in ("query_bias", "value_bias", "key_bias"):
        wrong = tree[name] + 1e-3 * tree["value_bias"] if name == "key_bias" else 1.01 * tree[name]
        planted = one._replace(**{part: {**getattr(one, part), "layers/~": {**tree, name: wrong}}})
        assert list(agreement.exceeding("nobody's", agreement.compare(planted, one))) == [part], name


@pytest.mark.slow
def test_a_sum_over_microbatches_that_is_wrong_is_seen_in_the_gradients(one_device, monkeypatch):
    monkeypatch.setattr(accumulation, "reduce", lambda x, stored, kept, manual: x)
    wrong = agreement.run(program(strategies.data_parallel(), "v4-8", accum_steps=2), [next(batches())])
    assert agreement.difference(wrong.gradients, one_device.gradients).ulp > 1e6
    np.testing.assert_allclose(wrong.losses, one_device.losses[:1], rtol=1e-6)


@pytest.mark.covers("T03")
@pytest.mark.parametrize(
    ("tables", "gather_once", "steps"),
    [
        (strategies.fsdp_tensor(tensor=2), True, QUICK_STEPS),
        pytest.param(strategies.hsdp(data=2), False, STEPS, marks=pytest.mark.slow),
        pytest.param(strategies.hsdp(data=2), True, STEPS, marks=pytest.mark.slow),
        pytest.param(strategies.fsdp_tensor(tensor=2), False, STEPS, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_accumulation_equals_one_big_batch(tables, gather_once, steps):
    bound = program(tables, "v4-8", accum_steps=4, gather_once=gather_once)
    found = agreement.compare(agreement.run(bound, batches(steps)), run_alone(steps))
    assert not agreement.exceeding(tables.name, found)


@pytest.mark.covers("T07")
def test_frozen_parameters_stay_and_have_no_state():
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2))
    bound = partitioner.Partitioner(strategies.fsdp(), slice=slices.get("v4-32"), devices=jax.devices())
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in next(batches()).items()}
    model = dataclasses.replace(MODEL, num_layers=1)
    recording = agreement.record_gradients(optimizer)
    frozen = bound.program(model, recording, spec, seed=7, frozen=("layers/*", "embedding"))
    state = frozen.init()
    before = jax.device_get(state.params)
    assert {a.dtype.name for a in (before["~"]["embedding"], *before["layers/block"].values())} == {"bfloat16"}
    moments = [a.shape for a in jax.tree.leaves(state.opt_state.inner) if a.ndim]
    assert sorted(moments) == sorted([(64,), (64,), (64, 256), (64, 256)])
    state, metrics = frozen.train_step(state, frozen.put(next(batches())))
    after = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, after["layers/block"], before["layers/block"])
    np.testing.assert_array_equal(after["~"]["embedding"], before["~"]["embedding"])
    assert not np.array_equal(after["~"]["unembedding"], before["~"]["unembedding"])
    trained = jax.device_get(state.opt_state.gradients)["~"]
    norm = np.sqrt(sum(np.sum(np.square(trained[k])) for k in ("unembedding", "final_norm")))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_tensor", "pipeline", "pipeline_fsdp", "pipeline_data"])
def test_frozen_parameters_have_the_numbers_of_one_device(name):
    frozen, first = {"frozen": ("layers/*norm", "layers/*/up", "layers/*/query", "embedding")}, list(batches())[:3]
    alone = agreement.run(program(strategies.data_parallel(), "v5e-1", **frozen), first)
    case = CASES[name]
    found = agreement.run(program(case.strategy, case.slice, **frozen), first)
    assert not agreement.exceeding(name, agreement.compare(found, alone))
    for module, leaf in (("~", "embedding"), ("layers/block", "up"), ("layers/block", "query")):
        assert found.params[module][leaf].dtype.name == "bfloat16"
        np.testing.assert_array_equal(found.params[module][leaf], found.fresh[module][leaf])


def test_sharded_bytes():
    state = program(strategies.fsdp(), "v4-32").init()
    weight = state.params["layers/block"]["query"]
    assert weight.addressable_shards[0].data.size * 16 == weight.size
    assert state.opt_state[1].mu["layers/block"]["query"].sharding == weight.sharding
    assert jnp.ndim(state.step) == 0
