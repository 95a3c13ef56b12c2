"""A pipeline changes no number: losses, gradients and trained parameters equal one device's, in float32."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from core import optimizers, slices
from core.batches import Field
from models.agreement_subjects import random_batches
from models.decoder import transformer
from models.decoder.transformer import REMAT
from parallel import partitioner, strategies
from parallel.pipeline import schedules
from parallel.verify.agreement import Example, difference

MODEL = transformer.Transformer(
    vocab_size=203, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32"
)
DEEP = dataclasses.replace(MODEL, num_layers=8)  # for four stages, twice around
STEPS = 3
ONE_DEVICE = Example("v5e-1", strategies.data_parallel())
MAKE = {
    "gpipe": schedules.gpipe,
    "circular": functools.partial(schedules.circular, repeats=2),
    "1F1B": schedules.one_f_one_b,
    "interleaved": functools.partial(schedules.interleaved, repeats=2),
    "zero-bubble": schedules.zero_bubble,
    "zero-bubble, twice": functools.partial(schedules.zero_bubble, repeats=2),
}


class Case(NamedTuple):
    """One pipeline; M is `times` S."""

    schedule: str
    stages: int
    times: int
    fsdp: int
    tensor: int
    save: str = "layers"
    remat: str = "none"

    @property
    def rows(self):
        """Of the smallest batch that divides, and no fewer than 16."""
        return max(16, self.stages * self.times * self.fsdp)

    @property
    def model(self):
        is_deep = self.stages == 4 and "repeats" in getattr(MAKE[self.schedule], "keywords", ())
        return dataclasses.replace(DEEP if is_deep else MODEL, remat=self.remat)

    @property
    def example(self):
        """Bubbles compute on NaN: had a number anything to do with them, it would be NaN too."""
        schedule = MAKE[self.schedule](num_microbatches=self.stages * self.times)
        schedule = dataclasses.replace(schedule, save=self.save, bubble_input=float("nan"))
        slice_ = {4: "v4-8", 8: "v4-16", 16: "v4-32"}[max(4, self.stages * self.fsdp * self.tensor)]
        if self.tensor > 1:
            make = functools.partial(strategies.pipeline_fsdp_tensor, tensor=self.tensor)
        else:
            make = strategies.pipeline if self.fsdp == 1 else strategies.pipeline_fsdp
        return Example(slice_, make(stage=self.stages, schedule=schedule))


COLUMNS = (tuple(MAKE), (2, 4), (1, 2, 4), (1, 2), (1, 2))
# Any two values of two different columns meet in one of these.
PAIRWISE = [
    Case("gpipe", 4, 1, 1, 1),
    Case("gpipe", 2, 2, 2, 2),
    Case("gpipe", 2, 4, 1, 2),
    Case("circular", 2, 1, 2, 1),
    Case("circular", 4, 2, 1, 2),
    Case("circular", 2, 4, 2, 1),
    Case("1F1B", 2, 1, 1, 2),
    Case("1F1B", 4, 2, 1, 1),
    Case("1F1B", 4, 4, 2, 1),
    Case("interleaved", 2, 2, 1, 2),
    Case("interleaved", 2, 4, 2, 1),
    Case("interleaved", 4, 1, 2, 1),
    Case("zero-bubble", 2, 1, 2, 1),
    Case("zero-bubble", 2, 4, 1, 1),
    Case("zero-bubble", 4, 2, 1, 2),
    Case("zero-bubble, twice", 2, 2, 2, 1),
    Case("zero-bubble, twice", 2, 4, 1, 2),
    Case("zero-bubble, twice", 4, 1, 1, 1),
]
# Every schedule by stages and microbatches; how a stage is sharded is another subject.
EACH_SCHEDULE = [Case(*values, 1, 1) for values in itertools.product(*COLUMNS[:3])]
# Zero-bubble has three passes; test_layer_outputs.py and test_pipelines_draw.py have quick circular pipelines.
QUICK = [Case("zero-bubble", 4, 1, 1, 2, remat="projections")]
ALSO = [Case("circular", 4, 2, 1, 2, remat="attention"), Case("zero-bubble", 2, 2, 1, 1, remat="projections")]
BY_STAGE = [Case(name, 2, 2, 2, 1, save="stage", remat="attention") for name in MAKE if not name.startswith("zero")]
BY_REMAT = [Case(name, 2, 2, 1, 1, remat=remat) for name in MAKE for remat in REMAT]


def label(case):
    by = f"{case.schedule}, S {case.stages}, M {case.stages * case.times}"
    return (
        by
        + ", fsdp" * (case.fsdp > 1)
        + ", tensor" * (case.tensor > 1)
        + ", by stage" * (case.save == "stage")
        + f", {case.remat}"
    )


def batches(rows):
    """Packed rows, uneven over rows and microbatches."""
    return list(random_batches(MODEL.vocab_size, steps=STEPS, rows=rows))


def program_of(example, model, batch, **options):
    # eps: an update is a smooth function of gradients, else one that is nearly 0 would be of the size of the rate
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(3e-3), eps=1e-3)
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in batch.items()}
    bound = partitioner.Partitioner(example.strategy, slice=slices.get(example.slice), devices=jax.devices())
    return bound.program(model, optimizer, spec, seed=7, **options)


def trained(example, model, rows, fresh=None):
    """The state before and behind three steps, what they measured, and what an evaluation does then."""
    program = program_of(example, model, batches(rows)[0])
    state = program.init() if fresh is None else jax.device_put(fresh, program.state_shardings)
    fresh, measured = jax.device_get(state), []
    for batch in batches(rows):
        state, metrics = program.train_step(state, program.put(batch))
        measured.append(jax.device_get(metrics))
    evaluated = jax.device_get(program.eval_step(state, program.put(batches(rows)[0])))
    return fresh, jax.device_get(state), measured, evaluated


@pytest.fixture(scope="module")
def one_device():
    return functools.cache(lambda model, rows: trained(ONE_DEVICE, model, rows))


def quick_or_slow():
    """The quick case, then all others."""
    slow = [case for case in (*ALSO, *PAIRWISE, *EACH_SCHEDULE, *BY_STAGE, *BY_REMAT) if case not in QUICK]
    marked = [pytest.param(case, id=label(case), marks=pytest.mark.slow) for case in dict.fromkeys(slow)]
    return [*(pytest.param(case, id=label(case)) for case in QUICK), *marked]


@pytest.mark.covers("M12")
@pytest.mark.parametrize("case", quick_or_slow())
def test_numbers_are_those_of_one_device(case, one_device):
    whole = dataclasses.replace(case.model, remat="none")
    same_numbers(case.example, case.model, case.rows, one_device(whole, case.rows))


@pytest.mark.covers("M12")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (strategies.pipeline_data, schedules.gpipe(num_microbatches=4)),
        (functools.partial(strategies.pipeline_fsdp_tensor, stage=1, tensor=2), schedules.gpipe(num_microbatches=2)),
        (
            functools.partial(strategies.pipeline_fsdp_tensor, stage=1, tensor=2),
            schedules.interleaved(num_microbatches=4, repeats=2),
        ),
    ],
    ids=["data", "tensor", "tensor, interleaved"],
)
def test_numbers_across_slices_are_those_of_one_device(make, schedule, one_device):
    across = Example("2xv4-8", make(slices=2, schedule=dataclasses.replace(schedule, bubble_input=float("nan"))))
    same_numbers(across, MODEL, 16, one_device(MODEL, 16))


def same_numbers(example, model, rows, wanted):
    fresh, want, want_measured, want_evaluated = wanted
    _, state, measured, evaluated = trained(example, model, rows, fresh=fresh)
    for a, b in zip((*measured, evaluated), (*want_measured, want_evaluated), strict=True):
        assert a.keys() == b.keys()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=5e-6), dict(a), dict(b))
    moments = difference(state.opt_state, want.opt_state)  # a tenth of the gradients, summed over steps
    assert moments.absolute <= 1e-7, moments
    assert difference(state.params, want.params).absolute <= 1e-6


def test_any_two_values_of_two_columns_meet_in_a_case():
    names = [field for field in Case._fields if field not in ("save", "remat")]
    for (a, of_a), (b, of_b) in itertools.combinations(zip(names, COLUMNS, strict=True), 2):
        pairs = set(itertools.product(of_a, of_b))
        assert pairs == {(getattr(case, a), getattr(case, b)) for case in PAIRWISE}, (a, b)


@pytest.mark.slow
def test_a_scaled_loss_has_scaled_gradients():
    """A rule that has its gradients before the loss is used must heed what is done to the loss."""
    program = program_of(Case("1F1B", 2, 1, 2, 1).example, MODEL, batches(16)[0])
    params, batch = jax.device_get(program.init().params), batches(16)[0]

    def gradients(scale):
        def loss(params):
            return scale * MODEL.loss(params, (), jax.random.key(0), batch)[1].loss_sum

        with program.partitioner.tracing():
            return jax.device_get(jax.jit(jax.grad(loss))(params))

    whole, half = gradients(1.0), gradients(0.5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(0.5 * a, b, rtol=1e-6, atol=1e-7), whole, half)


@pytest.mark.parametrize("case", [Case("gpipe", 4, 1, 1, 1), Case("1F1B", 4, 2, 1, 1)], ids=label)
@pytest.mark.slow
def test_a_prompt_of_one_row_has_the_logits_of_one_device(case):
    """Whether or not its rows divide into microbatches."""
    whole, example = batches(16)[0], case.example
    params = MODEL.init(jax.random.key(1), whole)
    bound = partitioner.Partitioner(example.strategy, slice=slices.get(example.slice), devices=jax.devices())
    for rows in (1, 8):
        batch = {k: a[:rows] for k, a in whole.items()}
        with bound.tracing():
            found = jax.device_get(jax.jit(MODEL.logits)(params, batch))
        np.testing.assert_allclose(found, jax.jit(MODEL.logits)(params, batch), atol=1e-5)
