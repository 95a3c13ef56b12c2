"""A pipeline changes no number: losses, gradients and trained parameters equal one device's, in float32."""

import dataclasses

import jax
import numpy as np
import pytest

from core import optimizers, slices
from launch.agreement import random_batches
from models import transformer
from parallel import partitioner, strategies
from parallel.agreement import Example, difference
from parallel.pipeline import schedules

MODEL = transformer.Transformer(
    vocab_size=203, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32"
)
STEPS = 3
ONE_DEVICE = Example("v5e-1", strategies.data_parallel())
BATCHES = list(random_batches(MODEL.vocab_size, steps=STEPS))  # 16 packed rows, uneven over rows and microbatches


def example(slice_name, make, schedule, **degrees):
    """Bubbles compute on NaN: had a number anything to do with them, it would be NaN too."""
    return Example(slice_name, make(schedule=dataclasses.replace(schedule, bubble_input=float("nan")), **degrees))


def gpipe(microbatches, **options):
    return schedules.gpipe(num_microbatches=microbatches, **options)


def one_f_one_b(microbatches, **options):
    return schedules.one_f_one_b(num_microbatches=microbatches, **options)


CASES = {
    "gpipe, S 4, M 2": example("v4-8", strategies.pipeline, gpipe(2), stage=4),
    "gpipe, S 2, M 4, fsdp": example("v4-8", strategies.pipeline_fsdp, gpipe(4), stage=2),
    "gpipe, S 2, M 2, fsdp, tensor, by stage": example(
        "v4-16", strategies.pipeline_fsdp_tensor, gpipe(2, save="stage"), stage=2, tensor=2
    ),
    "circular, S 2, R 2, M 4, fsdp": example(
        "v4-8", strategies.pipeline_fsdp, schedules.circular(num_microbatches=4, repeats=2), stage=2
    ),
    "1F1B, S 4, M 8": example("v4-8", strategies.pipeline, one_f_one_b(8), stage=4),
    "1F1B, S 2, M 2, fsdp, tensor": example(
        "v4-16", strategies.pipeline_fsdp_tensor, one_f_one_b(2), stage=2, tensor=2
    ),
    "1F1B, S 4, M 2, by stage": example("v4-8", strategies.pipeline, one_f_one_b(2, save="stage"), stage=4),
    "gpipe across slices": example("2xv4-8", strategies.pipeline_data, gpipe(4), slices=2),
    "gpipe, S 4, M 4, fsdp": example("v4-32", strategies.pipeline_fsdp, gpipe(4), stage=4),
    "gpipe, S 4, M 16": example("v4-8", strategies.pipeline, gpipe(16), stage=4),
}
QUICK = (
    "gpipe, S 4, M 2",
    "gpipe, S 2, M 2, fsdp, tensor, by stage",
    "circular, S 2, R 2, M 4, fsdp",
    "1F1B, S 4, M 8",
    "1F1B, S 2, M 2, fsdp, tensor",
)


def trained(case, model=MODEL, fresh=None, **options):
    """The state before and behind three steps, and their losses."""
    # eps: an update is a smooth function of gradients, else one that is nearly 0 would be of the size of the rate
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(3e-3), eps=1e-3)
    spec = {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in BATCHES[0].items()}
    bound = partitioner.Partitioner(case.strategy, slice=slices.get(case.slice), devices=jax.devices())
    program = bound.program(model, optimizer, spec, seed=7, **options)
    state = program.init() if fresh is None else jax.device_put(fresh, program.state_shardings)
    fresh, losses = jax.device_get(state), []
    for batch in BATCHES:
        state, metrics = program.train_step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
    return fresh, jax.device_get(state), np.asarray(losses)


@pytest.fixture(scope="module")
def one_device():
    return trained(ONE_DEVICE)


@pytest.mark.covers("M12")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES])
def test_numbers_are_those_of_one_device(name, one_device):
    fresh, want, want_losses = one_device
    _, state, losses = trained(CASES[name], fresh=fresh)
    np.testing.assert_allclose(losses, want_losses, atol=5e-6)
    moments = difference(state.opt_state, want.opt_state)  # a tenth of the gradients, summed over steps
    assert moments.absolute <= 1e-7, moments
    assert difference(state.params, want.params).absolute <= 1e-6


@pytest.mark.parametrize("name", ["gpipe, S 4, M 2", "1F1B, S 4, M 8"])
def test_a_prompt_of_one_row_has_the_logits_of_one_device(name):
    """Whether or not its rows divide into microbatches."""
    params = MODEL.init(jax.random.key(1), BATCHES[0])
    case = CASES[name]
    bound = partitioner.Partitioner(case.strategy, slice=slices.get(case.slice), devices=jax.devices())
    for rows in (1, 8):
        batch = {k: a[:rows] for k, a in BATCHES[0].items()}
        with bound.tracing():
            found = jax.device_get(jax.jit(MODEL.logits)(params, batch))
        np.testing.assert_allclose(found, jax.jit(MODEL.logits)(params, batch), atol=1e-5)
