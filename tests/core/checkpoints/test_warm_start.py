"""Runs that start from the parameters of another run."""

import functools
import shutil

import jax
import numpy as np
import pytest

from core import optimizers, slices
from core.checkpoints import comparing, inspection, layer_map, reading, steps, warm_start
from core.checkpoints.arrays import Arrays
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.files import paths
from models.decoder.transformer import Transformer
from models.lora import Lora
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules
from tasks import streams

LAYOUTS = {
    "fsdp": strategies.fsdp(),
    "fsdp_tensor": strategies.fsdp_tensor(tensor=2),
    "pipeline_fsdp": strategies.pipeline_fsdp(stage=4, schedule=schedules.gpipe(num_microbatches=4)),
}


@functools.cache
def program_of(layout, *, seed=0, optimizer=optimizers.adamw, frozen=(), **changes):
    sizes = {"num_layers": 2, "embed_dim": 16, "mlp_dim": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}
    model = Transformer(**{**sizes, "vocab_multiple": 8, "dtype": "float32", **changes})
    at = Partitioner(LAYOUTS[layout], slice=slices.get("v4-16"), devices=jax.devices()[:8])
    rule = optimizer(learning_rate=optimizers.constant(1e-2))
    return at.program(model, rule, streams.batch_spec(8, length=16), seed=seed, frozen=frozen)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of one step under fsdp, and its folder."""
    program = program_of("fsdp")
    state = program.init()._replace(step=jax.device_put(np.int32(7), program.state_shardings.step))
    run = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(7, state=state, data={}, meta={})
    checkpoints.close()
    return jax.device_get(state.params), str(run)


def started(program, run, patterns=("*",), renames=None):
    source = warm_start.SavedParameters(steps.find(run)).renamed(renames or {})
    abstract, specs = program.abstract_state.params, program.param_specs
    warm_start.require_fit(source, abstract, specs, patterns)
    return program.init_from(warm_start.load(source, program.init_params, abstract, specs, patterns))


def test_another_strategy_and_optimizer_start_with_the_same_parameters(saved):
    params, run = saved
    program = program_of("fsdp_tensor", seed=5, optimizer=optimizers.lion)
    state = started(program, run)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    assert jax.tree.map(lambda a: a.sharding, state) == program.state_shardings
    assert int(state.step) == 0
    assert not any(np.any(a) for a in jax.tree.leaves(jax.device_get(state.opt_state)))


def test_patterns_choose_what_is_taken_and_the_rest_starts_from_the_seed(saved):
    params, run = saved
    program = program_of("fsdp", seed=5)
    fresh, state = jax.device_get(program.init().params), jax.device_get(started(program, run, ("layers/*",)))
    jax.tree.map(np.testing.assert_array_equal, state.params["layers/block"], params["layers/block"])
    jax.tree.map(np.testing.assert_array_equal, state.params["~"], fresh["~"])


def test_parameters_are_found_under_other_names(saved, tmp_path):
    """Each is read into the shards of the layout, under the name that the model has for it."""
    params, _ = saved
    other = {
        "decoder/layers": params["layers/block"],
        "decoder/~/io": {f"old_{name}": leaf for name, leaf in params["~"].items()},
    }
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(3, state={"params": jax.tree.map(jax.numpy.asarray, other)}, data={}, meta={})
    checkpoints.close()
    program = program_of("fsdp_tensor", seed=5, optimizer=optimizers.lion)
    renames = {"decoder/layers/*": "layers/block/*"}
    with pytest.raises(UserError) as caught:
        started(program, str(tmp_path), renames=renames)
    assert "embedding: not in the checkpoint, expected float32[64, 16]" in str(caught.value)
    assert "decoder/io/old_embedding: float32[64, 16] in the checkpoint, not expected" in str(caught.value)
    assert "layers" not in str(caught.value).splitlines()[1]
    state = started(program, str(tmp_path), renames={**renames, "decoder/io/old_*": "*"})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    assert jax.tree.map(lambda a: a.sharding, state) == program.state_shardings


@pytest.mark.parametrize(
    ("layers", "layout", "in_memory"),
    [
        ((0, 0, 1, 1), "fsdp_tensor", False),
        pytest.param((1, None, 0, None), "pipeline_fsdp", False, marks=pytest.mark.slow),
        pytest.param((1,), "fsdp", True, marks=pytest.mark.slow),
        ((None, 1, 0), "fsdp", True),
    ],
)
def test_another_depth_starts_from_the_layers_that_are_named(saved, layers, layout, in_memory):
    params, run = saved
    program = program_of(layout, seed=5, num_layers=len(layers))
    fresh = jax.device_get(program.init_params()) if None in layers else params
    source = warm_start.GivenParameters(params) if in_memory else warm_start.SavedParameters(steps.find(run))
    shapes, specs = program.abstract_state.params, program.param_specs
    mapping = layer_map.of({"layers/*": layers}, source, shapes, specs)
    warm_start.require_fit(source, shapes, specs, ("*",), layers=mapping)
    state = program.init_from(warm_start.load(source, program.init_params, shapes, specs, ("*",), layers=mapping))
    assert jax.tree.map(lambda a: a.sharding, state) == program.state_shardings
    found = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, found["~"], params["~"])
    for name, leaf in found["layers/block"].items():
        for layer, taken in enumerate(layers):
            whole, place = (fresh, layer) if taken is None else (params, taken)
            np.testing.assert_array_equal(leaf[layer], whole["layers/block"][name][place])


def test_frozen_layers_that_a_run_leaves_out_are_read_for_another_depth(saved, adapted):
    (params, _), (_, run) = saved, adapted
    source = warm_start.SavedParameters(
        steps.find(f"{run}@3"), open_source=lambda left_out: warm_start.SavedParameters(steps.find(left_out.source))
    )
    program = program_of("fsdp", num_layers=3)
    shapes, specs = program.abstract_state.params, program.param_specs
    mapping = layer_map.of({"layers/*": (1, 0, 1)}, source, shapes, specs)
    source.require_source(mapping.in_source(shapes), specs)
    found = warm_start.load(source, program.init_params, shapes, specs, ("*",), layers=mapping)
    for name, leaf in found["layers/block"].items():
        stored = params["layers/block"][name].astype(jax.numpy.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(leaf, stored[np.array([1, 0, 1])])


def test_parameters_in_memory_are_copied_renamed_and_compared(saved):
    params, _ = saved
    program = program_of("fsdp", seed=5)
    shapes, specs = program.abstract_state.params, program.param_specs
    mine = {"decoder/layers": params["layers/block"], "~": jax.tree.map(jax.numpy.asarray, params["~"])}
    source = warm_start.GivenParameters(mine)
    with pytest.raises(UserError) as caught:
        warm_start.require_fit(source, shapes, specs, ("*",))
    assert "layers/block/up: not in memory, expected float32[2, 16, 16]" in str(caught.value)
    source = source.renamed({"decoder/layers/*": "layers/block/*"})
    state = program.init_from(warm_start.load(source, program.init_params, shapes, specs, ("*",)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    assert not any(leaf.is_deleted() for leaf in mine["~"].values())
    with pytest.raises(UserError, match="init_from is of type list"):
        warm_start.GivenParameters([np.zeros(3)])


def test_frozen_parameters_are_read_in_the_dtype_that_they_are_stored_in(saved):
    params, run = saved
    program = program_of("fsdp", seed=5, frozen=("layers/*",))
    state = jax.device_get(started(program, run).params)
    jax.tree.map(np.testing.assert_array_equal, state["~"], params["~"])
    for name, leaf in state["layers/block"].items():
        assert leaf.dtype.name == "bfloat16"
        np.testing.assert_array_equal(leaf, params["layers/block"][name].astype(leaf.dtype))


def copy_with_other_state(saved, folder, change):
    """A copy of the run whose files are valid, but whose arrays differ from the fingerprints in the metadata."""
    params, run = saved
    checkpoints = Checkpoints(folder / "other" / "checkpoints", keep=1)
    checkpoints.save(7, state={"params": jax.tree.map(change, params)}, data={}, meta={})
    checkpoints.close()
    shutil.copytree(run, folder / "run")
    shutil.rmtree(folder / "run/checkpoints/7/state")
    shutil.copytree(folder / "other/checkpoints/7/state", folder / "run/checkpoints/7/state")
    return str(folder / "run")


@pytest.mark.parametrize("most_bytes", [2**28, 1])
def test_parameters_are_compared_in_the_dtype_that_they_are_stored_in(saved, tmp_path, monkeypatch, most_bytes):
    monkeypatch.setattr(warm_start, "_CONVERTED_BYTES", most_bytes)
    program = program_of("fsdp", seed=5, frozen=("layers/*",))
    state = started(program, saved[1])
    assert jax.tree.map(lambda a: a.sharding, state) == program.state_shardings

    def changed_below_the_precision_of_bfloat16(array):
        return jax.numpy.asarray(array) * (1 + 2.0**-20)

    run = copy_with_other_state(saved, tmp_path, changed_below_the_precision_of_bfloat16)
    with pytest.raises(UserError, match=r"damaged checkpoint, step 7 in .*arrays differ from what was saved"):
        started(program, run, ("layers/*",))


def test_a_step_that_the_other_run_removes_while_it_is_read_is_called_removed(saved, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(saved[1], run)
    original = Arrays.placed

    def removed_meanwhile(self, wanted):
        steps.remove(paths.resolve(run) / "checkpoints" / "7")
        return original(self, wanted)

    monkeypatch.setattr(Arrays, "placed", removed_meanwhile)
    with pytest.raises(UserError, match=r"step 7 of .* was removed after it was chosen.*KEEP_CHECKPOINTS"):
        started(program_of("fsdp"), str(run))


def test_an_average_starts_with_the_parameters_that_were_taken(saved):
    params, run = saved

    def averaged(learning_rate):
        return optimizers.averaged(optimizer=optimizers.adamw(learning_rate=learning_rate))

    program = program_of("fsdp", seed=5, optimizer=averaged)
    state = started(program, run)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.opt_state.average), params)


def test_a_pattern_that_only_matches_optional_parameters_that_the_source_lacks_is_refused(saved):
    _, run = saved
    program = program_of("fsdp", lora=Lora(rank=2, alpha=4.0, targets=("query",)))
    source, optional = warm_start.SavedParameters(steps.find(run)), program.model.added_parameters
    shapes, specs = program.abstract_state.params, program.param_specs
    warm_start.require_fit(source, shapes, specs, ("layers/*",), optional=optional)
    with pytest.raises(
        UserError, match=r"INIT_PATTERNS: '\*_lora_a' reads nothing: step 7 of .* has none of .*/query_lora_a;"
    ):
        warm_start.require_fit(source, shapes, specs, ("layers/*", "*_lora_a"), optional=optional)


def test_parameters_that_do_not_fit_are_listed_before_any_is_read(saved):
    _, run = saved
    with pytest.raises(UserError) as caught:
        started(program_of("fsdp", embed_dim=32, tied=True), run)
    said = str(caught.value)
    assert "step 7 of" in said
    assert "unembedding: float32[16, 64] in the checkpoint, not expected" in said
    assert "block/query: float32[2, 16, 4, 4] in the checkpoint, expected float32[2, 32, 4, 8]" in said
    assert "INIT_PATTERNS chooses" in said
    with pytest.raises(UserError, match=r"INIT_PATTERNS = .*no parameter matches 'head/\*'"):
        started(program_of("fsdp"), run, ("head/*",))


def test_parameters_of_another_step_are_refused(saved, tmp_path):
    run = copy_with_other_state(saved, tmp_path, lambda a: jax.numpy.asarray(a) + 1)
    with pytest.raises(
        UserError, match=r"damaged checkpoint, step 7 in .*: 12 of 12 arrays differ from what was saved"
    ):
        started(program_of("fsdp"), run)


FROZEN = ("layers/*",)


@pytest.fixture(scope="module")
def adapted(saved, tmp_path_factory):
    """A run whose layers are frozen and came from the run `saved`; its state, and its folder."""
    _, base = saved
    program = program_of("fsdp", seed=5, frozen=FROZEN)
    state = started(program, base)
    names = reading.by_name({"params": program.param_specs})
    frozen = [name for name, spec in names.items() if not spec.trainable]
    run = tmp_path_factory.mktemp("adapted")
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    checkpoints.left_out = steps.LeftOut(base, f"{base}@7", {}, frozen)
    checkpoints.save(3, state=state, data={}, meta={})
    checkpoints.close()
    return state, run


def origin(program, source):
    return warm_start.Origin(lambda left_out: warm_start.SavedParameters(steps.find(source)), program.param_specs)


def restored(program, run, source):
    checkpoints = Checkpoints(run / "checkpoints", keep=2, origin=origin(program, source))
    state, _, _ = checkpoints.restore(3, program.abstract_state)
    checkpoints.save(4, state=state, data={}, meta={})
    checkpoints.close()
    return state


def test_checkpoints_leave_out_only_what_is_still_frozen(saved, adapted):
    (_, base), (_, run) = saved, adapted
    left_out = steps.read(steps.find(f"{run}@3")).left_out
    same, none, some = (program_of("fsdp", seed=5, frozen=names) for names in (FROZEN, (), ("layers/*/query",)))
    assert origin(same, base).still_frozen(left_out) == left_out
    assert origin(none, base).still_frozen(left_out) is None
    assert origin(some, base).still_frozen(left_out).arrays == [name for name in left_out.arrays if "query" in name]


@pytest.mark.covers("N07")
def test_frozen_parameters_are_left_out_and_read_from_their_source_again(saved, adapted):
    (_, base), (state, run) = saved, adapted
    program = program_of("fsdp_tensor", seed=9, frozen=FROZEN)
    again = restored(program, run, base)
    assert jax.tree.map(lambda a: a.sharding, again) == program.state_shardings
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    whole, frozen = (
        reading.by_name(tree) for tree in (state, {"params": {"layers/block": state.params["layers/block"]}})
    )
    first, second = (steps.read(steps.find(f"{run}@{step}")) for step in (3, 4))
    assert first.content == second.content == reading.describe(state)
    assert first.left_out == second.left_out
    assert first.saved.keys() == whole.keys() - frozen.keys()
    frozen_bytes = sum(leaf.nbytes for leaf in frozen.values())
    stored_bytes = sum(leaf.nbytes for leaf in whole.values()) - frozen_bytes
    row = inspection.table(run / "checkpoints")[-1]
    assert (row[3], row[-1]) == (str(len(first.saved)), f"complete, without {len(frozen)} frozen arrays of {base}@7")
    found = inspection.verify(steps.find(f"{run}@4"))
    assert (found.damaged, found.read_bytes, found.arrays) == ((), stored_bytes, len(whole) - len(frozen))
    assert found.note == f"{len(frozen)} frozen arrays not read, which are in {base}@7"
    arrays = Arrays(steps.find(f"{run}@4"))
    assert {name for name in whole if name in arrays} == first.saved.keys()
    assert list(comparing.compare(steps.find(f"{run}@3"), steps.find(f"{run}@4"))) == []


def test_a_run_starts_from_one_that_leaves_parameters_out(saved, adapted):
    (_, base), (state, run) = saved, adapted
    source = warm_start.SavedParameters(
        steps.find(f"{run}@3"), open_source=lambda left_out: warm_start.SavedParameters(steps.find(left_out.source))
    )
    program = program_of("fsdp")
    found = source.load(program.abstract_state.params, program.param_specs, progress=lambda *_: None)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(found),
        jax.tree.map(lambda a: a.astype(np.float32), jax.device_get(state.params)),
    )
    with pytest.raises(UserError, match=f"leaves out parameters, which are in {base}@7"):
        warm_start.SavedParameters(steps.find(f"{run}@3")).load(
            program.abstract_state.params, program.param_specs, progress=lambda *_: None
        )


def test_another_source_of_frozen_parameters_is_refused(saved, adapted, tmp_path):
    (_, base), (state, run) = saved, adapted
    program = program_of("fsdp", seed=5, frozen=FROZEN)
    other = jax.tree.map(lambda a: a + 0, state.params)
    other["layers/block"]["query"] = other["layers/block"]["query"].at[1, 2, 3].add(0.5)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(7, state={"params": other}, data={}, meta={})
    checkpoints.close()
    content = steps.read(steps.find(f"{run}@3")).content
    recorded = {name: entry for name, entry in content.items() if name.startswith("params/layers/block/")}
    changed = {**recorded, "params/layers/block/query": reading.describe({"q": other["layers/block"]["query"]})["q"]}
    with pytest.raises(UserError) as caught:
        restored(program, run, str(tmp_path))
    said = str(caught.value)
    assert f"step 7 of {tmp_path}/checkpoints is not the source of the checkpoint's frozen parameters: 1 of 9" in said
    assert (
        f"(layers/block/query). The hash of those read is {steps.content_hash(recorded)} in the checkpoint and" in said
    )
    assert f"{steps.content_hash(changed)} there" in said
    assert f"from {base}@7; put it back, unchanged; commands that read this run itself also accept --gin" in said
    del other["layers/block"]["up"]
    checkpoints = Checkpoints(tmp_path / "without" / "checkpoints", keep=1)
    checkpoints.save(7, state={"params": other}, data={}, meta={})
    checkpoints.close()
    with pytest.raises(
        UserError, match=r"does not have the parameters that .*\n  layers/block/up: not in the checkpoint"
    ):
        restored(program, run, str(tmp_path / "without"))
    with pytest.raises(UserError, match="does not contain its 9 frozen parameters, which the run read from"):
        Checkpoints(run / "checkpoints", keep=2).restore(3, program.abstract_state)
