"""`launch/run export`: writes a run's model as the folder of a published model."""

import argparse
import dataclasses
import fnmatch
import functools
import importlib
import itertools
import json
import math
from collections.abc import Callable, Collection
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np

from core import logical, units
from core.batches import batch_shapes
from core.checkpoints import inspection, published, published_files, reading, steps, warm_start
from core.checkpoints.arrays import Arrays
from core.errors import UserError
from core.files import paths
from core.types import FramesTexts, can
from launch import environment, flags
from launch.experiment import Experiment
from launch.experiments import saved_run
from launch.exported import Exported, Read
from launch.runs import warm_start as warm_starts
from models.decoder.config import DecoderConfig
from models.decoder.published import families, family_tensors
from tasks import streams
from tasks.text import generation_settings
from tasks.text.tokenizer_folders import FolderTokenizer

COMMAND = ("runs", "export")
HELP = "write the model of a run as a Hugging Face folder: config.json, safetensors, tokenizer"
EXAMPLE = """launch/run export runs/first --out first-7b --dtype bfloat16
  launch/run export runs/first@1000 --out first-1000 --dtype float32
  launch/run export runs/first --out first-7b --push OWNER/first-7b"""

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN[@STEP]", help="without @STEP: the latest step")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a new or empty local folder")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="then upload it to this repository of the hub (HF_TOKEN), in place of weights there",
    )
    parser.add_argument(
        "--merge", action="store_true", help="add adapters to their matrices, instead of writing a PEFT adapter"
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of the weights (default: bfloat16; float32 for an adapter without its base)",
    )
    flags.add(parser, "--gin", help="overrides one binding of the run, such as INIT_FROM if its base was moved")


def run(args: argparse.Namespace) -> int:
    """Writes the folder and, with --push, uploads it."""
    jax.config.update("jax_platforms", "cpu")  # the chips belong to the run
    if args.push:
        published_files.check_name(args.push)
    out = _free_folder(args.out)
    step = _step(args.run)
    run_dir = str(step.parent.parent)
    experiment = saved_run.read(run_dir, step=step, bindings=args.gin).experiment()
    exporter = _exporter(args.run, experiment.model)
    if (vocabulary := experiment.task.vocabulary) is not None:
        vocabulary.prepare(run_dir, is_host_zero=False, sample=lambda: ())
    shapes, specs = _shapes(experiment)
    step = _averaged(step, experiment, shapes, specs)
    _check_parameters(args.run, step, experiment, shapes, specs)
    exported = exporter(args.run, experiment, step, args.merge)
    inspection.require_intact_parameters(step)
    paths.require_writable(out)
    is_adapter = exported.file == family_tensors.ADAPTER_CONFIG
    dtype = args.dtype or ("float32" if is_adapter else "bfloat16")
    read = exported.reads(_reader(step, experiment, shapes, specs))
    kept_shapes, kept_specs = (_of(tree, exported.sources) for tree in (shapes, specs))
    model, stored = cast(Any, experiment.model), _DTYPES[dtype]
    limits = {"vocab": model.vocab_size}
    written = published.tensors_of(read, kept_shapes, kept_specs, exported.sources, limits=limits, dtype=stored)
    options: dict[str, Any] = {"stem": "adapter_model", "shard_bytes": math.inf} if is_adapter else {}  # as PEFT reads
    with reading.refusing_damage(step):
        size = published.write(out, itertools.chain(written, exported.others(stored)), **options)
    _write_small_files(experiment, exported, out)
    config = exported.config if is_adapter else {**exported.config, "torch_dtype": dtype}
    paths.write_text_atomically(out / exported.file, json.dumps(config, indent=2) + "\n")  # last: it marks the end
    what = "adapter of " * is_adapter + exported.kind
    print(f"{out}: {what}, {units.size(size)} of {dtype}, from step {step.name} of {run_dir}")
    if exported.note:
        print(exported.note)
    if args.push:
        print(f"uploaded to {published_files.push(out, args.push)}")
    return 0


def _exporter(run: str, model: Any) -> Callable[[str, Experiment, paths.Path, bool], Exported]:
    if isinstance(model, DecoderConfig):
        return _decoder
    for module in environment.declared("EXPORTS"):
        if (found := importlib.import_module(module).exporter(model)) is not None:
            return found
    listed = ", or ".join(["a decoder", *environment.declared("EXPORTS").values()])
    raise UserError(f"{run}: {type(model).__name__} cannot be exported; expected {listed}")


def _is_averaging(experiment: Experiment, shapes: Any, specs: Any) -> bool:
    optimizer = experiment.optimizer.bound(specs)
    return optimizer.is_averaging(jax.eval_shape(optimizer.init, shapes))


def _averaged(step: paths.Path, experiment: Experiment, shapes: Any, specs: Any) -> paths.Path:
    """Returns the step with the parameters alone if these are the average and it has the same number."""
    alone = step.parent.parent / steps.PARAMS_FOLDER / step.name
    return alone if _is_averaging(experiment, shapes, specs) and steps.is_complete(alone) else step


def _check_parameters(run: str, step: paths.Path, experiment: Experiment, shapes: Any, specs: Any) -> None:
    saved = warm_start.SavedParameters(step)
    if differences := saved.problems(shapes, specs):
        listed = "\n  ".join(units.shortened(differences, most=warm_start.MOST_LINES))
        raise UserError(f"{run}: the parameters of step {step.name} are not those of its model:\n  {listed}")
    if _is_averaging(experiment, shapes, specs) and not saved.is_averaged:
        raise UserError(
            f"{run}: the optimizer averages parameters, and step {step.name} has the average in the optimizer's "
            "state, which is not exported; a step of the parameters alone (params_checkpoint_interval) is"
        )


def _decoder(run: str, experiment: Experiment, step: paths.Path, is_merged: bool) -> Exported:
    model: Any = experiment.model
    if model.lora is not None and not is_merged:
        _require_base_of_peft(run, experiment)
    if is_merged and model.lora is None:
        raise UserError(f"{run} has no adapters: leave --merge out")
    if model.lora is None or is_merged:
        base = dataclasses.replace(model, lora=None)
        kind, (ids, _) = families.family(base), _generation(experiment)
        config = {**families.config(base, kind), **ids}
        reads = functools.partial(family_tensors.merged, model=model)
        return Exported(kind, published_files.CONFIG, config, family_tensors.named_sources(base, kind), reads)
    kind = families.read_config(published_files.small_files(experiment.initialization.init_from))["model_type"]
    config = family_tensors.adapter_config(model, _base(step, experiment), kind)
    sources = family_tensors.adapter_sources(model, kind)
    return Exported(kind, family_tensors.ADAPTER_CONFIG, config, sources)


def _step(text: str) -> paths.Path:
    saved_run.refuse_published(text)
    return steps.find(text)


def _require_base_of_peft(run: str, experiment: Experiment) -> None:
    chosen, base = experiment.initialization, experiment.initialization.init_from
    if not _is_published(base):
        raise UserError(f"{run}: its base is {base or 'no published model'!r}, which PEFT cannot load: give --merge")
    config = families.read_config(published_files.small_files(base))
    kind = config["model_type"]
    if families.known()[kind].inside:
        raise UserError(f"{run}: PEFT has other names for the decoder in its base {base!r} ({kind}): give --merge")
    if chosen.init_layers:
        raise UserError(f"{run}: its base has other layers than {base!r} (INIT_LAYERS): give --merge")
    if chosen.init_renames:
        raise UserError(f"{run}: its base has other names than {base!r} (INIT_RENAMES): give --merge")
    if lines := _other_settings(experiment.model, config, base):
        raise UserError(f"{run}: PEFT would load {base!r}, whose settings differ: {'; '.join(lines)}: give --merge")
    read = family_tensors.sources(cast(Any, experiment.model), kind)
    if own := [path for path in read if not any(fnmatch.fnmatch(path, p) for p in chosen.init_patterns)]:
        listed = ", ".join(units.shortened(own, most=3))
        raise UserError(
            f"{run}: {units.counted(len(own), 'parameter')} of its base began from the seed, not from {base!r} "
            f"({listed}; INIT_PATTERNS): give --merge"
        )


def _other_settings(model: Any, config: Any, base: str) -> list[str]:
    """Returns a line for each setting that makes a decoder without its adapters compute otherwise than its base."""
    most = families.fields(config)["max_positions"]
    alone = dataclasses.replace(model, lora=None, quantization="none", max_positions=most)
    return families.differences(alone, config, where=f"{published_files.described(base)}/{published_files.CONFIG}")


def _is_published(base: str) -> bool:
    return bool(base) and published_files.is_published(base)


def _base(step: paths.Path, experiment: Experiment) -> str:
    left_out = steps.read(step).left_out
    if left_out is not None and left_out.source.startswith(published_files.HUB):
        return left_out.source
    return experiment.initialization.init_from


def _free_folder(text: str) -> paths.Path:
    out = paths.resolve(text)
    if paths.is_remote(out):
        raise UserError(f"--out {text}: expected a local folder; copy it to the bucket afterwards")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "the folder is not empty" if out.is_dir() else "this is a file"
        raise UserError(f"--out {text}: {what}; give a new folder")
    return paths.check_writable(out)


def _shapes(experiment: Experiment) -> tuple[Any, Any]:
    is_decoder = isinstance(experiment.model, DecoderConfig)
    spec = streams.batch_spec(1, length=8) if is_decoder else experiment.task.spec(experiment.batch_size)
    return logical.abstract_init(experiment.model.init, jax.random.key(0), batch_shapes(spec))


def _of(params: Any, paths_: Collection[str]) -> Any:
    kept = {
        module: {name: leaf for name, leaf in leaves.items() if f"{module}/{name}".removeprefix("~/") in paths_}
        for module, leaves in params.items()
    }
    return {module: leaves for module, leaves in kept.items() if leaves}


def _reader(step: paths.Path, experiment: Experiment, shapes: Any, specs: Any) -> Read:
    """Returns a reader of parameters; those that the checkpoint leaves out are checked before anything is written."""
    arrays, described = Arrays(step), steps.read(step)

    def read(path: str, layer: int | None) -> np.ndarray:
        name = next(n for n in (f"params/{path}", f"params/~/{path}") if n in described.content)
        if name in arrays:
            return arrays.part(name, layer)
        whole = read_again(name)
        return whole if layer is None else whole[layer]

    if (left_out := described.left_out) is None:
        return read
    source, cpu = warm_starts.source_again(experiment, left_out), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes, specs = (reading.by_name({"params": tree}) for tree in (shapes, specs))

    @functools.lru_cache(maxsize=3)  # the most parameters that one tensor is made of
    def read_again(name: str) -> np.ndarray:
        wanted = shapes[name].update(sharding=cpu, dtype=np.float32), specs[name]
        return np.asarray(warm_start.read_of_source(source, {name: wanted})[name])

    for name in left_out.arrays:
        in_run = shapes[name].update(sharding=cpu, dtype=described.kinds[name].partition("[")[0])
        warm_start.read_left_out(source, described, {name: (in_run, specs[name])})
    return read


def _generation(experiment: Experiment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the special ids for config.json, and the content of generation_config.json."""
    task, vocabulary = experiment.task, experiment.task.vocabulary
    if vocabulary is None:
        return {}, {}
    bos_id, stop_ids = vocabulary.bos_id, task.stop_ids() if can(task, FramesTexts) else (vocabulary.eos_id,)
    if not isinstance(vocabulary, FolderTokenizer):
        ends = [i for i in stop_ids if i >= 0]  # -1: a vocabulary of seqio that ends no text
        return {"bos_token_id": bos_id, "eos_token_id": ends[0] if ends else None}, {}
    folder, names = vocabulary.folder, (published_files.CONFIG, published_files.GENERATION_CONFIG)
    if not any((folder / name).exists() for name in names) and _is_published(experiment.initialization.init_from):
        folder = published_files.small_files(experiment.initialization.init_from)  # the other has no model
    return generation_settings.exported(folder, bos_id=bos_id, stop_ids=stop_ids)


def _write_small_files(experiment: Experiment, exported: Exported, out: paths.Path) -> None:
    for name, content in exported.files.items():
        (out / name).write_text(content)
    vocabulary = experiment.task.vocabulary
    if not isinstance(vocabulary, FolderTokenizer):
        print("no tokenizer is written: the run's vocabulary is not one of a published folder")
        return
    for name in published_files.TOKENIZER_FILES:
        if (vocabulary.folder / name).exists():
            (out / name).write_bytes((vocabulary.folder / name).read_bytes())
    published_files.copy_templates(vocabulary.folder, out)
    older = vocabulary.folder / published_files.CHAT_TEMPLATE
    if older.exists() and not (out / published_files.TEMPLATE).exists():  # it comes before that of the tokenizer
        (out / published_files.TEMPLATE).write_text(published_files.read_object(older)["chat_template"])
    _, generation = _generation(experiment)
    (out / published_files.GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")
