"""Pictures of runs. Drawn without a screen and without pyplot's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from uefl.checkpoint import replace_file
from uefl.metrics import mean_over
from uefl.records import Record

PANELS = (("accuracy", "mA  mean accuracy"), ("entropy", "mE  mean entropy"))


def curves(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Accuracy and entropy over rounds, one line a run; a dashed line marks an extension of the codebook."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, 2), PANELS):
        for i, (name, records) in enumerate(runs.items()):
            rounds = [r["round"] for r in records]
            axes.plot(rounds, [mean_over(r["silos"].values(), metric) for r in records], label=name, color=f"C{i}")
            for record in records:
                if any(mine.get("new_words") for mine in record["silos"].values()):
                    axes.axvline(record["round"], color=f"C{i}", linestyle="--", linewidth=0.8, alpha=0.7)
                    if metric == "accuracy":
                        axes.annotate(
                            f"+words ({sum(m['uncertain'] for m in record['silos'].values())} silos)",
                            (record["round"], 0.02),
                            xycoords=("data", "axes fraction"),
                            rotation=90,
                            fontsize=7,
                            color=f"C{i}",
                            ha="right",
                        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="lower right", framealpha=0.9)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=130, format="png")
    replace_file(temporary, path)
