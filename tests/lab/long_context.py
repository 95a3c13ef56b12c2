"""`tests/run.sh lab long_context`: compiles models that differ in their mixers, for rows of many lengths, for a slice.

The figures are the compiler's: peak HBM and estimated cycles of a training step on one chip. It does not estimate
attention kernels, whose time is that of their FLOPs as `parallel.planning.cost` prices them.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from core import optimizers, slices, units, versions
from core.errors import UserError
from launch.environment import WORKSPACE
from models.decoder import transformer
from models.decoder.layers import Attention, Mlp
from models.decoder.transformer import Transformer
from parallel import strategies
from parallel.compiled import analysis, compiling
from parallel.compiled.compiling import OutOfHbmError
from parallel.partitioner import Partitioner
from parallel.planning import cost
from tasks import streams

HELP = "compile models with different mixers for rows of 8k to 128k tokens, and record their memory and cost per token"
EXAMPLE = """tests/run.sh lab long_context                       print what is recorded; compiles nothing
  tests/run.sh lab long_context --write               compile what is not recorded; run again to resume
  tests/run.sh lab long_context --write --models S5 --lengths 8192"""
RECORD = WORKSPACE / "tests" / "lab" / "long_context.json"
PICTURE = WORKSPACE / "docs" / "pictures" / "long-context.svg"
MODELS = ("S5", "window", "BigBird", "preset", "dense")
SLICE, VOCABULARY = "v4-32", 32000
LENGTHS = tuple(2**n * 1024 for n in (3, 5, 6, 7))
HEADINGS = ("model", "tokens per row", "peak HBM", "estimated Gcycles", "kernels, s", "µs per token of a chip")


def models() -> dict[str, Transformer]:
    """Returns models of the sizes of valkyrie-long with feed-forward layers, by mixer, and the preset itself."""
    preset = transformer.preset("valkyrie-long", vocab_size=VOCABULARY, remat="full")
    sparse = dataclasses.replace(preset, feed_forward=Mlp())
    dense = dataclasses.replace(sparse, mixer=Attention())
    reach = preset.mixer.block * (preset.mixer.window + 1)
    return {
        "S5": dataclasses.replace(preset, mixer=preset.feed_forward, feed_forward=Mlp()),
        "window": dataclasses.replace(dense, mixer=Attention(window=reach)),
        "BigBird": sparse,
        "preset": preset,
        "dense": dense,
    }


def measure(model: Transformer, length: int) -> dict[str, Any]:
    """Compiles a training step of one row per chip; `needed` is the HBM of one that does not fit."""
    slice_ = slices.get(SLICE)
    at = Partitioner(strategies.fsdp(), slice=slice_, devices=compiling.devices_of(slice_))
    spec = streams.batch_spec(slice_.devices, length=length)
    bound = at.program(model, optimizers.adamw(learning_rate=optimizers.constant(1e-4)), spec, seed=0)
    try:
        found = analysis.analyze(bound)
    except OutOfHbmError as error:
        return {"needed": error.needed, "present": error.present}
    predicted = cost.step_time(found, bound)
    return {
        "peak_bytes": found.compiled.peak_bytes,
        "cycles": found.costs.total_cycles,
        "kernel_seconds": float(f"{predicted.kernels:.4g}"),
        "seconds": float(f"{predicted.busy:.4g}"),
        "unpriced": list(predicted.unpriced),
    }


def recorded() -> dict[str, dict[str, Any]]:
    """Returns the recorded results by model and length; see `require_own_compiler` for those of another compiler."""
    return json.loads(RECORD.read_text())["results"] if RECORD.is_file() else {}


def require_own_compiler() -> None:
    """Raises UserError if the record is of another compiler: its results cannot stand beside new ones."""
    before, now = json.loads(RECORD.read_text())["versions"], versions.installed(versions.COMPILER)
    if before != now:
        raise UserError(
            f"{RECORD.name} is of {before}, and installed are {now}: remove it to compile all models again, or install "
            "these versions"
        )


def lines() -> list[tuple[str, ...]]:
    """Returns the recorded lines of the table."""
    found = recorded()
    return [
        row(name, length, found[name][str(length)])
        for name in models()
        for length in LENGTHS
        if str(length) in found.get(name, {})
    ]


def row(name: str, length: int, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a line of the table."""
    if "needed" in found:
        return name, f"{length:,}", f"does not fit: {found['needed']} of {found['present']}", "", "", ""
    per_token = 1e6 * found["seconds"] / length
    cells = (f"{found['cycles'] / 1e9:.2f}", f"{found['kernel_seconds']:.3f}", f"{per_token:.0f}")
    return name, f"{length:,}", units.size(found["peak_bytes"], digits=3), *cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--write", action="store_true", help="compile and record what is not recorded")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS))


def run(args: argparse.Namespace) -> int:
    """Compiles if asked to, prints the table, and draws the picture."""
    if args.write and RECORD.is_file():
        require_own_compiler()
    every = models()
    for length in args.lengths if args.write else ():
        for name in args.models:
            _compile(name, every[name], length)
    print("\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS, ["---"] * len(HEADINGS), *lines())))
    if args.write:
        _draw(recorded())
    return 0


def _compile(name: str, model: Transformer, length: int) -> None:
    results = recorded()
    if str(length) in results.get(name, {}):
        return
    start = time.perf_counter()
    print(f"{name}, {length:,} tokens: compiling …", end="", flush=True)
    results.setdefault(name, {})[str(length)] = measure(model, length)
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    text = json.dumps({"versions": versions.installed(versions.COMPILER), "results": results}, indent=1)
    RECORD.write_text(text + "\n")


def _draw(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws the time of a token against the length of its row."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, by_length in results.items():
        fits = sorted((int(length), cell) for length, cell in by_length.items() if "seconds" in cell)
        points = [(length, 1e6 * cell["seconds"] / length) for length, cell in fits]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_yticks(ticks := [50 * 2**n for n in range(5)], list(map(str, ticks)))
    axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    axes.set_xlabel("tokens per row", fontsize=8)
    axes.set_ylabel("predicted µs per token of a chip", fontsize=8)
    axes.grid(visible=True, color="#e4e4e4")
    axes.legend(fontsize=6)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "long_context"}):
        figure.savefig(PICTURE, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
