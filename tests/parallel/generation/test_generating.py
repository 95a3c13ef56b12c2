"""Generation from a cache: equal to full forward passes, to transformers, and the same under every layout."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, slices
from core.errors import UserError
from models import pretrained
from parallel import strategies
from parallel.generation import decoding, generating, layerwise, sampling
from parallel.generation.generating import Generator
from parallel.generation.sampling import GREEDY, Sampling
from parallel.partitioner import Partitioner
from tasks import streams

FAMILIES = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "families"
ADAMW = optimizers.adamw(learning_rate=optimizers.constant(1e-3))
STRATEGIES = {
    "fsdp": strategies.fsdp(),
    "tensor": strategies.mesh3d(data=2, tensor=2),
    "fsdp_tensor": strategies.fsdp_tensor(tensor=2),
    "pipeline": strategies.pipeline(stage=2),
    "sequence_tensor": strategies.sequence_tensor(tensor=2),  # tables that shard positions
}
WITH_WINDOWS = ("gemma2", "gemma3", "mistral")  # of five positions


def generator_of(family, tables=None, **changes):
    model = pretrained.model(str(FAMILIES / family), dtype="float32", vocab_multiple=8, **changes)
    at = Partitioner(tables or strategies.data_parallel(), slice=slices.get("v4-8"), devices=jax.devices()[:4])
    program = at.program(model, ADAMW, streams.batch_spec(32, length=16), seed=0)
    params = model.published(str(FAMILIES / family)).load(program.abstract_state.params, program.param_specs)
    return Generator(program, params)


@functools.cache
def llama2():
    return generator_of("llama2")


@pytest.mark.covers("N13")
@pytest.mark.parametrize(
    "family",
    ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "gemma3", "llama3"))],
)
def test_greedy_continuations_equal_those_of_transformers(family, monkeypatch):
    monkeypatch.setattr(generating, "CHUNK", 4)  # several chunks, the last one not full
    want = np.load(FAMILIES / family / "reference.npz")["greedy"].tolist()
    [found] = generator_of(family).generate([want[:6]], max_tokens=len(want) - 6, sampling=GREEDY)
    assert found.ids == want[6:]
    assert not found.ended


@pytest.mark.covers("N13")
@pytest.mark.parametrize(
    ("family", "calls"),
    [
        pytest.param("gemma3", [(0, 3), (3, 5)], marks=pytest.mark.slow),  # kinds of layers alternate
        ("gpt2", [(0, 1), (1, 2), (2, 3)]),
        pytest.param("qwen3_moe_sparse", [(0, 4), (4, 8)], marks=pytest.mark.slow),  # so do parameters
        pytest.param("deepseek_v3", [(0, 1), (1, 2), (2, 3), (3, 4)], marks=pytest.mark.slow),  # the first two differ
    ],
)
def test_layers_that_run_in_several_calls_give_the_ids_of_transformers(family, calls, monkeypatch):
    monkeypatch.setattr(generating, "CHUNK", 4)
    monkeypatch.setattr(layerwise, "CALL_BYTES", 1)
    want = np.load(FAMILIES / family / "reference.npz")["greedy"].tolist()
    generator = on_one_device(pretrained.model(str(FAMILIES / family), dtype="float32", vocab_multiple=8), family)
    assert isinstance(generator._decoder, layerwise.LayerwiseDecoder)
    assert generator._decoder._calls == calls
    found = generator.generate([want[:6], want[:3]], max_tokens=8, sampling=GREEDY)
    assert found[0].ids == want[6:14]
    [stopped] = generator.generate([want[:6]], max_tokens=8, stop_ids=(want[8],))
    assert (stopped.ids, stopped.ended) == (want[6 : want.index(want[8], 6)], True)


def test_layers_run_in_several_calls_where_all_of_them_would_compile_for_long(monkeypatch):
    def calls(layers, **changes):
        model = dataclasses.replace(pretrained.model(str(FAMILIES / "llama3")), num_layers=layers, **changes)
        at = Partitioner(strategies.data_parallel(), slice=slices.get("v5e-1"), devices=jax.devices()[:1])
        return layerwise._calls(at.program(model, ADAMW, streams.batch_spec(32, length=16), seed=0))

    assert calls(12) == [(0, 12)]
    assert calls(30) == [(0, 12), (12, 24), (24, 30)]
    monkeypatch.setattr(layerwise, "CALL_BYTES", 50_000)  # a layer has 22 kB
    assert calls(7) == [(0, 3), (3, 6), (6, 7)]


UNFIT = {
    ("pipeline", "gemma4_e2b"),  # a pipeline refuses inputs of layers: test_families_agree.py
    ("pipeline", "gemma4_e4b"),
    ("fsdp", "gemma4_e4b"),  # the inputs of its 5 layers, 14 wide each, do not divide over 4 chips
}
EVERY = [
    (strategy, folder.name)
    for strategy in STRATEGIES
    for folder in sorted(FAMILIES.iterdir())
    if folder.is_dir() and (strategy, folder.name) not in UNFIT
]


@pytest.mark.slow  # the quick tests above and below have a family and two layouts
@pytest.mark.parametrize(("strategy", "family"), EVERY)
def test_every_family_under_every_layout(family, strategy):
    want = np.load(FAMILIES / family / "reference.npz")["greedy"].tolist()
    prompts = [want[:6], want[:9], want[:3], want[:6], want[:7]]
    found = generator_of(family, STRATEGIES[strategy]).generate(prompts, max_tokens=8, sampling=GREEDY)
    assert found[0].ids == found[3].ids == want[6:14]
    assert found[1].ids == want[9:17]
    assert found[4].ids == want[7:15]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("fsdp_tensor", marks=pytest.mark.slow)])
def test_several_calls_run_one_program(strategy):
    generator = generator_of("llama2", STRATEGIES[strategy])
    [found] = generator.generate([[4, 8, 15]], max_tokens=decoding.STEPS + 5)
    assert len(found.ids) == decoding.STEPS + 5
    assert generator._decoder._decode._cache_size() == 1


def test_draws_depend_on_seed_and_row_but_not_on_the_layout_the_other_rows_or_the_chunks(monkeypatch):
    how = Sampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01)
    prompts = [[5, 17, 3], [9] * 11, [41, 2], [7]]
    options = {"max_tokens": 7, "sampling": how, "seed": 3}
    alone = generator_of("qwen3")
    want = alone.generate(prompts, **options)
    assert alone.generate(prompts[:1], **options)[0].ids == want[0].ids
    assert [c.ids for c in alone.generate(prompts, **{**options, "seed": 4})] != [c.ids for c in want]
    assert alone.generate(prompts[3:], first_row=3, **options)[0].ids == want[3].ids
    assert alone.generate(prompts[3:], **options)[0].ids != want[3].ids
    monkeypatch.setattr(generating, "CHUNK", 2)
    split = generator_of("qwen3", strategies.fsdp_tensor(tensor=2)).generate(prompts, **options)
    assert [c.ids for c in split] == [c.ids for c in want]
    np.testing.assert_allclose(split[1].log_probabilities, want[1].log_probabilities, rtol=1e-4)


def test_log_probabilities_are_those_of_a_full_pass_and_a_stop_id_ends_its_row():
    generator = llama2()
    [free] = generator.generate([[4, 8, 15]], max_tokens=6)
    seen = []
    first, second = generator.generate(
        [[4, 8, 15], [16]], max_tokens=6, stop_ids=(free.ids[2],), on_tokens=lambda ids: seen.append(ids)
    )
    assert first.ids == free.ids[:2]
    assert first.ended
    assert seen[2][0] is None
    assert [ids[1] for ids in seen if ids[1] is not None] == second.ids
    model, params = generator._program.model, generator._decoder._stacked(generator._params)
    ids = jnp.asarray([[4, 8, 15, *free.ids]])
    batch = {"inputs": ids, "targets": ids, "segment_ids": jnp.ones_like(ids), "weights": jnp.ones(ids.shape)}
    batch["positions"] = jnp.arange(ids.shape[1])[None]
    log_p = np.asarray(jax.nn.log_softmax(jax.jit(model.logits)(params, batch))[0])
    want = [log_p[2 + i, token] for i, token in enumerate(free.ids)]
    np.testing.assert_allclose(free.log_probabilities, want, atol=1e-4)


def test_tokens_that_may_be_drawn():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))

    def kept(**how):
        return (np.asarray(sampling.kept(logits, Sampling(**how)))[0] > -1e29).tolist()

    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.51) == [True, True, False, False]
    assert kept(min_p=0.29) == [True, True, True, False]
    assert kept(top_k=3, top_p=0.8) == [True, True, False, False]
    keys = jax.random.split(jax.random.key(0), 2000)
    draws = jax.vmap(lambda key: sampling.draw(logits, key, jnp.zeros(1, int), jnp.zeros(1, int), Sampling())[0])(keys)
    np.testing.assert_allclose(np.bincount(draws, minlength=4) / 2000, jnp.exp(logits[0]), atol=0.03)


@pytest.mark.covers("N13")
@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "mistral")) for f in WITH_WINDOWS])
def test_windows_in_the_cache_give_the_ids_of_full_passes(family, monkeypatch):
    """Past the end of the window's entries, in several chunks, for rows of different lengths."""
    monkeypatch.setattr(generating, "CHUNK", 4)
    monkeypatch.setattr(generating, "_MULTIPLE", 1)
    generator, prompts = generator_of(family), [[5, 17, 3], [9, 2, 8, 33, 41, 7, 7, 1, 60], [4] * 6]
    model, params = generator._program.model, generator._program.abstract_state.params
    entries = {layer["attention"].keys.shape[2] for layer in jax.eval_shape(lambda: model.empty_cache(4, 64))}
    assert entries == ({5} if family == "mistral" else {5, 64})
    params = model.published(str(FAMILIES / family)).load(params, generator._program.param_specs)
    continued = generator.generate(prompts, max_tokens=12)
    ids = np.zeros((len(prompts), 9 + 12), np.int32)  # ids behind the end of a row change nothing
    for row, prompt, found in zip(ids, prompts, continued, strict=True):
        row[: len(prompt) + 12] = prompt + found.ids
    batch = {name: np.ones_like(ids) for name in ("segment_ids", "weights", "targets")}
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    best = np.argmax(jax.jit(model.logits)(params, {"inputs": ids, "positions": positions, **batch}), axis=-1)
    for row, prompt, found in zip(best, prompts, continued, strict=True):
        assert found.ids == row[len(prompt) - 1 :][:12].tolist()


class Opposite:
    """A wrapper whose most likely token is the least likely one of the model inside."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def logits(self, params, batch):
        return -self.inner.logits(params, batch)


def test_a_wrapper_that_changes_the_logits_is_generated_from(monkeypatch):
    assert wrapped(lambda model: model)._decoder.fixed_length is None
    generator = wrapped(Opposite)
    [found] = generator.generate([[5, 17, 3]], max_tokens=2)
    model, params = generator._program.model, generator._params
    ids = jnp.asarray([[5, 17, 3, *found.ids]])
    batch = {name: jnp.ones_like(ids) for name in ("segment_ids", "weights", "targets")}
    logits = jax.jit(model.inner.logits)(params, {"inputs": ids, "positions": jnp.arange(5)[None], **batch})
    assert found.ids == jnp.argmin(logits[0, 2:4], axis=-1).tolist()


def wrapped(wrapper):
    return on_one_device(wrapper(pretrained.model(str(FAMILIES / "qwen2"), dtype="float32", vocab_multiple=8)), "qwen2")


def on_one_device(model, family):
    at = Partitioner(strategies.data_parallel(), slice=slices.get("v5e-1"), devices=jax.devices()[:1])
    program = at.program(model, ADAMW, streams.batch_spec(32, length=16), seed=0)
    params = model.published(str(FAMILIES / family)).load(program.abstract_state.params, program.param_specs)
    return Generator(program, params)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"quantization": "int8"}, marks=pytest.mark.slow)], ids=["usual", "int8"]
)
def test_a_model_without_a_cache_gives_the_same_ids(changes, monkeypatch):
    want = generator_of("qwen2", **changes).generate([[5, 17, 3], [9]], max_tokens=7)
    asked = decoding.can
    monkeypatch.setattr(decoding, "can", lambda value, a: a.__name__ != "ExtendsCache" and asked(value, a))
    recomputing = generator_of("qwen2", **changes)
    assert isinstance(recomputing._decoder.model, decoding.Recomputing)
    found = recomputing.generate([[5, 17, 3], [9]], max_tokens=7)
    for ours, theirs in zip(found, want, strict=True):
        # A value in the middle of two of int8 is rounded either way, so that a later id may be another one.
        equal = [a == b for a, b in zip(ours.ids, theirs.ids, strict=True)]
        same = equal.index(False) if changes and False in equal else len(equal)
        assert ours.ids[:same] == theirs.ids[:same]
        assert same >= 4
        np.testing.assert_allclose(ours.log_probabilities[:same], theirs.log_probabilities[:same], atol=0.1)
    with pytest.raises(UserError, match="need 17 positions, and the model has 16"):
        recomputing.generate([[5] * 10], max_tokens=7)


def test_ids_above_the_vocabulary_are_never_drawn():
    generator = llama2()
    how = Sampling(temperature=5.0)
    assert max(generator.generate([[4]], max_tokens=12, sampling=how)[0].ids) >= 40
    assert max(generator.generate([[4]], max_tokens=12, sampling=how, num_ids=40)[0].ids) < 40


def test_a_control_without_mixing_generates_without_mixing():
    generator = generator_of("llama2", attention="none")
    alone, after = generator.generate([[7], [3, 9, 7]], max_tokens=3)
    assert alone.ids == after.ids


def test_too_many_positions_and_empty_prompts_are_refused():
    generator = generator_of("gpt2")
    with pytest.raises(
        UserError, match="the prompt, of 25 ids, and 8 new ones need 33 positions, and the model has 30"
    ):
        generator.generate([[1] * 25], max_tokens=8)
    with pytest.raises(UserError, match="prompt 2 of 2 has the id 83, and the model's are 0 to 82"):
        generator.generate([[1], [83]], max_tokens=1)
    with pytest.raises(UserError, match="prompt 2 of 2 is empty"):
        generator.generate([[1], []], max_tokens=1)
