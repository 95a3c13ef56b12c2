"""Without a slice, a model is laid out on one chip of those that JAX sees."""

import dataclasses
import types

import jax
import pytest

from core import slices
from core.errors import UserError
from launch import loaded_model
from models.decoder.transformer import Transformer
from parallel import strategies
from tasks import streams

MODEL = Transformer(vocab_size=64, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=2)


@pytest.mark.parametrize(("name", "devices"), [("v4-8", 1), ("v5p-8", 1), ("v5e-4", 1), ("v6e-4", 1), ("tpu7x-8", 2)])
def test_a_program_without_a_slice_is_for_one_chip_of_the_kind_there_is(tpu_topology, monkeypatch, name, devices):
    there = list(tpu_topology(name))
    monkeypatch.setattr(jax, "devices", lambda: there)
    slice_ = loaded_model.slice_of(None)
    program = loaded_model.bound(MODEL, None, None, streams.batch_spec(slice_.devices, length=32))
    used = program.partitioner.mesh.devices.flatten().tolist()
    assert (slice_.chips, {device.device_kind for device in used}) == (1, {there[0].device_kind})
    assert len(used) == len({device.id for device in used}) == devices


def test_a_gpu_without_a_slice_is_used_alone(monkeypatch):
    gpus = [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")] * 8
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert loaded_model.slice_of(None).name == "h200:1"
    assert loaded_model.slice_of("h200:8").name == "h200:8"


def test_a_cpu_without_a_slice_plays_one_chip():
    assert loaded_model.slice_of(None).name == "v5e-1"


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (strategies.fsdp(), (8, 32)),
        pytest.param(strategies.pipeline(), (16, 32), marks=pytest.mark.slow),  # the next one has stages, too
        (strategies.pipeline_fsdp(stage=2), (32, 32)),
        (strategies.sequence_tensor(tensor=8), (8, 32)),
        (strategies.context(sequence=8, ring=True), (8, 32)),
    ],
)
def test_a_batch_that_gives_parameters_their_shapes_divides_under_every_layout(layout, sizes):
    slice_ = slices.get("cpu:8")
    rows, length = loaded_model.sizes_for(layout, slice_, is_tiled=False)
    assert rows % sizes[0] == 0
    assert length % sizes[1] == 0
    model = dataclasses.replace(MODEL, num_layers=8, num_heads=8, num_kv_heads=8, embed_dim=64, mlp_dim=64)
    loaded_model.bound(model, layout, "cpu:8", streams.batch_spec(rows, length=length))
    assert loaded_model.sizes_for(layout, slice_, is_tiled=True)[1] % 128 == 0


def test_one_prompt_in_place_of_a_list_is_refused():
    program = loaded_model.bound(MODEL, None, None, streams.batch_spec(1, length=32))
    model = loaded_model.LoadedModel(program, None, None, "here", begins_with_bos=False)
    for prompts in ("import ", [0, 5, 7]):
        with pytest.raises(UserError, match="expected a list of prompts, each a text or a list of ids"):
            model.checked(prompts, max_tokens=4, is_chat=False)
