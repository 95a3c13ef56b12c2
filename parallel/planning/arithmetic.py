"""Estimates a chip's HBM and time per step for a layout by arithmetic, without a compiler.

peak        state, batch and activations that layers save, and the larger of
              at the end of the forward pass: logits with their gradient, other arrays that the backward pass needs,
                accumulated gradients, and in a pipeline the gathered weights
              in the backward pass of a layer: gradients, gathered weights, and what one layer computes
compute     FLOPs of matrix products, with recomputation and pipeline bubbles / 80 % of the chip's peak,
            plus the time to read and write the state once (in a pipeline also saved values and gradients)
kernels     FLOPs of Pallas kernels, such as attention / 40 % of the chip's peak
traffic     gathers of weights and of updated parameters, reductions of gradients, sums of tensor parallel products,
            tokens that go to their experts and back, keys and values between chips that share a row, activations
            between stages / the bandwidth of their mesh axes
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from core import logical
from core.logical import Axes
from core.slices import GIB, Slice
from parallel import accumulation
from parallel.partitioner import Program
from parallel.pipeline import schedules
from parallel.planning import candidates, cost, model_trace
from parallel.planning.cost import AxisTime, StepTime
from parallel.planning.links import DCN_BYTES_PER_SECOND, PCIE_BYTES_PER_SECOND
from parallel.planning.model_trace import Kept, Work, leaves
from parallel.planning.sharded_state import Refused, ShardedState, Step, mesh_axes, size_bytes, step_of

LABEL = "arithmetic, not compiled"
# A layout is refused when it needs this many times a chip's HBM: arithmetic gives up to 1.13 times the compiled peak of
# a 7B (`hsdp`), and up to 1.08 in the committed records. Between 1 and this the compiler decides.
REFUSED_FROM = 1.15
PRODUCT_SHARE_OF_PEAK = 0.8  # 7B on v4-32: 8 N FLOPs per token over libtpu's estimate of computation
# Times that HBM is read or written, from compiled cycles of the 7B; the rest overlaps products. Of sums of gradients:
# with one repeat; with several; with several that come again, so that a tick may continue an earlier sum.
_PASSES_OVER_SAVED, _PASSES_OVER_WAITING = 5, 10
_PASSES_OVER_GRADIENTS = {(False, False): 1, (True, False): 2, (True, True): 5}
_TRUE_SCATTER_CHIPS = 4  # a larger group's reduce-scatter is compiled as an all-reduce (measured on 2x2x4)
_ROW_AXES = ("batch", "length")
_EXTREMES = ("none", "full")  # the names of the choices of `remat` that save most and least
_LOOKUP_ROWS = ("batch", "residual_length")  # axes of the indices of an embedding


class Estimate(NamedTuple):
    """The estimated cost of a step, per chip.

    Attributes:
      hbm: bytes of HBM in use at the peak, by kind.
      bubble: share of a pipeline's time in bubbles or on padding; 0 without a pipeline.
      host_bytes: activations that a chip keeps on its host.
    """

    hbm: Mapping[str, float]
    time: StepTime
    bubble: float
    host_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """Bytes of HBM in use at the peak."""
        return sum(self.hbm.values())


def estimate(sharded: ShardedState, step: Step) -> Estimate:
    """Estimates a chip's HBM and time per step under a strategy's tables."""
    work, schedule = _work(sharded, step), sharded.pipeline
    idle = schedule.bubble(sharded.shape["stage"]) if schedule else 0.0
    bubble = idle + (1 - idle) * (1 - 1 / sharded.padding)  # layers of padding compute nothing of use
    on_host = _on_host(sharded, work, step.batch_size / step.accum_steps) * _held_share(sharded)
    return Estimate(_hbm(sharded, step, work), _time(sharded, step, work), bubble, on_host)


def product_flops(sharded: ShardedState, step: Step) -> float:
    """Returns the FLOPs of a chip's matrix products in a step, without kernels."""
    return _computed(sharded, step, _work(sharded, step))[0]


def place(program: Program) -> tuple[ShardedState, Step]:
    """Traces a bound program's model; returns the arguments of `estimate` and `product_flops`.

    Raises:
      Refused: slice, model and tables do not fit together.
    """
    step, bound = step_of(program), program.partitioner
    trace = model_trace.trace(
        program.model,
        program.optimizer,
        program.spec,
        slice=bound.slice,
        seed=program.seed,
        remats=_needed_remats(program, step),
        frozen=program.frozen,
        frozen_dtype=program.frozen_dtype,
    )
    return ShardedState(bound.strategy, trace), step


def _needed_remats(program: Program, step: Step) -> list[str | None]:
    """Returns the program's own choice of `remat`, and those by which `estimate` measures others.

    These are the extremes; where gradients of matrices wait, all that the model offers.
    """
    schedule, offered = program.partitioner.pipeline, candidates.remats(program.model)
    if schedule is None or "W" not in schedule.starts(program.partitioner.shape["stage"]):
        offered = [remat for remat in offered if remat in _EXTREMES]
    return list(dict.fromkeys([step.remat, *offered]))


def _work(sharded: ShardedState, step: Step) -> Work:
    trace, schedule = sharded.trace, sharded.pipeline
    work = trace.works[step.remat] if step.remat in trace.works else next(iter(trace.works.values()))
    if schedule is None:
        return work
    work = work.with_padding(sharded.padding)
    if schedule.save == "layers":
        return work
    return dataclasses.replace(  # the layers of a stage run once more first
        work,
        flops=work.flops + work.forward_flops,
        kernel_flops=work.kernel_flops + work.forward_kernel_flops,
    )


def _computed(sharded: ShardedState, step: Step, work: Work) -> tuple[float, float]:
    schedule, rows = sharded.pipeline, step.batch_size / sharded.trace.slice.devices
    if schedule is None:
        return work.flops * rows, work.kernel_flops * rows
    bubbles = schedule.ticks(sharded.shape["stage"]) / schedule.turns - 1
    products, kernels = (1 + bubbles * share for share in work.looped)
    if "W" in schedule.starts(sharded.shape["stage"]):  # gradients of matrices take as long as a forward pass
        products -= bubbles * work.looped[0] * work.forward_flops / work.flops
    return work.flops * rows * products, work.kernel_flops * rows * kernels


def _held_share(sharded: ShardedState) -> float:
    """Returns the share of a batch for which a stage allocates what layers save."""
    schedule = sharded.pipeline
    if schedule is None:
        return 1.0
    places = schedules.PLACES_AGAIN if schedule.save == "stage" else schedule.allocated(sharded.shape["stage"])
    return places / schedule.turns


def _hbm(sharded: ShardedState, step: Step, work: Work) -> dict[str, float]:
    trace = sharded.trace
    rows = step.batch_size / step.accum_steps
    parts = dict(sharded.state)
    batch = [(leaf, Axes(leaf.axes)) for leaf in trace.spec.values()]
    parts["batch and carry"] = sum(  # traced with another number of rows
        size_bytes(leaf) * (step.batch_size / leaf.shape[0] if leaf.shape else 1) / sharded.pieces(of.names)
        for leaf, of in (*batch, *leaves(trace.shapes.carry, trace.axes.carry))
    )
    parts["gathered once"] = sharded.held_bytes(step)
    parts["saved activations"], others = _kept(sharded, work, step, rows)
    accumulated = sharded.gradients if step.accum_steps > 1 else 0.0
    at_loss = {
        "logits": _logits(sharded, work, rows, others),
        "gathered weights": sharded.gathered if sharded.pipeline else 0.0,
        "gradients": accumulated,
    }
    at_layer = {
        "gradients": accumulated + sharded.gradients,
        "gathered weights": sharded.gathered,
        "one layer": _one_layer(sharded, rows / sharded.microbatches),
    }
    return parts | max(at_loss, at_layer, key=lambda part: sum(part.values()))


def _kept(sharded: ShardedState, work: Work, step: Step, rows: float) -> tuple[float, list[float]]:
    schedule = sharded.pipeline
    others = [_kept_bytes(sharded, k, rows) for k in work.kept if k.copies == 1 and not k.on_host]
    if schedule is None:
        again, saved = work.gathers_again, [k for k in work.kept if k.copies > 1 and not k.on_host]
        return sum(_kept_bytes(sharded, k, rows, gathers_again=again) for k in saved), others
    stages = sharded.shape["stage"]
    share = sharded.padding / stages / schedule.turns  # of one pass of a microbatch in what the batch saves
    of_layers = sum(_kept_bytes(sharded, k, rows) for k in work.of_loops if not k.on_host)
    total = of_layers * sharded.padding / stages * _held_share(sharded)
    if schedule.save == "stage":  # the inputs of a stage, the largest that a layer saves
        unit = schedule.layer_unit(stages)
        layers = next((leaf.shape[0] for leaf, of in sharded.params if of.names[:1] == ("layers",)), 1)
        inputs = max((_kept_bytes(sharded, k, rows) for k in sharded.trace.saves_least.of_loops), default=0.0) * share
        total += inputs * schedule.allocated(stages) / (schedules.padded(layers, unit) // unit)
    if "W" in schedule.starts(stages):
        total += _waiting(sharded, rows) * share * stages
    return total, others


def _waiting(sharded: ShardedState, rows: float) -> float:
    """Estimates the bytes kept for gradients of matrices: what layers save if `remat` recomputes least."""
    return sum(_kept_bytes(sharded, k, rows) for k in sharded.trace.recomputes_least.of_loops)


def _logits(sharded: ShardedState, work: Work, rows: float, others: Sequence[float]) -> float:
    sizes = [_kept_bytes(sharded, k, rows) for k in work.kept if k.has_rows and "vocab" in k.axes.names]
    largest = max(sizes, default=0.0)
    if not work.chunk_bytes or largest <= work.chunk_bytes:
        return sum(others) + max(others, default=0.0)
    pieces = sharded.pieces(("vocab",))  # of the gradient of the output matrix
    others = [
        _kept_bytes(sharded, k, rows) / (1 if k.has_rows else pieces) for k in work.kept_in_chunks if k.copies == 1
    ]
    return sum(others) + max(others, default=0.0) + 1.5 * largest / math.ceil(largest / work.chunk_bytes)


def _kept_bytes(sharded: ShardedState, kept: Kept, rows: float, *, gathers_again: bool = True) -> float:
    has_rows = kept.has_rows
    pieces = sharded.pieces(kept.unstacked, as_stored=gathers_again and not has_rows)
    return kept.bytes * (rows if has_rows else 1) / pieces


def _on_host(sharded: ShardedState, work: Work, rows: float) -> float:
    stages = sharded.shape["stage"] if sharded.pipeline else 1
    return sum(_kept_bytes(sharded, kept, rows) for kept in work.kept if kept.on_host) * sharded.padding / stages


def _one_layer(sharded: ShardedState, rows: float) -> float:
    """Estimates one layer's arrays in its backward pass: what it saves if `remat` saves most."""
    return sum(_kept_bytes(sharded, k, rows) / k.copies for k in sharded.trace.saves_most.of_loops)


def _time(sharded: ShardedState, step: Step, work: Work) -> StepTime:
    chip = sharded.trace.slice.chip
    products, kernels = _computed(sharded, step, work)
    moved = 2 * sum(sharded.state.values()) + _moved(sharded, step, work)  # the state is read and written once
    return StepTime(
        compute=products / (PRODUCT_SHARE_OF_PEAK * chip.peak_flops) + moved / chip.hbm_bytes_per_second,
        kernels=kernels / (cost.KERNEL_SHARE_OF_PEAK * chip.peak_flops),
        traffic=_traffic(sharded, step, work),
        unpriced=(),
    )


def _moved(sharded: ShardedState, step: Step, work: Work) -> float:
    """Returns HBM bytes that a pipeline moves besides products; otherwise PRODUCT_SHARE_OF_PEAK allows for them."""
    schedule, stages = sharded.pipeline, sharded.shape["stage"]
    if schedule is None:
        return 0.0
    bubbles = schedule.ticks(stages) / schedule.turns
    saved = _PASSES_OVER_SAVED * sum(_kept_bytes(sharded, k, step.batch_size) for k in work.of_loops)
    if "W" in schedule.starts(stages):
        saved += _PASSES_OVER_WAITING * _waiting(sharded, step.batch_size)
    passes = _PASSES_OVER_GRADIENTS[schedule.repeats > 1, schedule.group(stages) < schedule.num_microbatches]
    return bubbles * (saved * sharded.padding / stages + passes * schedule.num_microbatches * sharded.gradients)


def _traffic(sharded: ShardedState, step: Step, work: Work) -> tuple[AxisTime, ...]:
    totals: dict[tuple[str, ...], float] = {}
    for axes, count in (*_of_all_weights(sharded, step), *_of_activations(sharded, step, work)):
        ordered = tuple(a for a in sharded.tables.used_mesh_axes if a in axes and sharded.shape[a] > 1)
        if ordered and count:
            totals[ordered] = totals.get(ordered, 0.0) + count
    slice_ = sharded.trace.slice
    found = []
    for axes, count in totals.items():
        if any(sharded.tables.dcn_shape.get(a, 1) > 1 for a in axes):
            network, rate = "DCN", DCN_BYTES_PER_SECOND[slice_.generation]
        else:
            network, rate = "ICI", slice_.chip.link_bytes_per_second * sharded.links.count(axes)
        found.append(AxisTime(axes, network, count / rate, 0.0, round(count)))
    if host := _on_host(sharded, work, step.batch_size):  # sent in the forward pass and fetched in the backward pass
        found.append(
            AxisTime(("host",), "PCIe", 2 * host / PCIE_BYTES_PER_SECOND[slice_.generation], 0.0, round(2 * host))
        )
    return tuple(sorted(found, key=lambda row: (-row.seconds, row.axes)))


# Mesh axes of some traffic, and the bytes that a chip sends over them.
_Sent = Iterator[tuple[Collection[str], float]]


def _of_all_weights(sharded: ShardedState, step: Step) -> tuple[tuple[Collection[str], float], ...]:
    """Returns `_of_weights`, which is the same for all choices of `remat`, and for most schedules of a mesh."""
    unit = sharded.pipeline.layer_unit(sharded.shape["stage"]) if sharded.pipeline else 0
    known, key = sharded.traffic_of_weights, (unit, step._replace(remat=None))
    if key not in known:
        known[key] = tuple(_of_weights(sharded, step))
    return known[key]


def _of_weights(sharded: ShardedState, step: Step) -> _Sent:
    table, used = sharded.tables.param_rules, sharded.tables.activation_rules
    is_tied = not any(of.names == model_trace.OUTPUT for _, of in sharded.params)
    for (leaf, of), is_trained in zip(sharded.params, sharded.trace.trained, strict=True):
        rows, stored, computed = mesh_axes(_ROW_AXES, used), mesh_axes(of.names, table), mesh_axes(of.names, used)
        once = sharded.pipeline is not None
        if sharded.runs_before_stages(of):  # as without a pipeline, with rows over stages
            once, rows, stored = False, rows | {"stage"}, sharded.stored_axes(leaf, of, table)
        gathered = stored - computed
        held = gathered & sharded.held_axes(step) if not once else set()
        padding = sharded.padding_of(leaf, of)
        payload = padding * leaf.size * sharded.trace.itemsize / sharded.degree(computed)
        n = sharded.degree(gathered)
        # Once per step: one gather, gradients in float32. Otherwise both passes gather, and gradients keep their dtype.
        wide = leaf.dtype.itemsize / sharded.trace.itemsize if once or step.accum_steps > 1 else 1
        if held:  # as stored, once; other axes gather for each microbatch
            chips, gathered = sharded.degree(held), gathered - held
            yield held, (chips - 1) / n * payload * wide * (1 + _reductions(chips) * is_trained)
        others = sharded.degree(gathered)
        sent = (others - 1) / others * payload
        if padding > 1:  # layers move to their stages, and their gradients back
            share = (sharded.shape["stage"] - 1) / sharded.shape["stage"]
            yield ("stage",), share * payload / n * (1 + wide if is_trained else 1)
        if not is_trained:
            gathers = 2 if logical.is_stacked(of.names) and not once else 1
            yield gathered, sent * (1 if once else step.accum_steps * gathers)
            continue
        tables = (sharded.tables.stored_optimizer_rules, table)
        updated = set.difference(*(sharded.stored_axes(leaf, of, rules) for rules in tables))
        chips = sharded.degree(updated)  # each updates a part, and gathers the others
        yield updated, (chips - 1) / chips * size_bytes(leaf) / sharded.degree(stored)
        is_embedding = of.names == model_trace.EMBEDDING
        if of.names[:1] == model_trace.TABLE and not held and _is_summed_in_pieces(sharded, step):
            yield from _of_lookups(sharded, step, leaf, passes=1 if is_embedding else 2)
            if not is_embedding:
                continue
            if not is_tied:
                yield gathered, sent * step.accum_steps  # for the forward pass only
                continue
        # A weight outside the layers is last in one pass and first in the other: it is gathered for both at once.
        gathers = 2 if logical.is_stacked(of.names) else 1
        reductions = 1 if "expert" in of.names else _reductions(others)
        passes = 1 + wide if once else step.accum_steps * (gathers + reductions)
        yield gathered, sent * passes
        yield rows - stored, _all_reduce(sharded, rows - stored) * payload * wide / n


def _reductions(chips: int) -> int:
    return 1 if chips <= _TRUE_SCATTER_CHIPS else 2


def _all_reduce(sharded: ShardedState, axes: Collection[str]) -> float:
    n = sharded.degree(axes)
    return 2 * (n - 1) / n


def _is_summed_in_pieces(sharded: ShardedState, step: Step) -> bool:
    if sharded.pipeline is not None:
        return False  # it reduces the gradient of the embedding with those of its stages
    split = [sharded.pieces((name,), as_stored=True) > 1 for name in model_trace.EMBEDDING]
    is_manual = bool(accumulation.manual_axes(sharded.tables, sharded.shape, gather_once=step.gather_once))
    return not (all(split) and step.accum_steps > 1 and is_manual)


def _of_lookups(sharded: ShardedState, step: Step, table: Any, *, passes: int) -> _Sent:
    split = mesh_axes(_LOOKUP_ROWS, sharded.tables.activation_rules)
    vocab, columns = (mesh_axes([name], sharded.tables.param_rules) for name in model_trace.EMBEDDING)
    positions = step.batch_size * sharded.trace.length
    sent = passes * positions * table.shape[1] * sharded.trace.itemsize / sharded.degree(split)
    for axis in sorted(columns):
        n = sharded.shape[axis]
        if axis in split:
            yield (axis,), (n - 1) / n * sent
        else:
            sent /= n
    yield vocab & split, (sharded.degree(vocab & split) - 1) * sent
    whole = split - vocab - columns
    yield whole, _all_reduce(sharded, whole) * size_bytes(table) / sharded.degree((*vocab, *columns))


def _of_activations(sharded: ShardedState, step: Step, work: Work) -> _Sent:
    used, trace, schedule = sharded.tables.activation_rules, sharded.trace, sharded.pipeline
    rows = step.batch_size / sharded.pieces(("batch",)) / sharded.shape["stage"]
    pieces = sharded.pieces(("length",))
    again = 0.5 if work.flops > 3.3 * work.forward_flops else 0.0  # computed again, but for the last product of a block
    whole_again = 1.0 if schedule and schedule.save == "stage" else 0.0  # once more, whole
    again += whole_again
    for reduction in work.reductions:
        axes = mesh_axes([reduction.axis], used)
        yield axes, _all_reduce(sharded, axes) * reduction.bytes * rows / pieces * (2 + again)
    exchanged = mesh_axes(["expert"], used) & mesh_axes(_ROW_AXES, used)
    chips = sharded.degree(exchanged)
    for exchange in work.exchanges:
        others = chips - 1 if exchange.is_gathered else (chips - 1) / chips
        # To the experts and back in both passes, and once more where a layer computes anything again (compiled: `dots`,
        # `halves` and `full` of Qwen3-30B-A3B send alike).
        passes = 2 + (step.remat not in (None, "none")) + whole_again
        yield exchanged, others * exchange.bytes * rows / pieces * 2 * passes
    weights = [leaf for leaf, of in sharded.params if "kv_heads" in of.names]
    keys = sum(leaf.size / leaf.shape[1] for leaf in weights) * trace.length * trace.itemsize  # and values, of a row
    yield mesh_axes(["length"], used), (pieces - 1) / pieces * keys * rows * (2 + 2 * again)
    if schedule:
        inputs = max((k.bytes / k.copies for k in trace.saves_least.of_loops), default=0.0)
        turns = schedule.ticks(sharded.shape["stage"]) / sharded.microbatches
        yield ("stage",), 2 * inputs * rows * sharded.shape["stage"] * turns


def check_fits(found: Estimate, slice: Slice) -> None:
    """Raises Refused if the estimate exceeds REFUSED_FROM x a chip's HBM, or its share of host memory."""
    of_host, unit = slice.chip.host_memory_bytes, slice.chip.unit
    if found.host_bytes > of_host:
        raise Refused(
            "too much memory of the host",
            f"keeps {found.host_bytes / GIB:.1f} GiB for each {unit} on its host, which has {of_host / GIB:.1f} for it",
        )
    have = slice.chip.usable_hbm_bytes
    if found.peak_bytes > REFUSED_FROM * have:
        largest = sorted(found.hbm.items(), key=lambda part: -part[1])[:3]
        said = ", ".join(f"{name} {count / GIB:.1f}" for name, count in largest)
        raise Refused(
            "too much HBM by arithmetic",
            f"needs {found.peak_bytes / GIB:.1f} GiB of {have / GIB:.2f}, over {REFUSED_FROM:.0%} of it ({said})",
        )
