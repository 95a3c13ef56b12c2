"""Prints the report of `launch/run agreement`, and writes it as JSON."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from core import identity, random_bits, units, versions
from core.batches import Field, batch_shapes
from launch import terminal
from parallel.verify import agreement
from parallel.verify.agreement import ONE_DEVICE, Apart, Batch, StrategyRow, Subject

PARTS = ("gradients", "losses", "params", "opt_state")
FURTHER = ("metrics", "carry", "counts")  # columns if these parts have leaves; counts are not judged
_NO_LIMIT = 10_000  # columns in which to measure a table's width
_VERSIONS = ("jax", "jaxlib", "dm-haiku", "optax")


def about(
    subject: Subject,
    data: Sequence[Batch],
    *,
    source: str,
    optimizer: str,
    processes: Sequence[int],
    modules: Mapping[str, str],
) -> dict[str, Any]:
    """Returns a description of what is compared, and with which versions, as JSON values.

    Args:
      subject: the model and its training options.
      data: its batches, at least one.
      source: where the batches come from.
      optimizer: name of the optimizer.
      processes: numbers of processes among which the devices are divided, besides one.
      modules: digests of the user's modules, by name.
    """
    first = data[0]
    axes = subject.axes or {name: ("batch", "length")[: array.ndim] for name, array in first.items()}
    spec = {name: Field(array.shape, array.dtype, axes[name]) for name, array in first.items()}
    shapes = jax.eval_shape(subject.model.init, jax.random.key(0), batch_shapes(spec))
    installed = versions.of_training()
    return {
        "model": identity.of(subject.model),
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)),
        "data": source,
        "batch": {name: f"{array.dtype}{list(array.shape)}" for name, array in first.items()},
        "optimizer": optimizer,
        "steps": len(data),
        "seed": subject.seed,
        "draws_random_bits": random_bits.uses(subject.model, spec)._asdict(),
        "reference": f"{ONE_DEVICE.strategy.name} on one device",
        "devices": f"{len(jax.devices())} {jax.devices()[0].platform} devices of "
        + " or ".join(["one process", *(units.counted(n, "process", "processes") for n in processes)]),
        "versions": {name: installed[name] for name in _VERSIONS} | {"python": platform.python_version()},
        "revision": versions.git_revision(),
        "modules": dict(modules),
    }


def show(rows: Sequence[StrategyRow], what: Mapping[str, Any], *, processes: Sequence[int], bfloat16: bool) -> None:
    """Prints what was compared, a row per strategy, and a verdict.

    Args:
      rows: the measurements, one row for each strategy.
      what: the result of `about`.
      processes: the numbers of processes that were compared, one column each.
      bfloat16: whether bfloat16 was compared.
    """
    further = [part for part in FURTHER if any(row.float32 and row.float32[part].where for row in rows)]
    headings = ["strategy", "slice", *PARTS, *further, *(f"params, {n} processes" for n in processes)]
    headings += ["bfloat16 losses"] if bfloat16 else []
    title = f"largest difference from one device after {what['steps']} steps, absolute (ulp of the leaf)"
    console = terminal.console(170, markup=False, soft_wrap=True)
    draws = ", ".join(name for name, drawn in what["draws_random_bits"].items() if drawn) or "no phase"
    console.print(f"model     {what['model']}, {what['parameters']:,} parameters; draws random bits in {draws}")
    console.print(f"batches   {what['data']}: " + ", ".join(f"{name} {text}" for name, text in what["batch"].items()))
    console.print(f"trained   {units.counted(what['steps'], 'step')} of {what['optimizer']}, seed {what['seed']}")
    named = ", ".join(f"{name} {version}" for name, version in what["versions"].items())
    console.print(f"by        {what['devices']}; {named}; revision {what['revision']}")
    for module, digest in what["modules"].items():
        console.print(f"module    {module}, whose file has the SHA-256 digest {digest}…")
    cells = [_cells(row, further, bfloat16=bfloat16) for row in rows if not row.refused]
    table = terminal.markdown(headings, cells, text=("strategy", "slice"), title=title)
    whole = console.measure(table, options=console.options.update(max_width=_NO_LIMIT)).maximum
    console.width = max(console.width, whole)  # in a narrower terminal, lines break, but figures are not cut
    console.print(table)
    for row in rows:
        if row.refused:
            console.print(f"{row.name} on {row.slice} is refused: {row.refused}")
    for row in rows:
        for sentence in row.beyond:
            console.print(f"differs: {sentence}")
    console.print(f"\n{verdict(rows)}")


def verdict(rows: Sequence[StrategyRow]) -> str:
    """Returns a line that says whether the strategies agree with one device."""
    compared, refused = [row for row in rows if not row.refused], [row.name for row in rows if row.refused]
    differing, count = (
        [row.name for row in compared if row.beyond],
        units.counted(len(compared), "strategy", "strategies"),
    )
    if not compared:
        return f"NOT COMPARED: {_unsupported(refused)}"
    said = f"AGREES with one device, within the tolerances: {count}"
    if differing:
        said = f"DIFFERS from one device: {', '.join(differing)}, of {count}"
    return said + (f"; {_unsupported(refused)}" if refused else "")


def _unsupported(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} not support the model"


def write(file: Path, rows: Sequence[StrategyRow], what: Mapping[str, Any]) -> None:
    """Writes the report as JSON."""
    compared = [_compared(row) for row in rows if not row.refused]
    refused = [{"strategy": row.name, "slice": row.slice, "reason": row.refused} for row in rows if row.refused]
    agrees = bool(compared) and not any(row.beyond for row in rows)
    text = json.dumps({**what, "agrees": agrees, "compared": compared, "refused": refused}, indent=1, allow_nan=False)
    file.write_text(text + "\n")


def _compared(row: StrategyRow) -> dict[str, Any]:
    found = {"strategy": row.name, "slice": row.slice, "mesh": row.mesh, "float32": _parts(row.name, row.float32)}
    if row.bfloat16:
        found["bfloat16"] = _parts("", row.bfloat16)
    if row.played:
        found["float32_by_processes"] = {str(n): _parts(row.name, apart) for n, apart in row.played.items()}
    return found


def _parts(strategy: str, apart: Apart) -> dict[str, Any]:
    limits = agreement.tolerance(strategy) if strategy else {}
    return {
        part: {
            "absolute": _finite(found.absolute),
            "relative": _finite(found.relative),
            "ulp": _finite(found.ulp),
            "leaf": found.where,
            "tolerance_ulp": _finite(limits.get(part, np.inf)),
        }
        for part, found in apart.items()
    }


def _finite(value: float) -> float | None:
    """Returns None for infinity and NaN, which JSON lacks."""
    return float(value) if np.isfinite(value) else None


def _cells(row: StrategyRow, further: Sequence[str], *, bfloat16: bool) -> list[str]:
    found = [*(row.float32[part] for part in (*PARTS, *further)), *(apart["params"] for apart in row.played.values())]
    cells = [row.name, row.slice, *(f"{difference.absolute:.1e} ({difference.ulp:.0f})" for difference in found)]
    narrow = f"{row.bfloat16['losses'].absolute:.1e}" if row.bfloat16 else "–"
    return [*cells, narrow] if bfloat16 else cells
