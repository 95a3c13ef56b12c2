"""Folders of safetensors: reading parameters under several layouts, and errors."""

import functools
import itertools
import json
import pathlib
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from core import logical, optimizers, parameters, slices
from core.checkpoints import layer_map, published, published_files, safetensors_files, warm_start
from core.checkpoints.tensor_map import Source
from core.errors import UserError
from core.files import paths
from models import pretrained
from models.decoder import transformer
from models.decoder.published import family_tensors
from parallel import strategies
from parallel.partitioner import Partitioner
from tasks import streams
from tests.lab import folder_memory

FAMILIES = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "families"
ADAMW = optimizers.adamw(learning_rate=optimizers.constant(1e-3))


LAYOUTS = {
    "data_parallel": strategies.data_parallel(),
    "fsdp": strategies.fsdp(),
    "fsdp_tensor": strategies.fsdp_tensor(tensor=2),
    "pipeline_fsdp": strategies.pipeline_fsdp(stage=1),
}


@functools.cache
def program_of(folder, layout, **changes):
    model = pretrained.model(str(folder), dtype="float32", vocab_multiple=8, **changes)
    at = Partitioner(LAYOUTS[layout], slice=slices.get("v4-16"), devices=jax.devices()[:8])
    return at.program(model, ADAMW, streams.batch_spec(8, length=16), seed=0)


def load(program, folder):
    return program.model.published(str(folder)).load(program.abstract_state.params, program.param_specs)


@pytest.fixture
def llama(tmp_path):
    shutil.copytree(FAMILIES / "llama2", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.covers("C16")
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_every_layout_reads_the_same_bits_and_only_the_needed_parts(family, monkeypatch):
    read, largest = safetensors_files.Reader.__call__, []
    counted = lambda *args: largest.append((found := read(*args)).size) or found  # noqa: E731
    monkeypatch.setattr(safetensors_files.Reader, "__call__", counted)
    found = {}
    for name, layout in {"replicated": "data_parallel", "split": "fsdp_tensor", "stages": "pipeline_fsdp"}.items():
        largest.clear()
        program = program_of(FAMILIES / family, layout)
        params = load(program, FAMILIES / family)
        assert jax.tree.map(lambda a: a.sharding, params) == program.state_shardings.params
        found[name] = jax.device_get(params), max(largest)
    whole = load_file(FAMILIES / family / "model.safetensors")
    ours = found["replicated"][0]
    embedding = whole["transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"]
    np.testing.assert_array_equal(ours["~"]["embedding"][:83], embedding)
    assert not ours["~"]["embedding"][83:].any()
    for other in ("split", "stages"):
        jax.tree.map(np.testing.assert_array_equal, found[other][0], ours)

    assert found["split"][1] <= found["replicated"][1] / 4


def test_tensors_are_found_under_other_names(llama):
    """The layers are named as in another library, and read under a layout all the same."""
    program = program_of(FAMILIES / "llama2", "fsdp_tensor")
    want = jax.device_get(load(program, llama))
    named = load_file(llama / "model.safetensors")
    other = {name.replace("model.layers.", "backbone.h."): tensor for name, tensor in named.items()}
    save_file(other, llama / "model.safetensors")
    source, wanted = program.model.published(str(llama)), (program.abstract_state.params, program.param_specs)
    assert any("missing: model.layers.0.self_attn.q_proj.weight" in line for line in source.problems(*wanted))
    source = source.renamed({"backbone.h.*": "model.layers.*"})
    assert not source.problems(*wanted)
    found = source.load(*wanted)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), want)
    assert jax.tree.map(lambda a: a.sharding, found) == program.state_shardings.params


@pytest.mark.parametrize(
    ("family", "group", "layers"),
    [
        pytest.param("llama3", 1, (2, None), marks=pytest.mark.slow),
        pytest.param("qwen3_moe_sparse", 4, (1, 0, 0), marks=pytest.mark.slow),  # groups of 2 are quick
        ("gemma4", 2, (1, 0, 0)),
    ],
)
def test_layers_of_a_folder_start_a_model_of_another_depth(family, group, layers):
    """Entries are groups of layers where a stack has them."""
    folder, at = FAMILIES / family, "fsdp_tensor"
    want = jax.device_get(load(program_of(folder, at), folder))
    program = program_of(folder, at, num_layers=group * len(layers))
    source, shapes, specs = program.model.published(str(folder)), program.abstract_state.params, program.param_specs
    mapping = layer_map.of({"layers/*": layers}, source, shapes, specs)
    warm_start.require_fit(source, shapes, specs, ("*",), layers=mapping)
    fresh = jax.device_get(program.init_params()) if None in layers else want
    found = warm_start.load(source, program.init_params, shapes, specs, ("*",), layers=mapping)
    assert jax.tree.map(lambda a: a.sharding, found) == program.state_shardings.params
    for module, entries in jax.device_get(found).items():
        for name, leaf in entries.items():
            there, initialized = want[module][name], fresh[module][name]
            chosen = [initialized[i] if n is None else there[n] for i, n in enumerate(layers)]
            np.testing.assert_array_equal(leaf, np.stack(chosen) if module.startswith("layers") else there)


def test_parameters_that_the_family_has_not_are_left_to_patterns(llama):
    """A model that adds parameters to one of a family, such as an adapter, reads the others."""
    program = program_of(FAMILIES / "llama2", "fsdp")
    source, params = program.model.published(str(llama)), program.abstract_state.params
    wider = {**params, "adapter": {"down": params["~"]["final_norm"]}}
    specs = {**program.param_specs, "adapter": {"down": program.param_specs["~"]["final_norm"]}}
    with pytest.raises(UserError, match="missing: adapter/down, which models of this family have not"):
        warm_start.require_fit(source, wider, specs, ("*",))
    with pytest.raises(UserError, match="missing: adapter/down"):
        source.load(wider, specs)
    warm_start.require_fit(source, wider, specs, ("layers/*", "*embedding", "final_norm"))


def test_a_source_reads_and_writes_its_entries_between_those_of_others():
    tensor = np.random.default_rng(0).standard_normal(((4 + 2 + 2) * 6, 5)).astype(np.float32)
    split, again = tensor.reshape(8, 6, 5), np.zeros_like(tensor)
    for dims, axis, first, size in (
        ("(heads+4 head_dim) embed", "heads", 0, 4),
        ("(4+kv_heads+2 head_dim) embed", "kv_heads", 4, 2),
        ("(6+kv_heads head_dim) embed", "kv_heads", 6, 2),
    ):
        source, sizes = Source("a", dims), {"embed": 5, axis: size, "head_dim": 6}
        assert source.shape(sizes) == tensor.shape
        whole = split[first : first + size].transpose(2, 0, 1)
        for part in (slice(0, size), slice(1, 2)):
            wanted = {"embed": slice(1, 4), axis: part, "head_dim": slice(0, 6)}
            found = source.read(tensor.__getitem__, sizes, wanted)
            np.testing.assert_array_equal(found, whole[1:4, part])
        source.write(again, whole, sizes)
    np.testing.assert_array_equal(again, tensor)


def test_a_source_reads_and_writes_merged_axes_between_entries_of_others():
    """Blocks of 2 x 6, of 2 x 6 and of 3 x 5 rows, which are no multiples of one another."""
    tensor = np.random.default_rng(0).standard_normal((39, 1, 4)).astype(np.float32)
    again, start = np.zeros_like(tensor), 0
    for dims, heads, width in (
        ("(heads head_dim)+27 0/1 _", 2, 6),
        ("12+(heads head_dim)+15 0/1 _", 2, 6),
        ("24+(heads head_dim) 0/1 _", 3, 5),
    ):
        source, sizes = Source("a", dims), {"_": 4, "heads": heads, "head_dim": width}
        assert source.shape(sizes) == tensor.shape
        whole = tensor[start : start + heads * width].reshape(heads, width, 4).transpose(2, 0, 1)
        for part in (slice(0, heads), slice(1, 2)):
            wanted = {"_": slice(1, 4), "heads": part, "head_dim": slice(0, width)}
            np.testing.assert_array_equal(source.read(tensor.__getitem__, sizes, wanted), whole[1:4, part])
        source.write(again, whole, sizes)
        start += heads * width
    np.testing.assert_array_equal(again, tensor)


def test_a_source_reads_and_writes_any_part_of_a_merged_dimension():
    rng = np.random.default_rng(0)
    tensor = rng.standard_normal((5, 3 * 4 * 6)).astype(np.float32)
    sizes = {"embed": 5, "heads": 4, "head_dim": 6}
    for block in range(3):
        source = Source("a", f"embed ({block}/3 heads head_dim)")
        whole = tensor.reshape(5, 3, 4, 6)[:, block]
        for parts in ([(0, 5), (0, 4), (0, 6)], [(1, 3), (2, 3), (0, 6)], [(4, 5), (1, 3), (2, 5)]):
            wanted = {axis: slice(*part) for axis, part in zip(sizes, parts, strict=True)}
            got = source.read(lambda index: tensor[index], sizes, wanted)
            np.testing.assert_array_equal(got, whole[tuple(wanted.values())])
        copy = np.zeros_like(tensor)
        source.write(copy, whole, sizes)
        np.testing.assert_array_equal(copy.reshape(5, 3, 4, 6)[:, block], whole)
        assert np.count_nonzero(copy) == whole.size
    turned = Source("b", "(heads head_dim) embed")
    np.testing.assert_array_equal(
        turned.read(lambda index: tensor[:, :24].T[index], sizes, {a: slice(0, n) for a, n in sizes.items()}),
        tensor[:, :24].reshape(5, 4, 6),
    )


@pytest.mark.covers("C17")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_written_parameters_are_read_again(tmp_path, dtype):
    program = program_of(FAMILIES / "gemma3", "fsdp")
    params = jax.device_get(load(program, FAMILIES / "gemma3"))
    by_path = {parameters.path_name(path): a for path, a in jax.tree_util.tree_leaves_with_path(params)}
    tensors = published.tensors_of(
        lambda path, layer: by_path[path] if layer is None else by_path[path][layer],
        program.abstract_state.params,
        program.param_specs,
        family_tensors.named_sources(program.model),
        limits={"vocab": 83},
        dtype=dtype,
    )
    size = published.write(tmp_path, tensors, shard_bytes=20_000)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert len(files) > 3
    assert safetensors_files.INDEX in files
    assert size == sum(a.nbytes for f in files if f.endswith("tensors") for a in load_file(tmp_path / f).values())
    shutil.copy(FAMILIES / "gemma3" / "config.json", tmp_path)
    again = jax.device_get(load(program, tmp_path))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype).astype(np.float32)), again, params)


def test_a_number_that_overflows_the_dtype_is_refused_and_nothing_is_left(tmp_path):
    shapes = {"~": {"a": np.zeros((6, 4), np.float32), "b": np.zeros((6, 4), np.float32)}}
    spec = logical.ParamSpec(axes=("embed", "mlp"), kind="matrix")
    values = {"a": np.ones((6, 4), np.float32), "b": np.full((6, 4), np.inf, np.float32)}
    specs, sources = {"~": {"a": spec, "b": spec}}, {name: Source(f"model.{name}", "embed mlp") for name in "ab"}

    def written(dtype):
        tensors = published.tensors_of(
            lambda path, layer: values[path], shapes, specs, sources, limits={}, dtype=np.dtype(dtype)
        )
        return published.write(tmp_path, tensors, shard_bytes=1)

    assert written(np.float16) == 96  # infinite before: nothing overflows
    for file in tmp_path.iterdir():
        file.unlink()
    values["b"] = np.full((6, 4), -65536.0, np.float32)
    with pytest.raises(UserError, match=r"model\.b has -65536, .*float16.* 65504.*bfloat16 or float32"):
        written(np.float16)
    assert not list(tmp_path.iterdir())
    assert written(ml_dtypes.bfloat16) == 96


def test_the_index_has_the_name_of_its_files_and_is_written_last(tmp_path, monkeypatch):
    tensors = {name: np.zeros(3, np.float32) for name in "ba"}
    there = []
    write = paths.write_text_atomically
    monkeypatch.setattr(
        paths, "write_text_atomically", lambda *a: there.extend(f.name for f in tmp_path.iterdir()) or write(*a)
    )
    published.write(tmp_path, iter(tensors.items()), stem="adapter_model", shard_bytes=1)
    files = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(there) == files
    index = json.loads((tmp_path / "adapter_model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": files[1], "b": files[0]}


def test_all_differences_are_listed_at_once(llama):
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:20]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    save_file(tensors, llama / "model.safetensors")
    program = program_of(FAMILIES / "llama2", "fsdp")
    source = program.model.published(str(llama))
    with pytest.raises(UserError) as caught:
        warm_start.require_fit(source, program.abstract_state.params, program.param_specs, ("*",))
    said = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight [44, 24]" in said
    assert "model.norm.weight: shape [20], the model needs [24]" in said
    assert "left over: model.layers.0.self_attn.q_proj.bias [24]" in said


def test_patterns_choose_what_is_read_of_a_folder(llama):
    program = program_of(FAMILIES / "llama2", "fsdp")
    source, abstract = program.model.published(str(llama)), program.abstract_state.params
    patterns = ("layers/*", "embedding")
    warm_start.require_fit(source, abstract, program.param_specs, patterns)
    fresh = jax.device_get(program.init_params())
    found = jax.device_get(warm_start.load(source, program.init_params, abstract, program.param_specs, patterns))
    whole = jax.device_get(load(program, llama))
    jax.tree.map(np.testing.assert_array_equal, found["layers/block"], whole["layers/block"])
    np.testing.assert_array_equal(found["~"]["embedding"], whole["~"]["embedding"])
    np.testing.assert_array_equal(found["~"]["unembedding"], fresh["~"]["unembedding"])


def test_a_model_of_another_size_is_refused_with_both_shapes(llama):
    program = program_of(FAMILIES / "llama2", "fsdp", vocab_size=96)
    with pytest.raises(UserError, match=r"embed_tokens.weight: shape \[83, 24\], the model needs \[96, 24\]"):
        load(program, llama)


def indexed(folder, text):
    """Turns the folder into one with an index."""
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / safetensors_files.INDEX).write_text(text)


def edited(folder, old, new):
    """Replaces bytes of the first tensor's entry in the header."""
    content = (folder / "model.safetensors").read_bytes()
    assert old in content
    (folder / "model.safetensors").write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "is truncated"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no header"), "not a safetensors file"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "torch pickles .*save_pretrained"),
        (
            lambda f: (f / "model.safetensors").unlink(),
            "no model.safetensors, nor .*; it has config.json, reference.npz",
        ),
        (lambda f: indexed(f, '{"weight_map": {"a": "model-1.safetensors"}}'), "model-1.safetensors is missing"),
        (lambda f: indexed(f, '{"weight_map": {"a": "one.safetensors"}}'), "1 tensor that the files do not have"),
        (lambda f: indexed(f, '{"weight_map": '), "index.json: malformed .not JSON"),
        (lambda f: indexed(f, '{"weights": {}}'), "index.json: malformed .weight_map is missing"),
        (lambda f: indexed(f, '{"weight_map": ["a"]}'), "index.json: malformed .weight_map is list"),
        (lambda f: indexed(f, '{"weight_map": {"a": 1, "b": 2}}'), "malformed .1 is not the name of a file"),
        (lambda f: indexed(f, '{"weight_map": {"a": "../model.safetensors"}}'), "is outside of the folder"),
        (
            lambda f: (
                (f / "model.safetensors").rename(f / "a.safetensors")
                and shutil.copy(f / "a.safetensors", f / "b.safetensors")
            ),
            "is in a.safetensors and in b.safetensors",
        ),
        (lambda f: edited(f, b'"F32"', b'"F64"'), "the header is damaged"),
        (lambda f: edited(f, b'"F32"', b'"F8_"'), "tensors of dtype F8_; supported are"),
        (lambda f: edited(f, b'"data_offsets":[0', b'"data_offsets":["'), "not a safetensors file"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: malformed JSON .expected an object"),
    ],
)
def test_a_damaged_folder_is_refused_in_words(llama, damage, message):
    damage(llama)
    with pytest.raises(UserError, match=message):
        pretrained.model(str(llama)).published(str(llama))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (4, 3), (2, 3, 2)])
@pytest.mark.parametrize("block", [1, 4, 2**20])
def test_the_first_rows_of_tensors_are_compared(tmp_path, monkeypatch, shape, block):
    monkeypatch.setattr(safetensors_files, "_BLOCK", block)
    last = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    other = last.copy()
    other.reshape(-1)[-1:] += 1
    save_file({"one": last, "same": last.copy(), "other": other}, tmp_path / "model.safetensors")
    tensors = safetensors_files.tensors(paths.Path(tmp_path))
    rows = shape[0] if shape else 1
    assert safetensors_files.are_equal(tensors["one"], tensors["same"])
    assert safetensors_files.are_equal(tensors["one"], tensors["other"]) == (last.size == 0)
    assert safetensors_files.are_equal(tensors["one"], tensors["other"], rows) == (last.size == 0)
    assert safetensors_files.are_equal(tensors["one"], tensors["other"], rows - 1)


ONE = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HEADERS = {
    "nested": ("[" * 200_000, "nested"),
    "an infinite number": ('{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}', "1e400 is not finite"),
    "a negative dimension": ('{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}', "integers from 0 up"),
    "a text as shape": ('{"a":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}', "integers from 0 up"),
    "offsets as floats": ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0.0,8.0]}}', "integers from 0 up"),
    "true as an offset": ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[false,8]}}', "integers from 0 up"),
    "no offsets": ('{"a":{"dtype":"F32","shape":[2]}}', "integers from 0 up"),
    "a tensor twice": (f"{{{ONE},{ONE}}}", "'a' occurs twice"),
    "an overlap": (f'{{{ONE},"b":{{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}}}', "overlaps the tensor before"),
    "the same bytes": (
        f'{{{ONE},"b":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}',
        "overlaps the tensor before",
    ),
    "a hole": (f'{{{ONE},"b":{{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}}}', "leaves unused bytes"),
    "a hole at the start": ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "leaves unused bytes"),
    "no object": ("[1]", "expected an object"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_malformed_header_is_an_error(tmp_path, what):
    header, said = HEADERS[what]
    content = header.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(
        len(content).to_bytes(8, "little") + content + bytes({"an overlap": 12, "a hole": 20}.get(what, 8))
    )
    if what == "a hole at the start":
        file.write_bytes(file.read_bytes() + bytes(4))
    with pytest.raises(UserError, match=said):
        safetensors_files.tensors(paths.resolve(tmp_path))


@pytest.mark.parametrize("name", ["", ".", "..", "../model.safetensors", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="is outside of the folder"):
        safetensors_files.tensors(paths.resolve(tmp_path))


def test_a_configuration_that_the_decoder_cannot_follow_is_refused(llama, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        pretrained.model(str(tmp_path))
    config = json.loads((llama / "config.json").read_text())

    def refused(**changes):
        (llama / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError) as caught:
            pretrained.model(str(llama))
        return str(caught.value)

    assert "known are deepseek_v3, gemma2, gemma3, gemma3_text, gemma4, gemma4_text, gemma4_unified" in refused(
        model_type="bert"
    )
    said = refused(attention_bias=True, mlp_bias=True)
    assert "attention_bias = True is not supported (expected False); mlp_bias = True is not" in said
    assert "activation 'relu' is not known" in refused(hidden_act="relu")
    assert "rope scaling 'dynamic' is not known" in refused(rope_scaling={"type": "dynamic", "factor": 2.0})
    (llama / "config.json").write_text("{")
    with pytest.raises(UserError, match="malformed JSON"):
        pretrained.model(str(llama))


def test_files_that_do_not_belong_to_the_model_are_not_read(llama):
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, llama / "model-00001-of-00002.safetensors")
    (llama / safetensors_files.INDEX).write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    tensors = safetensors_files.tensors(paths.resolve(llama))
    assert tensors["model.norm.weight"].shape == (24,)
    (llama / "model.safetensors").rename(llama / "one.safetensors")
    weight_map = dict.fromkeys(tensors, "one.safetensors")
    (llama / safetensors_files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert safetensors_files.tensors(paths.resolve(llama))["model.norm.weight"].shape == (24,)


def test_a_folder_without_config_json_is_told_from_a_run(llama, tmp_path):
    assert published_files.is_published(str(llama))
    assert not published_files.is_published(str(tmp_path))
    assert not published_files.is_published(str(tmp_path / "absent"))
    (llama / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json \(it has model\.safetensors\)"):
        published_files.is_published(str(llama))


@pytest.mark.covers("C16")
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama2", marks=pytest.mark.slow)])  # each divides tensors
def test_a_host_reads_every_byte_of_a_bucket_once(bucket, family, monkeypatch):
    """The files of the emulator, under a layout that divides rows and columns of tensors."""
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    for file in (FAMILIES / family).iterdir():
        bucket.write(f"gs://models/{family}/{file.name}", file.read_bytes())
    program = program_of(FAMILIES / family, "fsdp_tensor")
    bucket.ranges()
    params = load(program, f"gs://models/{family}")
    jax.tree.map(np.testing.assert_array_equal, params, load(program, FAMILIES / family))
    read = sorted(r for name, *r in bucket.ranges() if name == f"models/{family}/model.safetensors")
    size = (FAMILIES / family / "model.safetensors").stat().st_size
    assert sum(stop - start for start, stop in read) == size
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(read))


def test_rows_that_no_chip_of_the_host_needs_are_not_read(llama, monkeypatch):
    asked = []
    monkeypatch.setattr(paths, "is_remote", lambda path: True)
    monkeypatch.setattr(
        paths, "read_range", lambda path, start, stop: asked.append((start, stop)) or bytes(stop - start)
    )
    tensor = safetensors_files.Tensor(paths.resolve(llama), np.dtype(np.float32), (100, 6), 1000)
    columns = [slice(0, 3), slice(3, 6)]
    parts = [(slice(*rows), c) for rows in ((10, 20), (15, 30), (30, 31), (90, 100)) for c in columns]
    reader = safetensors_files.Reader(tensor, parts)
    assert asked == [(1000 + 10 * 24, 1000 + 31 * 24), (1000 + 90 * 24, 1000 + 100 * 24)]
    assert [reader(part).shape for part in parts] == [(10, 3)] * 2 + [(15, 3)] * 2 + [(1, 3)] * 2 + [(10, 3)] * 2


def test_a_host_needs_memory_for_its_shards_and_one_tensor(tmp_path):
    """`tests/run.sh lab folder_memory` measures 8 billion parameters; here, 3 million."""
    model = transformer.Transformer(
        vocab_size=2048, num_layers=6, embed_dim=256, mlp_dim=512, num_heads=4, num_kv_heads=2, dtype="float32"
    )
    folder_memory.write_sparse(model, tmp_path)
    program = program_of(tmp_path, "fsdp")
    source = program.model.published(str(tmp_path))
    leaves = jax.tree.leaves(program.abstract_state.params)
    largest_parameter = max(leaf.size for leaf in leaves) * 4
    largest_tensor = 2048 * 256 * 2
    params = source.load(program.abstract_state.params, program.param_specs)  # imports what loading needs
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 4 * largest_parameter
    most, peaks = largest_parameter + largest_tensor + 2 * 2**20, []  # with headers
    while len(peaks) < 3 and min(peaks, default=most) >= most:
        peaks.append(_peak_of(lambda: source.load(program.abstract_state.params, program.param_specs)))
    assert min(peaks) < most


def _peak_of(run):
    """Returns the bytes that Python holds at once in `run`; other threads of the process can add theirs."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_axes_of_a_parameter_say_how_it_is_stored():
    model = pretrained.model(str(FAMILIES / "gpt2"))
    shapes, specs = logical.abstract_init(
        model.init, jax.random.key(0), program_of(FAMILIES / "gpt2", "fsdp").abstract_batch
    )
    assert {parameters.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)} == set(
        family_tensors.sources(model)
    )
    assert specs["layers/block"]["query"].axes == ("layers", "embed", "heads", "head_dim")
