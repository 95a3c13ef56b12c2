"""Pictures of an evaluation of gates: loss against budget, signal against advantage, threshold over time."""

import io
from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.ttt import evaluation
from models.ttt.evaluation import Chunks


def png(chunks: Chunks, rows: Mapping[str, Mapping[str, float]], thresholds: Mapping[str, np.ndarray]) -> bytes:
    """Returns an image of three pictures.

    Args:
      chunks: the chunks.
      rows: scores of gates, by name.
      thresholds: of gates that have one, [chunks].
    """
    mpl.use("Agg")
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    budget, scatter, time = figure.subplots(1, 3)
    _budgets(budget, rows)
    scatter.scatter(chunks.step_0, chunks.advantage, s=6, alpha=0.5)
    scatter.axhline(0, color="grey", linewidth=0.8)
    scatter.set(xlabel="reconstruction loss", ylabel="advantage of UPDATE, nats a token")
    time.plot(chunks.step_0, ".", markersize=3, color="lightgrey", label="reconstruction loss")
    for name, values in thresholds.items():
        time.plot(values, label=f"threshold of {name}")
    time.set(xlabel="chunk")
    time.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _budgets(axes: Axes, rows: Mapping[str, Mapping[str, float]]) -> None:
    names = list(rows)
    points = [(rows[name]["cost"], rows[name]["loss"]) for name in names]
    for name, (cost, loss) in zip(names, points, strict=True):
        axes.plot(cost, loss, "o")
        axes.annotate(name, (cost, loss), xytext=(4, 4), textcoords="offset points", fontsize=8)
    front = evaluation.pareto(points)
    axes.plot([points[i][0] for i in front], [points[i][1] for i in front], color="grey", linewidth=0.8)
    axes.set(xlabel="mean cost of a chunk (SKIP 1, UPDATE 3)", ylabel="loss, nats a token")
