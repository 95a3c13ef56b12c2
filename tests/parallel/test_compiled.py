"""Compiling for slices that are not there."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from core import optimizers, slices
from core.slices import GIB
from models import transformer
from parallel import compiled, compiler_options, partitioner, report, strategies


def program(model, tables, slice_name, *, rows, length):
    slice_ = slices.get(slice_name)
    integers = ("inputs", "targets", "segment_ids", "positions")
    whole = {k: jax.ShapeDtypeStruct((rows, length), jnp.int32) for k in integers}
    spec = {**whole, "weights": jax.ShapeDtypeStruct((rows, length), jnp.float32)}
    bound = partitioner.Partitioner(tables, slice=slice_, devices=compiled.devices_of(slice_))
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    return bound.program(model, optimizer, spec, seed=0)


SMALL = transformer.Transformer(
    vocab_size=1000, num_layers=2, embed_dim=512, mlp_dim=1024, num_heads=8, num_kv_heads=4, head_dim=128, remat="full"
)


@pytest.mark.covers("X04")
@pytest.mark.compiled("v4-32")
@pytest.mark.parametrize("tables", [strategies.fsdp(), strategies.fsdp_tensor(tensor=4)], ids=lambda t: t.name)
def test_a_step_compiles_with_splash_inside(tables):
    result = compiled.compile_for_slice(program(SMALL, tables, "v4-32", rows=16, length=256))
    assert "tpu_custom_call" in result.hlo
    assert 0 < result.temp_bytes < result.peak_bytes + result.temp_bytes
    state = report.totals(program(SMALL, tables, "v4-32", rows=16, length=256)).everything
    batch = 16 * 256 * 4 * 5 // (16 if tables.name == "fsdp" else 4)
    assert result.argument_bytes == pytest.approx(state + batch, rel=0.02)


@pytest.mark.compiled("v4-32")
def test_a_step_that_does_not_fit_says_by_how_much():
    wide = dataclasses.replace(SMALL, embed_dim=8192, mlp_dim=65536, remat="none")
    with pytest.raises(compiled.OutOfHbmError, match=r"needs [\d.]+GiB of HBM per chip, a chip has 30.75GiB"):
        compiled.compile_for_slice(program(wide, strategies.data_parallel(), "v4-32", rows=16, length=256))


@pytest.mark.compiled("v4-8", "v5p-8", "v5e-8", "v6e-8")
@pytest.mark.parametrize("name", ["v4-8", "v5p-8", "v5e-8", "v6e-8"])
def test_libtpu_knows_every_compiler_option(name, tpu_topology):
    device = tpu_topology(name)[0]
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    options = dict(compiler_options.compiler_options(slices.get(name)))
    jax.jit(lambda x: x @ x).lower(x).compile(compiler_options=options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x @ x).lower(x).compile(compiler_options={**options, "xla_tpu_no_such_option": True})


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
def test_valkyrie_7b_fits_v4_32_in_10_gib():
    model = transformer.preset("7b", remat="full")
    result = compiled.compile_for_slice(program(model, strategies.fsdp(), "v4-32", rows=32, length=2048))
    assert result.peak_bytes <= 10 * GIB
