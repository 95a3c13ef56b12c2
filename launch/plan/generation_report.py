"""Compiles generation for a slice, and prints memory and predicted speed."""

from collections.abc import Sequence
from typing import Any

from core import slices, units
from core.errors import UserError
from core.types import ExtendsCache, HasVocabulary, can, lacking
from launch.config import loader
from launch.plan import compiled_report
from parallel import strategy
from parallel.compiled import compiling
from parallel.compiled.compiling import OutOfHbmError
from parallel.generation import generating, text_part
from parallel.planning import generation_cost
from parallel.planning.generation_cost import GenerationCost

PROBLEM = "problem"  # key of the reason why a batch size has no prediction


def predict(path: str, *, slice_name: str, bindings: Sequence[str], batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Compiles generation for each batch size; prints memory and predicted speed.

    Args:
      path: the experiment's gin file; its LENGTH is the number of positions.
      batch_sizes: numbers of rows; empty: the experiment's BATCH_SIZE.

    Returns:
      JSON values, one for each batch size; with `problem` if it does not fit.

    Raises:
      UserError: the model lacks an ability, or a batch size does not divide over the slice.
    """
    experiment = loader.load(path, bindings=bindings, slice_name=slice_name).build()
    bound = text_part.program_of(experiment.bind(compiling.devices_of(slices.get(experiment.slice))))
    for ability in (ExtendsCache, HasVocabulary):
        if not can(bound.model, ability):
            raise UserError(f"--generate: {lacking(bound.model, ability)}")
    slots, shards, batch_sizes = (
        experiment.row_length,
        bound.partitioner.row_shards,
        batch_sizes or [experiment.batch_size],
    )
    if wrong := [rows for rows in batch_sizes if rows % shards]:
        raise UserError(
            f"--generate: {wrong[0]} rows do not divide over {shards} parts of the slice with rows of their own: "
            f"expected a multiple of {shards}"
        )
    mesh = strategy.mesh_text(bound.partitioner.shape)
    found: list[dict[str, Any]] = []
    for rows in batch_sizes:
        try:
            cost = generation_cost.generation_cost(bound, rows=rows, slots=slots, chunk=min(generating.CHUNK, slots))
        except OutOfHbmError as error:
            found.append({"rows": rows, PROBLEM: f"does not fit: needs {error.needed} of {error.present}"})
            print(f"generation of {units.counted(rows, 'row')}: {found[-1][PROBLEM]}")
            continue
        _print(cost, layout=f"{bound.partitioner.strategy.name} ({mesh})")
        found.append(cost.as_json())
    return found


def _print(found: GenerationCost, *, layout: str) -> None:
    slice_ = found.token_memory.slice
    usable, sizes = slice_.chip.usable_hbm_bytes, (found.param_bytes, found.cache_bytes)
    peak = max(found.chunk_memory.peak_bytes, found.token_memory.peak_bytes)
    params, cache, most, all_of_it = (units.size(size, digits=4) for size in (*sizes, peak, usable))
    seconds = found.chunk_memory.compile_seconds + found.token_memory.compile_seconds
    print(f"generation of {units.counted(found.rows, 'row')} of up to {found.slots:,} positions under {layout},")
    per = f"per {slice_.chip.unit}"
    print(f"compiled for {slice_.name} (not run): peak {most} of {all_of_it} {per}; {seconds:.0f} s to compile")
    print(f"  parameters {params}, cache {cache} {per}")
    for what, (slow, fast) in {
        "new tokens": found.tokens_per_second,
        f"tokens of prompts, in chunks of {found.chunk}": found.prompt_tokens_per_second,
    }.items():
        print(f"  predicted, not measured: {slow:,.0f} to {fast:,.0f} {what} per second, all rows together")
    least, most = (f"{1000 * seconds:.2f} ms" for seconds in found.token_reads)
    all_experts = "" if least == most else f", or {most} if all experts are used"
    print(f"  a token of every row takes at least {least}{all_experts}: what it needs is read from HBM once")
    unpriced = [text for time in (found.chunk_time, found.token_time) for text in time.unpriced if "loop" not in text]
    print(f"  not included: {', '.join(unpriced) or 'nothing'}")
    compiled_report.print_warnings(found.warnings)
