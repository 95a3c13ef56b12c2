"""The GPT of stock Haiku modules (tests/outside/gpt.py) under pipelines and microbatches, and what is refused."""

import dataclasses

import gpt
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from core.parameters import ParamSpec
from models.agreement_subjects import random_batches
from parallel import strategies
from parallel.pipeline import schedules
from parallel.verify import agreement
from tests.lab.subjects import bind

VOCAB, LENGTH, WIDTH, LAYERS = 64, 24, 16, 4
MODEL = gpt.GPT(VOCAB, LENGTH, LAYERS, embed_dim=WIDTH)


def batches():
    return random_batches(VOCAB, steps=2)


def program(tables, slice_name="v4-8", model=MODEL, **options):
    return bind(model, agreement.Example(slice_name, tables), next(batches()), **options)


@pytest.fixture(scope="module")
def one_device():
    return agreement.run(program(strategies.data_parallel(), "v5e-1"), batches())


def pipeline(schedule):
    return strategies.pipeline(stage=2, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (strategies.fsdp_tensor(tensor=2), {"accum_steps": 2}),
        (pipeline(schedules.gpipe(num_microbatches=4)), {}),
        (pipeline(schedules.circular(num_microbatches=4, repeats=2)), {}),
        (
            strategies.pipeline_fsdp_tensor(stage=2, tensor=2, schedule=schedules.one_f_one_b(num_microbatches=4)),
            {},
        ),
    ],
    ids=["fsdp_tensor, accumulated", "gpipe", "circular", "1F1B, fsdp, tensor"],
)
def test_a_gpt_of_stock_modules_trains_as_on_one_device(tables, options, one_device):
    found = agreement.compare(agreement.run(program(tables, **options), batches()), one_device)
    assert not agreement.exceeding(tables.name, found)


class Unnamed(gpt.GPT):
    names = {k: v for k, v in gpt.NAMES.items() if k not in ("positions/*", "*/up/w", "*/unembed/w")}  # noqa: RUF012


def test_parameters_without_axes_are_all_listed():
    with pytest.raises(ValueError, match="parameters without named axes: ") as error:
        program(strategies.fsdp(), model=Unnamed(VOCAB, LENGTH, LAYERS, embed_dim=WIDTH))
    shapes = (
        f"positions/embeddings [{LENGTH}, {WIDTH}]",
        f"layers/up/w [{LAYERS}, {WIDTH}, {4 * WIDTH}]",
        f"tail/unembed/w [{WIDTH}, {VOCAB}]",
    )
    assert all(shape in str(error.value) for shape in shapes)
    assert str(error.value).count("[") == len(shapes)
    assert "logical.named(fn, {" in str(error.value)


@pytest.mark.parametrize("options", [{"accum_steps": 2}, {}], ids=["accumulation", "pipeline"])
def test_stock_dropout_is_refused_with_its_replacement_where_there_are_microbatches(options, monkeypatch):
    monkeypatch.setattr(gpt.random_bits, "dropout", lambda key, rate, x, rows: hk.dropout(key, rate, x))
    tables = strategies.fsdp() if options else pipeline(schedules.gpipe(num_microbatches=2))
    with pytest.raises(
        ValueError, match=r"In place of hk\.dropout.*:\n  x = core\.random_bits\.dropout\(key, rate, x, rows"
    ):
        program(tables, **options)


def test_stacked_parameters_are_stored_wide_described_and_computed_narrow():
    bound = program(strategies.fsdp_tensor(tensor=2), model=dataclasses.replace(MODEL, dtype="bfloat16"))
    state = bound.abstract_state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    up = state.params["layers/up"]["w"]
    assert up.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert bound.param_specs["layers/up"]["w"] == ParamSpec(("layers", "embed", "mlp"), kind="matrix", stacked=1)
    assert bound.param_specs["layers/norm_1"]["offset"].kind == "norm"
    assert bound.param_specs["tail/unembed"]["w"].kind == "embedding"
    with bound.partitioner.tracing():
        text = str(jax.make_jaxpr(bound.jitted_train_step)(state, bound.abstract_batch))
    narrow = f"bf16[{WIDTH},{4 * WIDTH}] = sharding_constraint"
    assert narrow in text.replace("  ", " ")
