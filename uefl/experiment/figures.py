"""Figures of runs, drawn without a display and without pyplot's global state."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from numpy.typing import NDArray

from uefl.core.metrics import RISK_COVERAGES, mean_metric, select_table_metrics
from uefl.experiment.files import write_bytes
from uefl.experiment.records import Record, count_new_codewords, is_evaluated

DPI = 130
MIN_BIN_EXAMPLES = 10  # of a point of the reliability curve; fewer are mostly noise
_CURVES = threading.Lock()  # all curves are drawn with the same axes


def plot_curves(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Plot the means over silos by round, one line per run; a dashed line marks an extension of the codebook."""
    write_image(draw_curves(runs), path)


def draw_curves(runs: Mapping[str, Sequence[Record]]) -> NDArray[np.uint8]:
    """Return the pixels of the figure of `plot_curves`."""
    with _CURVES:
        canvas: Any = _make_curve_canvas()  # its methods have no types
        _plot_curves(canvas.figure, runs)
        canvas.draw()
        return np.array(canvas.buffer_rgba())


def _plot_curves(figure: Figure, runs: Mapping[str, Sequence[Record]]) -> None:
    for axes, metric in zip(figure.axes, select_table_metrics(with_codebook=False)):
        for artist in (*axes.lines, *axes.texts):  # of the figure before
            artist.remove()
        axes.relim()
        for i, (name, records) in enumerate(runs.items()):
            evaluated = [record for record in records if is_evaluated(record)]
            means = [mean_metric(record["silos"].values(), metric.name) for record in evaluated]
            axes.plot([record["round"] for record in evaluated], means, label=name, color=f"C{i}")
            for record in filter(count_new_codewords, records):
                axes.axvline(record["round"], color=f"C{i}", linestyle="--", linewidth=0.8, alpha=0.7)
                if axes is figure.axes[0]:
                    axes.annotate(
                        f"+codewords ({len(count_new_codewords(record))} silos)",
                        (record["round"], 0.02),
                        xycoords=("data", "axes fraction"),
                        rotation=90,
                        fontsize=7,
                        color=f"C{i}",
                        ha="right",
                    )
    figure.axes[0].legend(loc="lower right", framealpha=0.9)


@cache
def _make_curve_canvas() -> FigureCanvasAgg:
    """Return axes without curves; every seed of a comparison draws a figure, and axes take most of its time."""
    metrics = select_table_metrics(with_codebook=False)
    figure = Figure(figsize=(5 * len(metrics), 4), dpi=DPI)
    # Fixed margins: a layout that fits itself draws twice.
    figure.subplots_adjust(left=0.7 / 5 / len(metrics), right=0.99, bottom=0.12, top=0.96, wspace=0.22)
    for axes, metric in zip(figure.subplots(1, len(metrics)), metrics):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{metric.label}  mean {metric.description}")
        axes.grid(alpha=0.3)
    return FigureCanvasAgg(figure)


def plot_silos(runs: Mapping[str, Sequence[Record]], path: Path, title: str = "") -> None:
    """Plot every silo's accuracy, the last decision on codewords, reliability, and the risk–coverage curve."""
    figure = Figure(figsize=(21, 4.5))
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.28, top=0.85 if title else 0.91, wspace=0.18)
    figure.suptitle(title, fontsize=11)
    bars, decision, reliability, risk = figure.subplots(1, 4)
    silo_names = sorted({silo for records in runs.values() for silo in records[-1]["silos"]})
    for i, (name, records) in enumerate(runs.items()):
        shift = (i - (len(runs) - 1) / 2) * 0.8 / len(runs)
        accuracy = [records[-1]["silos"].get(silo, {}).get("accuracy", math.nan) for silo in silo_names]
        bars.bar([k + shift for k in range(len(silo_names))], accuracy, 0.8 / len(runs), label=name, color=f"C{i}")
        _plot_decision(decision, name, records, silo_names, shift, f"C{i}")
        _plot_reliability(reliability, name, records[-1].get("reliability", []), f"C{i}")
        _plot_risks(risk, name, records[-1].get("all_silos", {}), f"C{i}")
    for axes in (bars, decision):
        axes.set_xticks(range(len(silo_names)), silo_names, rotation=40, ha="right", fontsize=8)
        axes.set_xlim(-0.6, len(silo_names) - 0.4)
    lower_end = _choose_lower_end(runs)
    note = f"; axis from {lower_end:.1f}" if lower_end else ""
    bars.set_title(f"test accuracy of every silo (higher is better{note})", fontsize=10)
    bars.set_ylim(lower_end, 1)
    decision.set_title("last decision: entropy e_k ± standard error; line: threshold; ◆: uncertain", fontsize=10)
    decision.set_ylabel("nats")
    reliability.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    reliability.set_title("reliability: above the dotted line is too cautious", fontsize=10)
    reliability.set(xlabel="confidence", ylabel="share of correct predictions")
    risk.set_title("risk–coverage: error rate of the most certain (lower is better)", fontsize=10)
    risk.set(xlabel="accepted predictions, %", ylabel="error rate", ylim=(0, None))
    if not decision.has_data():
        decision.text(0.5, 0.5, "no method decided on codewords", ha="center", transform=decision.transAxes)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.legend(*bars.get_legend_handles_labels(), loc="lower center", ncols=len(runs), fontsize=9)
    _write_figure(figure, path)


def _plot_decision(
    axes: Axes, name: str, records: Sequence[Record], silo_names: Sequence[str], shift: float, color: str
) -> None:
    """Plot the entropy of every silo at the last decision of a run, and the threshold above which it is uncertain."""
    decided = [record for record in records if record.get("has_decision")]
    if not decided:
        return
    record, decision = decided[-1], decided[-1].get("decision", {})
    for k, silo in enumerate(silo_names):
        if validation := record["silos"].get(silo, {}).get("validation"):
            entropy, error = _find_decided_entropy(decision.get("silos", {}).get(silo, {}), validation)
            is_uncertain = record["silos"][silo]["is_uncertain"]
            axes.errorbar(k + shift, entropy, error, fmt="D" if is_uncertain else "o", color=color, capsize=3)
    if decision.get("threshold") is not None:
        axes.axhline(decision["threshold"], color=color, linestyle="--", linewidth=0.8, label=name)


def _find_decided_entropy(decided: Record, validation: Record) -> tuple[float, float | None]:
    """Return e_k of a decision and its standard error, which some earlier records do not have.

    The decision may have evaluated the silo without its own codewords, so the error of `validation` is not that of e_k.
    """
    if "entropy" in decided:
        return decided["entropy"], decided.get("standard_error")
    error = math.sqrt(validation["entropy_variance"] / max(validation["num_examples"], 1))
    return validation["entropy"], error


def _plot_reliability(axes: Axes, name: str, sums: Sequence[Sequence[float]], color: str) -> None:
    """Plot the share of correct predictions over their confidence, for bins with enough examples."""
    points = [(c / n, r / n) for n, c, r in zip(*sums, strict=True) if n >= MIN_BIN_EXAMPLES]
    axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name, color=color)


def _plot_risks(axes: Axes, name: str, metrics: Record, color: str) -> None:
    """Plot the error rate of the most certain predictions over the share of them that is accepted."""
    points = [(percent, metrics[f"risk_at_{percent}"]) for percent in RISK_COVERAGES if f"risk_at_{percent}" in metrics]
    axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name, color=color)


def _choose_lower_end(runs: Mapping[str, Sequence[Record]]) -> float:
    """Return a lower end of the axis of accuracies at which bars differ visibly."""
    silos = [silo for records in runs.values() for silo in records[-1]["silos"].values()]
    lowest = min((silo["accuracy"] for silo in silos if "accuracy" in silo), default=0.0)
    return max(0.0, math.floor(10 * lowest - 1) / 10)


def write_image(pixels: NDArray[np.uint8], path: Path) -> None:
    """Write pixels as a PNG file, which takes a quarter of the time of a figure and no state of matplotlib."""
    contents = io.BytesIO()
    imsave(contents, pixels, format="png", dpi=DPI)
    write_bytes(path, contents.getvalue())


def _write_figure(figure: Figure, path: Path) -> None:
    contents = io.BytesIO()
    figure.savefig(contents, dpi=DPI, format="png")
    write_bytes(path, contents.getvalue())
