"""Two variants of an experiment: equal ones are reported as equal, and the first difference of others is named."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, slices, stack, step
from core.batches import Field
from core.files import paths
from launch import __main__ as cli
from launch.verify import bisect as command
from models import agreement_subjects, losses
from models.decoder import transformer
from parallel import accumulation, partitioner, strategies
from parallel.verify import first_difference as bisect
from parallel.verify import recording
from parallel.verify.recording import key
from tests.haiku_model import HaikuModel

PLANTED = '''
"""A feed-forward layer that forgets to add up over `tensor`; right wherever that axis is 1."""
import dataclasses

import jax
from jax.sharding import PartitionSpec as P

from models.decoder import layers, transformer


@dataclasses.dataclass(frozen=True)
class Forgetful(layers.Mlp):
    def products(self, decoder, x, side, *, prefix="", width=None):
        of, d, f = layers.Matrices(decoder), decoder.embed_dim, decoder.mlp_dim
        up = of.weight("up", (d, f), ("embed", "mlp"), fan_in=d)
        down = of.weight("down", (f, d), ("mlp", "embed"), fan_in=f)
        hidden = jax.nn.silu(x @ up)
        if jax.sharding.get_abstract_mesh().empty:
            return hidden @ down
        forgotten = lambda h, w: h @ w
        specs = (P(None, None, "tensor"), P("tensor", None))
        return jax.shard_map(
            forgotten, in_specs=specs, out_specs=P(), axis_names={"tensor"}, check_vma=False
        )(hidden, down)


def model():
    return transformer.preset("tiny", dtype="float32", feed_forward=Forgetful())
'''
EXPERIMENT = """
from __gin__ import dynamic_registration
{imports}
from core import optimizers
from parallel import strategies

include 'gin/defaults.gin'
include 'gin/slices/v4_8.gin'
MODEL = @{model}()
{bindings}
VOCAB_SIZE = 259
OPTIMIZER = @optimizers.adamw()
optimizers.adamw.learning_rate = @optimizers.constant()
optimizers.constant.value = %LEARNING_RATE
STRATEGY = @strategies.fsdp()
"""
TENSOR = "STRATEGY = @strategies.tensor()"


def synthetic():
    """A recording of two steps and two layers of ones."""
    places = [("forward", p, "residual") for p in ("embedding", "layer 0", "layer 1")]
    places += [("loss", "", ""), ("gradients", "head", "unembedding")]
    places += [("gradients", f"layer {i}", t) for i in (1, 0) for t in ("block/gate", "block/up")]
    places += [("update", "optimizer state", "count"), ("update", "parameters", "block/up")]
    arrays = {key(step, *place): np.ones((2, 3), np.float32) for step in (1, 2) for place in places}
    return arrays | {name: np.asarray(1, np.int32) for name in arrays if name.endswith("count")}


def off(ulp):
    array = np.ones((2, 3), np.float32)
    array[1, 2] += ulp * np.spacing(np.float32(1))
    return array


def judged(changed, tolerance=16.0):
    return bisect.judge(
        synthetic(), synthetic() | changed, tolerance=dict.fromkeys(bisect.TOLERANCE, (tolerance, tolerance))
    )


# Comparing


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (key(1, "forward", "layer 1", "residual"), "step 1, forward, layer 1 residual"),
        (key(2, "loss", ""), "step 2, loss"),
        (key(1, "gradients", "layer 1", "block/up"), "step 1, gradients, layer 1 block/up"),
        (key(2, "update", "parameters", "block/up"), "step 2, update, parameters block/up"),
    ],
)
def test_one_wrong_array_is_named(name, said):
    verdict = judged({name: off(1000)})
    assert str(verdict.first) == said
    mean = "|update|parameters|" in name  # of squares, over six entries
    assert verdict.first.ulp == pytest.approx(1000 / 6**0.5 if mean else 1000)


def test_rounding_is_not_a_difference_and_the_largest_is_reported():
    verdict = judged({key(2, "loss", ""): off(12), key(1, "forward", "layer 0", "residual"): off(3)})
    assert verdict.first is None
    assert (str(verdict.largest), verdict.largest.ulp) == ("step 2, loss", pytest.approx(12))


def test_the_earliest_is_named_not_the_largest():
    later = {key(1, "gradients", "layer 0", "block/up"): off(10**6), key(2, "loss", ""): off(10**6)}
    assert str(judged({key(1, "gradients", "layer 1", "block/gate"): off(50), **later}).first) == (
        "step 1, gradients, layer 1 block/gate"
    )


def test_within_a_layer_the_furthest_apart_is_named():
    both = {key(1, "gradients", "layer 1", "block/gate"): off(50), key(1, "gradients", "layer 1", "block/up"): off(900)}
    assert judged(both).first.tensor == "block/up"


@pytest.mark.parametrize(
    ("array", "remark"),
    [
        (np.ones((2, 4), np.float32), "[2, 3] in A, [2, 4] in B"),
        (np.full((2, 3), np.nan, np.float32), "not finite"),
    ],
)
def test_arrays_that_cannot_be_subtracted_differ(array, remark):
    first = judged({key(1, "forward", "layer 1", "residual"): array}, tolerance=1e30).first
    assert (first.place, first.remark) == ("layer 1", remark)


def test_tensors_on_one_side_only_differ():
    assert judged({key(2, "forward", "layer 2", "residual"): off(0)}).first.remark == "only in B"


def test_a_counter_differs_by_one():
    assert judged({key(1, "update", "optimizer state", "count"): np.asarray(2, np.int32)}).first.tensor == "count"


def test_nan_in_both_is_equal():
    nan = np.full((2, 3), np.nan, np.float32)
    assert bisect.apart(nan, nan) == (0.0, 0.0, "")


@pytest.mark.parametrize("tolerance", [bisect.TOLERANCE, bisect.BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("times", [0.0, 0.5, np.nan])
def test_a_wrong_tensor_anywhere_is_beyond_the_measured_tolerances(times, tolerance):
    for name, array in synthetic().items():
        if not name.endswith("count"):
            verdict = bisect.judge(synthetic(), synthetic() | {name: array * np.float32(times)}, tolerance=tolerance)
            assert key(*_place(verdict.first)) == name


def _place(row):
    return row.step, row.phase, row.place, row.tensor


def test_neighbors_are_shown_beside_the_first():
    shown = judged({key(1, "gradients", "layer 1", "block/up"): off(1000)}).shown()
    assert [(r.phase, r.place, r.tensor) for r in shown] == [
        ("forward", "layer 0", "residual"),
        ("forward", "layer 1", "residual"),
        ("loss", "", ""),
        ("gradients", "head", "unembedding"),
        ("gradients", "layer 1", "block/up"),
        ("gradients", "layer 1", "block/gate"),
        ("gradients", "layer 0", "block/gate"),
        ("update", "optimizer state", "count"),
    ]


# Variants


def saved(run_dir, *steps):
    """Makes folders that look like complete checkpoints."""
    for number in steps:
        (run_dir / f"checkpoints/{number}/state").mkdir(parents=True)
        for part in ("meta", "_CHECKPOINT_METADATA"):
            (run_dir / f"checkpoints/{number}/{part}").touch()
    return run_dir


def test_a_variant_s_text(tmp_path):
    run_dir = saved(tmp_path / "a@b", 30)
    variant = command.parse(f"STRATEGY = @strategies.hsdp(); hosts=2; checkpoint={run_dir}@30;x.y = 3;", experiment="e")
    bindings = ("STRATEGY = @strategies.hsdp()", "x.y = 3")
    assert variant == ("e", bindings, 2, paths.resolve(run_dir / "checkpoints/30"))
    assert command.parse("config = other.gin", experiment="e") == ("other.gin", (), 1, None)
    assert command.parse("", experiment="e") == ("e", (), 1, None)


def test_a_variant_means_the_same_in_another_home(monkeypatch, tmp_path):
    saved(tmp_path / "runs/x", 10)
    monkeypatch.setenv("HOME", str(tmp_path))
    variant = command.parse("config=~/a.gin; checkpoint=~/runs/x@10; SEED = 1; hosts=2", experiment="e")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert variant.config == f"{tmp_path}/a.gin"
    assert command.parse(str(variant), experiment="another") == variant


def test_a_missing_checkpoint_is_reported_before_anything_starts(capsys, tmp_path):
    saved(tmp_path, 5)
    assert cli.main(["bisect", "gin/quickstart.gin", "", f"checkpoint={tmp_path}@10"]) == 2
    said = capsys.readouterr()
    assert f"no complete checkpoint of step 10 in {tmp_path}/checkpoints; existing steps: 5" in said.err
    assert "play" not in said.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts=two", "hosts=two: expected a whole number"),
        ("checkpoint=runs/a@", "expected RUN, RUN@STEP"),
    ],
)
def test_a_variant_that_makes_no_sense(text, message):
    with pytest.raises(ValueError, match=message):
        command.parse(text, experiment="e")


# Recording

BATCHES = list(agreement_subjects.random_batches(203, steps=1))
MODEL = transformer.preset("tiny", vocab_size=203, dtype="float32")


@functools.cache
def fresh(model):
    return jax.jit(model.init)


def recorded(tables, *, model=MODEL, learning_rate=1e-3, seed=0, **options):
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in BATCHES[0].items()}
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(learning_rate))
    program = bound.program(model, optimizer, spec, seed=seed, **options)
    params = jax.device_get(fresh(model)(jax.random.key(seed), BATCHES[0]))
    state = step.create(model, optimizer.for_model(model, BATCHES[0]), params, BATCHES[0])
    return recording.record(program, jax.device_put(state, program.state_shardings), BATCHES)


@pytest.fixture(scope="module")
def fsdp():
    return recorded(strategies.fsdp())


def first(ours, theirs):
    return bisect.judge(ours, theirs, tolerance=bisect.TOLERANCE).first


def test_a_recording_is_in_causal_order(fsdp):
    places = list(dict.fromkeys(tuple(name.split("|")[:3]) for name in fsdp))
    assert [p for p in places if p[0] == "1"] == [
        ("1", "forward", "embedding"),
        ("1", "forward", "layer 0"),
        ("1", "forward", "layer 1"),
        ("1", "forward", "head"),
        ("1", "loss", ""),
        ("1", "gradients", "head"),
        ("1", "gradients", "layer 1"),
        ("1", "gradients", "layer 0"),
        ("1", "gradients", "embedding"),
        ("1", "update", "optimizer state"),
        ("1", "update", "parameters"),
    ]
    assert {name for name in fsdp if name.startswith("1|gradients|embedding")} == {"1|gradients|embedding|embedding"}


def test_a_recording_holds_what_the_model_computes(fsdp):
    batch, params = BATCHES[0], {"~": {}, "layers/block": {}}
    for name, array in fsdp.items():
        if name.startswith("0|start|parameters|"):
            module, _, leaf = name.split("|")[3].rpartition("/")
            params[module or "~"][leaf] = array

    @jax.jit
    def whole(params):
        def loss(params):
            _, out = MODEL.loss(params, (), None, batch)
            return out.loss_sum / out.weight_sum

        return MODEL.residual(params, batch), MODEL.logits(params, batch), *jax.value_and_grad(loss)(params)

    residual, logits, value, gradients = whole(params)
    np.testing.assert_allclose(fsdp[key(1, "forward", "layer 1", "residual")], residual, atol=1e-5)
    np.testing.assert_allclose(fsdp[key(1, "forward", "head", "logits")], logits, atol=1e-5)
    np.testing.assert_allclose(fsdp[key(1, "loss", "")], value, rtol=1e-6)
    up = gradients["layers/block"]["up"][1]
    np.testing.assert_allclose(fsdp[key(1, "gradients", "layer 1", "layers/block/up")], up, atol=1e-6)


def test_equal_strategies_are_equal(fsdp):
    other = recorded(strategies.fsdp_tensor(tensor=2))
    assert first(fsdp, other) is None
    assert any(row.ulp > 0 for row in bisect.compare(fsdp, other))  # rounding there was


@pytest.mark.slow
def test_accumulation_is_equal(fsdp):
    assert first(fsdp, recorded(strategies.data_parallel(), accum_steps=2)) is None


@pytest.mark.slow
def test_another_learning_rate_first_differs_in_the_update(fsdp):
    found = first(fsdp, recorded(strategies.fsdp(), learning_rate=1.1e-3))
    assert found.group == (1, "update", "parameters")


@pytest.mark.slow
def test_another_seed_is_named_at_the_start(fsdp):
    other = recorded(strategies.fsdp(), seed=1)
    assert str(first(fsdp, other)) == "step 1, forward, embedding residual"
    assert bisect.given(fsdp, other)["start"]
    assert not bisect.given(fsdp, fsdp)["start"]


@pytest.mark.slow
def test_missing_gradient_sums_are_found_after_an_equal_loss(fsdp, monkeypatch):
    monkeypatch.setattr(accumulation, "reduce", lambda x, stored, kept, manual: x)
    found = first(fsdp, recorded(strategies.data_parallel(), accum_steps=2))
    assert found.group == (1, "gradients", "head")
    assert found.tensor in ("unembedding", "final_norm")


class Bigram(HaikuModel):
    """A model without a stack and without logits: a table of next tokens."""

    def _loss(self, batch):
        table = logical.param("table", (203, 256), ("embed", "vocab"), hk.initializers.RandomNormal())
        return losses.cross_entropy(table[batch["inputs"]], batch["targets"], batch["weights"], vocab_size=203)


def test_a_model_without_a_stack_shows_the_rest():
    found = recorded(strategies.tensor(), model=Bigram())
    places = list(dict.fromkeys(tuple(name.split("|")[1:3]) for name in found if name.startswith("1|")))
    assert places == [("loss", ""), ("gradients", "head"), ("update", "optimizer state"), ("update", "parameters")]


class AfterOthers(HaikuModel):
    """Two layers with a vector each, and after them three with a matrix."""

    def _loss(self, batch):
        init = hk.initializers.RandomNormal(0.3)

        def block(x, side, *, kind):
            if kind == "vector":
                return x + jnp.tanh(x * logical.param("vector", (8,), ("norm",), init))
            return x + jnp.tanh(x @ logical.param("matrix", (8, 8), ("embed", None), init))

        table = logical.param("table", (203, 8), (None, "embed"), init)
        layers = stack.layer_stack(block, 5, pattern=("matrix",), first=stack.First(("vector",) * 2))
        logits = layers(table[batch["inputs"]]) @ logical.param("head", (8, 203), ("embed", None), init)
        return losses.cross_entropy(logits, batch["targets"], batch["weights"], vocab_size=203)


def test_layers_are_counted_from_those_before_the_others():
    found = recorded(strategies.fsdp(), model=AfterOthers())
    forward = [f"layer {i}" for i in range(5)]
    places = list(dict.fromkeys(tuple(name.split("|")[1:3]) for name in found if name.startswith("1|")))
    assert [place for phase, place in places if phase == "forward"] == ["embedding", *forward]
    assert [place for phase, place in places if phase == "gradients"] == ["head", *reversed(forward), "embedding"]
    tensors = {forward[i]: "vector" if i < 2 else "matrix" for i in range(5)}
    gradients = [name.split("|")[2:] for name in found if name.startswith("1|gradients|layer")]
    assert {place: name.rpartition("/")[2] for place, name in gradients} == tensors
    assert len(gradients) == 5
    updated = {
        name.rpartition("/")[2] for name in found if name.startswith("1|update|parameters|") and "layer " in name
    }
    assert updated == {f"{tensor}, {layer}" for layer, tensor in tensors.items()}


class Scaled(hk.Module):
    """A layer with a vector."""

    def __call__(self, x):
        return x + jnp.tanh(x * logical.param("vector", (8,), ("norm",), hk.initializers.RandomNormal(0.3)))


class InGroups(HaikuModel):
    """Four layers, of which runners treat two as one; the loss also depends on the number of a row."""

    def _loss(self, batch):
        init = hk.initializers.RandomNormal(0.3)

        def block(x, side, *, kind):
            return Scaled(name=kind)(x)

        table = logical.param("table", (203, 8), (None, "embed"), init)
        layers = stack.layer_stack(block, 4, pattern=("first", "second"), group=2)
        logits = layers(table[batch["inputs"]]) @ logical.param("head", (8, 203), ("embed", None), init)
        rows = jnp.zeros(16) if hk.running_init() else batch["row_ids"]  # a model is initialized without them
        weights = batch["weights"] / (1 + rows[:, None])
        return losses.cross_entropy(logits, batch["targets"], weights, vocab_size=203)


def test_a_group_of_layers_has_the_numbers_of_all():
    found = recorded(strategies.fsdp(), model=InGroups())
    places = list(dict.fromkeys(tuple(name.split("|")[1:3]) for name in found if name.startswith("1|")))
    both = ["layers 0-1", "layers 2-3"]
    assert [place for phase, place in places if phase == "forward"] == ["embedding", *both]
    assert [place for phase, place in places if phase == "gradients"] == ["head", *reversed(both), "embedding"]
    updated = {name.rpartition(", ")[2] for name in found if name.startswith("1|update|parameters|") and ", " in name}
    assert updated == set(both)


def test_gradients_in_a_dtype_that_numpy_lacks_are_stored():
    """Gradients of parameters that are frozen in bfloat16."""
    bound = partitioner.Partitioner(strategies.fsdp(), slice=slices.get("v4-8"), devices=jax.devices())
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in BATCHES[0].items()}
    program = bound.program(MODEL, optimizers.adamw(learning_rate=optimizers.constant(0.1)), spec, seed=0)
    narrow = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.bfloat16), program.abstract_state.params)
    order = recording._Order(program, recording._Layers(program))
    dtypes = {array.dtype for _, _, array in order.gradients(narrow)}
    assert dtypes == {np.dtype(np.float32)}


# Whole


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Writes an experiment with the planted model, or a tiny right one."""

    def write(*, planted=False):
        (tmp_path / "planted.py").write_text(PLANTED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        sizes = dict(num_layers=2, embed_dim=16, mlp_dim=32, num_heads=4, num_kv_heads=4)
        bindings = "" if planted else "\n".join(f"transformer.Transformer.{k} = {v}" for k, v in sizes.items())
        text = EXPERIMENT.format(
            imports="import planted" if planted else "from models.decoder import transformer",
            model="planted.model" if planted else "transformer.Transformer",
            bindings=bindings,
        )
        (tmp_path / "tried.gin").write_text(text)
        return str(tmp_path / "tried.gin")

    return write


@pytest.mark.slow
def test_a_sum_that_a_block_forgets_is_found(launch, experiment):
    said = launch("bisect", experiment(planted=True), "", TENSOR, "--steps", "1", code=1)
    assert "different: step 1, forward, layer 0 residual: " in said
    lines = [line.split() for line in said.splitlines()]
    assert [line[-1] for line in lines if line[:3] == ["1", "forward", "embedding"]] == ["agrees"]
    assert any(line[:4] == ["1", "forward", "layer", "1"] and line[-1] == "differs" for line in lines)


@pytest.mark.slow
@pytest.mark.simulated(2)
@pytest.mark.parametrize("variant", ["hosts=2", f"{TENSOR}; hosts=4", "hosts=2; ACCUM_STEPS = 2"])
def test_strategies_and_hosts_are_equal(launch, experiment, variant):
    assert "equal through step 3: " in launch("bisect", experiment(), "", variant)


@pytest.mark.slow
def test_another_file_and_a_checkpoint(launch, experiment, tmp_path):
    path = experiment()
    (tmp_path / "other.gin").write_text((tmp_path / "tried.gin").read_text() + "LEARNING_RATE = 1e-2\n")
    said = launch("bisect", path, "", f"config={tmp_path}/other.gin", code=1)
    assert "different: step 1, update, parameters " in said
    run_dir = str(tmp_path / "run")
    launch("train", path, "--check", "smoke", "--run-dir", run_dir, slice_name="v4-8")
    (attempt,) = (p for p in (tmp_path / "run").iterdir() if (p / "checkpoints").is_dir())
    said = launch("bisect", path, f"checkpoint={attempt}@10", f"checkpoint={attempt}@20", code=1)
    assert "different: step 1, forward, embedding residual" in said
    assert "note: the runs start from different states" in said


def test_processes_that_cannot_share_the_chips(capsys):
    assert cli.main(["bisect", "gin/quickstart.gin", "", "hosts=3", "--slice", "v4-8"]) == 2
    assert "3 processes cannot share the 4 chips of v4-8 evenly; expected one of 1, 2, 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_too_large_to_keep_is_refused(launch):
    data = "TASK = @synthetic.random_tokens()"
    said = launch("bisect", "gin/valkyrie_7b.gin", data, f"{data}; hosts=2", "--full", code=2)
    assert "simulating v4-32 needs " in said
