"""Every lint reports a program with the problem and is silent on one without."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from core import optimizers, slices
from models.decoder import transformer
from parallel import partitioner, strategies
from parallel.compiled import analysis, compiling, lints, traffic
from parallel.compiled.hlo import executions, messages, program
from tasks import streams

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODEL = transformer.Transformer(
    vocab_size=8192, num_layers=2, embed_dim=1024, mlp_dim=3072, num_heads=8, num_kv_heads=4, head_dim=128,
    remat="full", attention="plain",
)  # fmt: skip
MIB = 2**20


def bind(tables, slice_name="v4-8", *, model=MODEL, **options):
    slice_ = slices.get(slice_name)
    spec = streams.batch_spec(16, length=64)
    bound = partitioner.Partitioner(tables, slice=slice_, devices=compiling.devices_of(slice_))
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    return bound.program(model, optimizer, spec, seed=0, **options)


def names(findings):
    return [(f.lint, f.reason is not None) for f in findings]


@pytest.fixture(scope="module")
def good():
    bound = bind(strategies.fsdp())
    return bound, analysis.analyze(bound)


@pytest.mark.compiled("v4-8")
def test_a_good_program_has_no_findings(good):
    assert good[1].findings == []


@pytest.mark.compiled("v4-8")
def test_the_report_as_json_is_stable(good):
    bound, found = good
    again = analysis.read(bound, found.compiled)
    texts = [json.dumps(analysis.as_json(bound, f), sort_keys=True) for f in (found, again)]
    assert texts[0] == texts[1]
    read = json.loads(texts[0])
    assert read["mesh"]["fsdp"] == 4
    assert read["cycles"]["total"] == sum(read["cycles"]["by_kind"].values()) > 0
    assert read["wire_bytes_by_axes"]["fsdp"] == sum(row["wire_bytes"] for row in read["traffic"])


@pytest.mark.compiled("v4-8")
@pytest.mark.parametrize(
    "tables",
    [strategies.fsdp(), strategies.hsdp(data=2)],
    ids=lambda t: t.name,
)
@pytest.mark.slow
def test_gathers_in_the_accumulation_loop(tables):
    bound = bind(tables, accum_steps=2)
    found = analysis.analyze(bound)
    (gathers,) = [f for f in found.findings if f.lint == "weights gathered in the accumulation loop"]
    assert "2 microbatches" in gathers.what
    assert found.findings == [gathers]
    assert gathers.reason is None
    full = lints.LintContext(bound, bound.partitioner.slice.chip.usable_hbm_bytes - 1024, found.collectives)
    assert gathers.lint not in [f.lint for f in lints.check(full)]  # there is no room for whole weights
    assert [loop.trips for loop in found.costs.loops] == [2, 2, 2]


def gather(dtype, *, rows=8192, axis="fsdp"):
    """A gather of the embedding table, MODEL's largest array."""
    text = f"""
ENTRY %main (x: {dtype}[{rows},256]) -> {dtype}[{rows},1024] {{
  %x = {dtype}[{rows},256]{{1,0}} parameter(0)
  ROOT %g = {dtype}[{rows},1024]{{1,0}} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={{1}}
}}
"""
    return collectives(text, traffic.Grid({axis: 4}, (0,) * 4))


def collectives(text, grid):
    module = program.parse(text)
    return traffic.collectives(module, executions.walk(module), grid)


def test_gathering_once_is_advised_where_stored_parameters_and_their_gradients_fit_whole():
    """Both in float32; the gathers of the loop are of one bfloat16 weight at a time."""
    bound, loop = bind(strategies.fsdp(), accum_steps=2), executions.Loop("while", "jit(run)/while", 2)
    (inside,) = (c._replace(loops=(loop,)) for c in gather("bf16"))
    arrays = jax.tree.leaves(bound.abstract_state.params)
    matrices = sum(a.size for a in arrays if a.size > 10_000)  # norms are replicated
    more, have = 2 * 4 * matrices * 3 // 4, bound.partitioner.slice.chip.usable_hbm_bytes
    (found,) = lints.check(lints.LintContext(bound, have - more, [inside]))
    assert found.lint == "weights gathered in the accumulation loop"
    assert f"{more // MIB} MiB more" in found.what
    assert not lints.check(lints.LintContext(bound, have - more + 1, [inside]))
    once = bind(strategies.fsdp(), accum_steps=2, gather_once=True)
    assert not lints.check(lints.LintContext(once, have - more, [inside]))  # other axes may still gather in the loop


@pytest.mark.compiled("v4-8")
def test_float32_gathers_of_weights(good):
    wide = gather("f32")
    (planted,) = lints.check(lints.LintContext(good[0], 0, wide))
    assert (planted.lint, planted.reason) == ("float32 gather of weights", None)
    assert planted.what.startswith("params/")
    exact = bind(strategies.fsdp(), model=dataclasses.replace(MODEL, dtype="float32"))
    assert names(lints.check(lints.LintContext(exact, 0, wide))) == [("float32 gather of weights", True)]
    assert lints.check(lints.LintContext(good[0], 0, gather("bf16"))) == []
    assert lints.check(lints.LintContext(good[0], 0, gather("f32", rows=8200))) == []  # activations, not weights


@pytest.mark.compiled("v4-8")
def test_updated_parameters_are_gathered_as_they_are():
    """Parameters whole, optimizer state in pieces."""
    bound, lint = bind(strategies.zero1()), "float32 gather of weights"
    (update,) = gather("f32", axis="data")
    assert (lint, True) in names(lints.check(lints.LintContext(bound, 0, [update])))
    in_loop = update._replace(loops=(executions.Loop("while", "jit(run)/jvp()/while", 2),))
    assert (lint, False) in names(lints.check(lints.LintContext(bound, 0, [in_loop])))


NARROW = dataclasses.replace(MODEL, embed_dim=256, mlp_dim=768, head_dim=32)


@pytest.mark.slow
@pytest.mark.compiled("v4-8")
@pytest.mark.parametrize(
    ("tables", "options", "expected"),
    [
        (strategies.zero1(), {}, {"float32 gather of weights", "large replicated array"}),
        (strategies.hsdp(data=2), {}, {"all-reduce instead of reduce-scatter"}),
        (strategies.fsdp(), {"accum_steps": 2, "gather_once": True}, {"all-reduce instead of reduce-scatter"}),
    ],
)
def test_known_exceptions_of_lints_are_accepted(tables, options, expected):
    found = analysis.analyze(bind(tables, **options)).findings
    assert {f.lint for f in found if f.reason} == expected
    assert {f.lint for f in found if not f.reason} <= {"weights gathered in the accumulation loop"}


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
def test_sixteen_way_reductions_are_known():
    bound = bind(strategies.fsdp(), "v4-32")
    found = analysis.analyze(bound)
    assert names(found.findings) == [("all-reduce instead of reduce-scatter", True)]
    assert "16 chips" in found.findings[0].what
    elsewhere = [c._replace(group_size=8) for c in found.collectives]
    assert names(lints.check(lints.LintContext(bound, 0, elsewhere))) == [
        ("all-reduce instead of reduce-scatter", False)
    ]


@pytest.mark.parametrize(
    ("tables", "slice_name", "axes", "size", "reason", "fix"),
    [
        (strategies.fsdp(), "v4-32", ("fsdp",), 16, "16-way", "axis of 4"),
        (strategies.context(sequence=4), "v4-32", ("fsdp", "sequence"), 16, "16-way", "axis of 4"),
        (strategies.hsdp(data=4), "v4-32", ("data", "fsdp"), 16, "replicas", "accum_steps above 1"),
        (strategies.mesh3d(data=2, tensor=2), "v4-32", ("data", "fsdp"), 8, "replicas", "accum_steps above 1"),
        (strategies.fsdp(), "v4-8", ("fsdp",), 4, "256", "wider"),
        (strategies.fsdp(), "v4-16", ("fsdp",), 8, None, "axis of 4"),
        (strategies.data_parallel(), "v4-32", ("data",), 16, None, "axis of 4"),
    ],
)
def test_why_a_reduction_is_not_scattered(tables, slice_name, axes, size, reason, fix):
    (one,) = gather("bf16")
    planted = one._replace(kind="all-reduce", axes=axes, group_size=size, sliced_bytes=64 * MIB)
    found = lints.check(lints.LintContext(bind(tables, slice_name, model=NARROW), 0, [planted]))
    (finding,) = [f for f in found if f.lint == "all-reduce instead of reduce-scatter"]
    assert (finding.reason is None) == (reason is None)
    assert (reason or "") in (finding.reason or "")
    assert fix in finding.fix


LARGE_ON_DCN, FORWARD, BACKWARD = "large collective on DCN", "jit(run)/jvp()/while", "jit(run)/transpose(jvp())/while"


@pytest.mark.parametrize(
    ("changes", "loops", "expected"),
    [
        ({"kind": "all-gather"}, [], [(LARGE_ON_DCN, False)]),
        ({}, [], [(LARGE_ON_DCN, True)]),
        ({}, [BACKWARD], [(LARGE_ON_DCN, True)]),
        ({}, [FORWARD], [(LARGE_ON_DCN, False)]),
        ({}, ["jit(run)/shard_map/while", BACKWARD], [(LARGE_ON_DCN, False)]),  # in every microbatch
        ({"axes": ("data", "fsdp")}, [], [(LARGE_ON_DCN, False)]),  # its larger part belongs on ICI
        ({"times": 0}, [FORWARD], []),
        ({"network": "ICI"}, [FORWARD], []),
    ],
)
def test_large_collectives_on_dcn(changes, loops, expected):
    bound = bind(strategies.hsdp(data=2), accum_steps=2 if len(loops) > 1 else 1)
    around = tuple(executions.Loop("while", op_name, 2) for op_name in loops)
    (one,) = gather("bf16", axis="data")
    crossing = one._replace(kind="all-reduce", network="DCN", wire_bytes=64 * MIB, times=1, loops=around)
    assert names(lints.check(lints.LintContext(bound, 0, [crossing._replace(**changes)]))) == expected


def test_replicated_arrays(good):
    wide = dataclasses.replace(MODEL, vocab_size=32768)
    partly = strategies.override(strategies.fsdp(), param_rules={"embed": None, "mlp": "fsdp"})
    found = lints.check(lints.LintContext(bind(partly, model=wide), 0, []))
    assert any(f.what.startswith("params/") for f in found)
    assert all(f.lint == "large replicated array" and f.reason is None for f in found)
    whole = lints.check(lints.LintContext(bind(strategies.data_parallel(), model=wide), 0, []))
    assert whole
    assert all(f.reason is not None for f in whole)
    assert lints.check(lints.LintContext(good[0], 0, [])) == []


def test_an_axis_that_shards_nothing():
    tables = strategies.fsdp_tensor(tensor=2)
    only = {"mlp": None, "heads": None, "kv_heads": None, "vocab": None}
    idle = strategies.override(tables, param_rules={**only, "expert": "tensor"}, activation_rules=only)
    found = lints.check(lints.LintContext(bind(idle), 0, []))
    assert names(found) == [("mesh axis that shards nothing", False)]
    assert "tensor = 2" in found[0].what
    assert lints.check(lints.LintContext(bind(tables), 0, [])) == []


BRANCH = """
%gather (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
}

%leave (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[8], p: pred[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %p = pred[] DECIDES
  ROOT %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%gather, false_computation=%leave
}
"""


@pytest.mark.parametrize(
    ("decides", "expected"),
    [
        ("parameter(1)", [("collective under a data-dependent branch", False)]),
        ("partition-id()", [("collective under a data-dependent branch", False)]),
        ("constant(true)", []),
    ],
)
def test_collectives_under_a_branch(good, decides, expected):
    found = collectives(BRANCH.replace("DECIDES", decides), traffic.Grid({"fsdp": 4}, (0,) * 4))
    assert names(lints.check(lints.LintContext(good[0], 0, found))) == expected


@pytest.mark.parametrize(
    ("slices", "expected"),
    [((0,) * 4, []), ((0, 0, 1, 1), [("collective under a data-dependent branch", False)])],
)
def test_all_chips_of_a_slice_take_the_branch_of_their_slice(good, slices, expected):
    text = BRANCH.replace("pred[] DECIDES", 's32[] custom-call(), custom_call_target="SliceId"').replace(
        "p: pred[]", "p: s32[]"
    )
    found = collectives(text, traffic.Grid({"fsdp": 4}, slices))
    judged = names(lints.check(lints.LintContext(good[0], 0, found)))
    assert [one for one in judged if "branch" in one[0]] == expected


@pytest.mark.compiled("v4-8")
@pytest.mark.parametrize("kind", ["branch", "loop", "counted loop"])
def test_collectives_that_only_some_chips_may_reach(good, kind):
    grid = good[0].partitioner.mesh
    double = functools.partial(jnp.multiply, 2)

    def total(x):
        return jax.lax.psum(x, "fsdp")

    def run(x):
        if kind == "branch":
            return jax.lax.cond(x.sum() > 0, total, double, x)
        if kind == "loop":
            return jax.lax.while_loop(lambda x: x.sum() < 9, total, x)
        return jax.lax.fori_loop(0, 5, lambda _, x: total(jnp.sin(x)), x)

    spread = jax.sharding.PartitionSpec("fsdp")
    whole = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16, sharding=jax.sharding.NamedSharding(grid, spread))
    split = jax.shard_map(run, mesh=grid, in_specs=spread, out_specs=spread, check_vma=False)
    found = collectives(jax.jit(split).lower(whole).compile().as_text(), traffic.grid(grid))
    assert [c.times for c in found] == [5 if kind == "counted loop" else 1]
    expected = [] if kind == "counted loop" else [("collective under a data-dependent branch", False)]
    assert names(lints.check(lints.LintContext(good[0], 0, found))) == expected


PLANTED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from core import slices
from parallel.compiled import lints; from parallel import mesh
from parallel.compiled.hlo import messages

slice_ = slices.get("v4-32")
grid = mesh.make_mesh({"fsdp": 4, "tensor": 4}, slice=slice_, devices=mesh.topology_devices(slice_))
laid = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(grid, P(*spec)))

def turned(x):
    return laid(jnp.cos(laid(jnp.sin(x), "fsdp", "tensor", None)), None, None, ("tensor", "fsdp"))

def kept(x):
    return laid(jnp.cos(laid(jnp.sin(x), "fsdp", "tensor", None)), "fsdp", None, None)

x = jax.ShapeDtypeStruct((8, 8, 32), jnp.float32, sharding=NamedSharding(grid, P()))
for fn in (turned, kept):
    with messages.compiler_messages() as said:
        jax.jit(fn).lower(x).compile()
    facts = lints.LintContext(None, 0, [], said.text)
    print(fn.__name__, [f.what for f in lints.rematerialized(facts)])
"""


TURNED = (  # as libtpu 0.0.42.1 writes the two shardings, and as 0.0.50.1 does
    "{devices=[4,4,1]<=[16]} to {devices=[1,1,16]<=[4,4]T(1,0)}",
    "{mesh['fsdp'=4,'tensor'=4], [{'fsdp'}, {'tensor'}, {}]} to "
    "{mesh['fsdp'=4,'tensor'=4], [{}, {}, {'tensor', 'fsdp'}]}",
)


@pytest.mark.compiled("v4-32")
def test_involuntary_rematerialization_is_heard(monkeypatch):
    for name, value in {**messages.AUDIBLE_WARNINGS, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(PLANTED)], capture_output=True, text=True, timeout=120)
    turned, kept = ran.stdout.splitlines()
    assert any(f"goes from {shardings}" in turned for shardings in TURNED)
    assert "f32[2,2,32]" in turned
    assert kept == "kept []"
    assert "W1" not in ran.stderr


def test_messages_that_are_no_warnings_are_passed_on(capfd):
    with messages.compiler_messages() as said:
        subprocess.run(["/bin/sh", "-c", "echo 'W1120 11:33 x.cc:1] hm' >&2; echo 'E1120 bad' >&2"], check=True)
    assert said.text == "W1120 11:33 x.cc:1] hm\nE1120 bad\n"
    assert capfd.readouterr().err == "E1120 bad\n"
