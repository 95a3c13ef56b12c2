"""Memory and predicted time of generation on a chip, from its programs as compiled for TPUs."""

import math
import time
from typing import Any, NamedTuple, cast

import jax

from core.logical import Axes
from core.types import Params
from parallel.compiled import compiling, traffic
from parallel.compiled.analysis import Analysis
from parallel.compiled.compiling import Compiled
from parallel.compiled.hlo import costs, executions, program
from parallel.compiled.hlo.messages import compiler_messages, warnings
from parallel.generation.decoding import Decoder
from parallel.partitioner import Program
from parallel.planning import cost, model_trace
from parallel.planning.cost import StepTime

_FIX = "Shard more (tensor), or generate fewer rows (BATCH_SIZE) of fewer positions (LENGTH)."


class GenerationCost(NamedTuple):
    """The cost of generation on one chip.

    Attributes:
      chunk: ids of each prompt that are processed together.
      chunk_memory, chunk_time: of the program that processes a chunk of every prompt.
      token_memory, token_time: of the program that adds a token to every row.
      token_reads: seconds in which a chip reads from HBM what a token of every row needs: at least, and with the
        matrices of all experts.
    """

    rows: int
    slots: int
    chunk: int
    param_bytes: int
    cache_bytes: int
    chunk_memory: Compiled
    token_memory: Compiled
    chunk_time: StepTime
    token_time: StepTime
    token_reads: tuple[float, float]
    warnings: list[str]

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Predicted new tokens per second: with no traffic hidden and all experts used, and with all of it hidden."""
        least, most = self.token_reads
        slow, fast = max(most, self.token_time.exposed), max(least, self.token_time.hidden)
        return self.rows / slow, self.rows / fast

    @property
    def prompt_tokens_per_second(self) -> tuple[float, float]:
        """Predicted tokens of prompts per second: with no traffic hidden, and with all of it."""
        tokens = self.rows * self.chunk
        return tokens / self.chunk_time.exposed, tokens / self.chunk_time.hidden

    def as_json(self) -> dict[str, Any]:
        """Returns sizes, bytes per chip and predicted rates as JSON values."""
        (slow, fast), prompts = self.tokens_per_second, self.prompt_tokens_per_second
        return {
            "slice": self.token_memory.slice.name,
            "rows": self.rows,
            "positions": self.slots,
            "chunk": self.chunk,
            "param_bytes": self.param_bytes,
            "cache_bytes": self.cache_bytes,
            "peak_bytes": max(self.chunk_memory.peak_bytes, self.token_memory.peak_bytes),
            "predicted_tokens_per_second": [slow, fast],
            "predicted_prompt_tokens_per_second": list(prompts),
        }


def generation_cost(bound: Program, *, rows: int, slots: int, chunk: int) -> GenerationCost:
    """Compiles generation for the chips of the program's slice, and returns its cost.

    Args:
      bound: its model must have `vocab_size`.
      rows: must divide over the groups of chips that have different rows.
      chunk: ids of each prompt that are processed together.

    Raises:
      OutOfHbmError: generation does not fit into HBM.
    """
    decoder, model = Decoder(bound), cast(Any, bound.model)
    params, cache = decoder.abstract(rows, slots)
    with compiler_messages() as messages:
        prefill = _compiled(decoder.lower_prefill(params, cache, rows=rows, chunk=chunk), bound)
        decode = _compiled(decoder.lower_decode(params, cache, rows=rows, vocab_size=model.vocab_size), bound)
    param_bytes, cache_bytes = (sum(map(_bytes_per_chip, jax.tree.leaves(tree))) for tree in (params, cache))
    least, most = read_bytes(params, bound.axes.params)
    bandwidth = bound.partitioner.slice.chip.hbm_bytes_per_second
    chunk_time, token_time = (cost.step_time(_analysis(result, bound), bound) for result in (prefill, decode))
    return GenerationCost(
        rows,
        slots,
        chunk,
        param_bytes,
        cache_bytes,
        prefill,
        decode,
        chunk_time,
        token_time,
        ((least + cache_bytes) / bandwidth, (most + cache_bytes) / bandwidth),
        warnings(messages.text),
    )


def _compiled(lowered: Any, bound: Program) -> Compiled:
    start = time.perf_counter()
    executable = compiling.compile_lowered(lowered, bound, what="generation", fix=_FIX)
    return compiling.results(executable, bound, seconds=time.perf_counter() - start)


def _analysis(result: Compiled, bound: Program) -> Analysis:
    module = program.parse(result.hlo)
    run = executions.walk(module)
    collectives = traffic.collectives(module, run, traffic.grid(bound.partitioner.mesh))
    return Analysis(result, costs.summarize(run), collectives, [], [])


def read_bytes(params: Params, param_axes: Any) -> tuple[int, int]:
    """Returns the bytes of parameters that a chip reads for a token: without experts, and with all of them.

    Of a table, only the rows of the tokens are read, unless it is also the output matrix.

    Args:
      params: shapes with shardings; of layers, one array or a tuple with one for each layer.
      param_axes: the `Axes` of each parameter.
    """
    tree: Any
    axes_of, tree = jax.tree.flatten(param_axes, is_leaf=lambda node: isinstance(node, Axes))
    parts = zip(axes_of, tree.flatten_up_to(params), strict=True)
    named = [(leaf, axes) for axes, part in parts for leaf in jax.tree.leaves(part)]
    is_tied = not any(axes.names == model_trace.OUTPUT for _, axes in named)
    used = [
        (leaf, axes)
        for leaf, axes in named
        if axes.names[:1] != model_trace.TABLE or (is_tied and axes.names == model_trace.EMBEDDING)
    ]
    most = sum(_bytes_per_chip(leaf) for leaf, _ in used)
    return most - sum(_bytes_per_chip(leaf) for leaf, axes in used if "expert" in axes.names), most


def _bytes_per_chip(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
