"""Figures of runs, drawn without a display and without pyplot's global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from uefl.core.metrics import mean_metric, select_table_metrics
from uefl.experiment.files import write_bytes
from uefl.experiment.records import Record, count_new_codewords, is_evaluated


def plot_curves(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Plot the means over silos by round, one line per run; a dashed line marks an extension of the codebook."""
    metrics = select_table_metrics(with_codebook=False)
    figure = Figure(figsize=(5 * len(metrics), 4))
    # Fixed margins: a layout that fits itself draws twice, and every seed of a comparison draws a figure.
    figure.subplots_adjust(left=0.7 / 5 / len(metrics), right=0.99, bottom=0.12, top=0.96, wspace=0.22)
    for axes, metric in zip(figure.subplots(1, len(metrics)), metrics):
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
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{metric.label}  mean {metric.description}")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="lower right", framealpha=0.9)
    contents = io.BytesIO()
    figure.savefig(contents, dpi=130, format="png")
    write_bytes(path, contents.getvalue())
