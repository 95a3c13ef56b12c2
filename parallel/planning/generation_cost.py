"""Memory and predicted time of generation on a chip, from its programs as compiled for TPUs."""

import math
import time
from typing import Any, NamedTuple, cast

import jax

from parallel.compiled import compiling, traffic
from parallel.compiled.analysis import Analysis
from parallel.compiled.compiling import Compiled
from parallel.compiled.hlo import costs, executions, program
from parallel.compiled.hlo.messages import compiler_messages, warnings
from parallel.generation.decoding import Decoder
from parallel.partitioner import Program
from parallel.planning import cost
from parallel.planning.cost import StepTime

_FIX = "Shard more (tensor), or generate fewer rows (BATCH_SIZE) of fewer positions (LENGTH)."


class GenerationCost(NamedTuple):
    """The cost of generation on one chip.

    Attributes:
      chunk: ids of each prompt that are processed together.
      chunk_memory, chunk_time: of the program that processes a chunk of every prompt.
      token_memory, token_time: of the program that adds a token to every row.
      token_bound: seconds in which a chip reads its parameters and cache from HBM once.
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
    token_bound: float
    warnings: list[str]

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Predicted new tokens per second: with no traffic hidden, and with all of it."""
        slow, fast = (max(self.token_bound, s) for s in (self.token_time.exposed, self.token_time.hidden))
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
    param_bytes, cache_bytes = map(_bytes_per_chip, (params, cache))
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
        (param_bytes + cache_bytes) / bound.partitioner.slice.chip.hbm_bytes_per_second,
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


def _bytes_per_chip(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
