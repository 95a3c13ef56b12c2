"""`launch/run describe`: describes a published model from its `config.json`."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

from core import optimizers, slices, units
from core.checkpoints import published_files
from core.errors import UserError
from core.slices import GIB, Slice
from launch import flags, terminal
from launch.check import chip_memory
from models import lora, pretrained
from models.decoder.published import families
from models.decoder.transformer import Transformer, parts_of
from parallel import strategies
from parallel.compiled import compiling, report
from parallel.generation.decoding import Decoder
from parallel.partitioner import Partitioner, Program
from tasks import streams

COMMAND = ("layouts", "describe")
HELP = "say what a published model is: layers, parameters, cache, FLOPs, and slices that hold it for tuning"
EXAMPLE = """launch/run describe hf://HuggingFaceTB/SmolLM2-135M
  launch/run describe gs://models/Llama-3.1-8B --length 8192"""
_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
_LENGTH = 2048
_MOST_CHIPS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder with config.json: local, gs:// or hf://OWNER/NAME")
    help_ = "tokens of a row (default: 2048, or the model's positions if it has fewer)"
    parser.add_argument("--length", metavar="N", type=flags.at_least(2), help=help_)


def run(args: argparse.Namespace) -> int:
    """Prints the description; reads no weights."""
    model = pretrained.model(args.folder, remat="full")
    length = _length(model, args.length)
    config = families.read_config(published_files.small_files(args.folder))
    only = " (its language model alone)" if "text_config" in config else ""
    terminal.say(f"{'family':<12}{config['model_type']}{only}")
    for name, said in _facts(dataclasses.replace(model, vocab_multiple=1), length=length):
        terminal.say(f"{name:<12}{said}")
    tuned = {"all parameters": model, "LoRA of attention, rank 8": lora.adapted(model=model, targets=_matrices(model))}
    table = Table("chips", *tuned, box=None)
    for generation in _GENERATIONS:
        table.add_row(generation, *(_smallest(each, generation, length=length) for each in tuned.values()))
    terminal.say("\nsmallest slice that holds a training step, by arithmetic: fsdp(), AdamW, remat 'full', and")
    terminal.say(f"a row of {length:,} tokens per JAX device; GiB of each")
    terminal.console(100).print(table)
    return 0


def _matrices(model: Transformer) -> tuple[str, ...]:
    mixers = (part for kind in model.layer_kinds for part in kind.mixers)
    return tuple(dict.fromkeys(name for part in mixers for name in part.matrices))


def _length(model: Transformer, asked: int | None) -> int:
    most = model.max_positions or asked or _LENGTH
    if asked is not None and asked > most:
        raise UserError(f"--length {asked}: the model has {most} positions; give {most} or less")
    return asked or min(_LENGTH, most)


def _facts(model: Transformer, *, length: int) -> Iterator[tuple[str, str]]:
    """Yields rows (name, text); the model's vocabulary must not be padded."""
    layers = [parts_of(model.layer_kind(layer)) for layer in range(model.num_layers)]
    yield "layers", _pattern([" + ".join(map(_part, parts.values())) for parts in layers])
    widths = f"embed {model.embed_dim:,}, mlp {model.mlp_dim:,}, heads {model.num_heads} ({model.num_kv_heads} of keys)"
    yield "sizes", f"{widths}, vocabulary {model.vocab_size:,}"
    program = _program(model, slices.get("v5e-1"), jax.devices()[:1], length=length)
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.abstract_state.params))
    used = sum(part.work(model, length).matrices for parts in layers for part in parts.values())
    used += model.embed_dim * model.vocab_size
    if model.layer_inputs is not None:
        width = model.layer_inputs.width
        used += model.layer_inputs.work(model)
        yield "inputs", f"{width:,} for each layer, from a table of {model.vocab_size:,} x {model.num_layers * width:,}"
    yield "parameters", f"{total:,}; a token is multiplied with {used:,.0f}"
    yield "cache", f"{units.size(_cache_bytes(program, length))} for a row of {length:,} tokens, in {model.dtype}"
    yield "training", f"{units.significant(model.flops_per_token(length) / 1e9)} GFLOPs a token, in rows of {length:,}"


def _pattern(layers: Sequence[str]) -> str:
    """Describes the layers: `24: 5 x A, B; 4 times` means 24 layers, a pattern of six that repeats four times."""
    period = next(n for n in range(1, len(layers) + 1) if all(a == b for a, b in zip(layers, layers[n:], strict=False)))
    runs = [(name, len(list(run))) for name, run in itertools.groupby(layers[:period])]
    said = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in runs)
    times = len(layers) / period
    return f"{len(layers)}: {said}" + (f"; {times:.3g} times" if times > 1 and period > 1 else "")


def _part(part: Any) -> str:
    fields = [field for field in dataclasses.fields(part) if getattr(part, field.name) != field.default]
    return f"{type(part).__name__}({', '.join(f'{f.name}={getattr(part, f.name)!r}' for f in fields)})"


def _cache_bytes(program: Program, length: int) -> int:
    _, cache = Decoder(program).abstract(1, length)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def _smallest(model: Any, generation: str, *, length: int) -> str:
    for slice_ in slices.SLICES.values():
        if not slice_.name.startswith(f"{generation}-") or slice_.devices > _MOST_CHIPS:
            continue
        try:
            program = _program(model, slice_, compiling.devices_of(slice_), length=length)
        except UserError:  # `fsdp` does not divide a dimension of the model
            continue
        have = slice_.chip.usable_hbm_bytes
        if report.totals(program).everything > have:
            continue
        found, why_not = chip_memory.estimate(program)
        if found is None:
            return why_not
        if found.peak_bytes <= have:
            return f"{slice_.name}: {units.significant(found.peak_bytes / GIB)} of {have / GIB:.4g}"
    return f"none of {_MOST_CHIPS} chips or fewer that divide the width"


def _program(model: Any, slice_: Slice, devices: Sequence[jax.Device], *, length: int) -> Program:
    bound = Partitioner(strategies.fsdp(), slice=slice_, devices=devices)
    adamw = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    return bound.program(model, adamw, streams.batch_spec(slice_.devices, length=length), seed=0)
