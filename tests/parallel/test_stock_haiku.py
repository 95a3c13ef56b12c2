"""A GPT of stock Haiku modules, with dropout, trains under every kind of strategy as on one device."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from core import logical, random_bits
from core.logical import ParamSpec
from core.stack import haiku_tail, layer_stack
from launch.verify.agreement import bind
from models import losses
from models.agreement_subjects import random_batches
from parallel import agreement, strategies
from parallel.pipeline import schedules

VOCAB, LENGTH, WIDTH, HEADS, LAYERS = 64, 24, 16, 4, 4
NAMES = {
    "embed/embeddings": ("vocab", "embed"),
    "positions": ParamSpec((None, "embed"), kind="embedding"),
    "*/attn/linear/w": ("heads", "embed"),
    "*/attn/linear/b": ("embed",),
    "*/attn/*/w": ("embed", "heads"),
    "*/attn/*/b": ("heads",),
    "*/up/w": ("embed", "mlp"),
    "*/up/b": ("mlp",),
    "*/down/w": ("mlp", "embed"),
    "*/down/b": ("embed",),
    "*ln*": ("norm",),
    "tail/unembed/w": ("embed", "vocab"),
}
INIT = hk.initializers.VarianceScaling(0.5)


def layer_norm(name, x):
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, name=name)(x)


@dataclasses.dataclass(frozen=True)
class GPT:
    """Written as Haiku's example of a transformer is."""

    vocab_size: int = VOCAB
    dtype: str = "float32"
    dropout: str = "by row"
    unnamed: tuple = ()

    def init(self, rng, batch):
        return self._net().init(rng, batch)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry, self._net().apply(params, rng, batch, is_training)

    def _net(self):
        names = {pattern: axes for pattern, axes in NAMES.items() if pattern not in self.unnamed}
        return hk.transform(logical.named(self._loss, names))

    def _loss(self, batch, is_training=True):
        tokens = hk.Embed(self.vocab_size, WIDTH, name="embed")(batch["inputs"])
        positions = hk.get_parameter("positions", [LENGTH, WIDTH], init=hk.initializers.TruncatedNormal(0.1))
        x = (tokens + positions).astype(self.dtype)
        side = {k: batch[k] for k in ("targets", "weights")} | {"rows": random_bits.row_ids(batch)}
        layers = layer_stack(
            lambda x, side: self._block(x, side, is_training), LAYERS, tail=haiku_tail(self._head, x, side)
        )
        return layers(x, side)

    def _block(self, x, side, is_training):
        attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=INIT, name="attn")
        causal = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
        h = layer_norm("ln_1", x)
        x = x + self._dropout(attention(h, h, h, mask=causal), side, is_training)
        h = hk.Linear(4 * WIDTH, w_init=INIT, name="up")(layer_norm("ln_2", x))
        return x + self._dropout(hk.Linear(WIDTH, w_init=INIT, name="down")(jax.nn.gelu(h)), side, is_training)

    def _dropout(self, x, side, is_training):
        if not is_training:
            return x
        if self.dropout == "stock":
            return hk.dropout(hk.next_rng_key(), 0.1, x)
        return random_bits.dropout(hk.next_rng_key(), 0.1, x, side["rows"])

    def _head(self, x, side):
        logits = hk.Linear(self.vocab_size, with_bias=False, name="unembed")(layer_norm("ln_f", x))
        return losses.cross_entropy(logits, side["targets"], side["weights"], vocab_size=self.vocab_size)


def batches():
    return random_batches(VOCAB, steps=2)


def program(tables, slice_name="v4-8", model=GPT(), **options):
    return bind(model, agreement.Example(slice_name, tables), next(batches()), **options)


@pytest.fixture(scope="module")
def one_device():
    return agreement.run(program(strategies.data_parallel(), "v5e-1"), batches())


def pipeline(schedule):
    return strategies.pipeline(stage=2, schedule=schedule)


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (pipeline(schedules.one_f_one_b(num_microbatches=4)), {}),
        pytest.param(strategies.fsdp_tensor(tensor=2), {"accum_steps": 2}, marks=pytest.mark.slow),
        pytest.param(strategies.fsdp(), {}, marks=pytest.mark.slow),
        pytest.param(strategies.fsdp_tensor(tensor=2), {}, marks=pytest.mark.slow),
        pytest.param(pipeline(schedules.gpipe(num_microbatches=4)), {}, marks=pytest.mark.slow),
        pytest.param(pipeline(schedules.circular(num_microbatches=4, repeats=2)), {}, marks=pytest.mark.slow),
        pytest.param(
            strategies.pipeline_fsdp_tensor(stage=2, tensor=2, schedule=schedules.one_f_one_b(num_microbatches=4)),
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1F1B", "fsdp_tensor, accumulated", "fsdp", "fsdp_tensor", "gpipe", "circular", "1F1B, fsdp, tensor"],
)
def test_a_gpt_of_stock_modules_trains_as_on_one_device(tables, options, one_device):
    found = agreement.compare(agreement.run(program(tables, **options), batches()), one_device)
    assert not agreement.exceeding(tables.name, found)


def test_parameters_without_axes_are_all_listed():
    with pytest.raises(ValueError, match="parameters without named axes: ") as error:
        program(strategies.fsdp(), model=GPT(unnamed=("positions", "*/up/w", "tail/unembed/w")))
    shapes = (
        f"positions [{LENGTH}, {WIDTH}]",
        f"layers/up/w [{LAYERS}, {WIDTH}, {4 * WIDTH}]",
        f"tail/unembed/w [{WIDTH}, {VOCAB}]",
    )
    assert all(shape in str(error.value) for shape in shapes)
    assert str(error.value).count("[") == len(shapes)
    assert "logical.named(fn, {" in str(error.value)


@pytest.mark.parametrize("options", [{"accum_steps": 2}, {}], ids=["accumulation", "pipeline"])
def test_stock_dropout_is_refused_with_microbatches_and_a_replacement_is_named(options):
    tables = strategies.fsdp() if options else pipeline(schedules.gpipe(num_microbatches=2))
    with pytest.raises(
        ValueError, match=r"In place of hk\.dropout.*:\n  x = core\.random_bits\.dropout\(key, rate, x, rows"
    ):
        program(tables, model=GPT(dropout="stock"), **options)


def test_stacked_parameters_are_stored_wide_described_and_computed_narrow():
    bound = program(strategies.fsdp_tensor(tensor=2), model=GPT(dtype="bfloat16"))
    state = bound.abstract_state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    up = state.params["layers/up"]["w"]
    assert up.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert bound.param_specs["layers/up"]["w"] == ParamSpec(("layers", "embed", "mlp"), kind="matrix", stacked=1)
    assert bound.param_specs["layers/ln_1"]["offset"].kind == "norm"
    assert bound.param_specs["tail/unembed"]["w"].kind == "embedding"
    with bound.partitioner.tracing():
        text = str(jax.make_jaxpr(bound.jitted_train_step)(state, bound.abstract_batch))
    narrow = f"bf16[{WIDTH},{4 * WIDTH}] = sharding_constraint"
    assert narrow in text.replace("  ", " ")
