"""Tables of methods that ran with the same seeds or folds, on a screen and in Markdown."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import isnan, nan
from statistics import mean, stdev
from typing import NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from uefl.core.metrics import (
    MIN_CALIBRATION_EXAMPLES,
    QUALITY_METRICS,
    describe_columns,
    mean_metric,
    select_table_metrics,
)
from uefl.core.uncertainty import ece
from uefl.experiment.verdict import (
    Record,
    compare_methods,
    format_difference,
    format_signed,
    get_values,
    list_names,
    select_runs,
)

_SHOWN = (*select_table_metrics(with_codebook=False), *QUALITY_METRICS)
VERDICT_METRICS = ("nll", "accuracy")  # have rows and columns of their own
FOLD = re.compile(r" ?fold=\S+")  # of a repeat such as "seed=3 fold=1/5"


class Column(NamedTuple):
    """A metric of a method over all seeds or folds."""

    title: str
    compute: Callable[[Sequence[Record]], float]
    digits: int

    def format(self, records: Sequence[Record]) -> str:
        """Format the metric of the runs of one method."""
        value = self.compute(records)
        return "–" if isnan(value) else f"{value:.{self.digits}f}"


def list_further_columns() -> list[Column]:
    """List entropy and the quality of uncertainty: means over silos; of all examples where a silo may have too few."""
    scaled = Column("NLL, scaled", partial(mean_metric, name="nll_scaled"), 3)
    return [scaled] + [
        Column(f"{m.column}, all test examples", compute_pooled_ece, m.digits)
        if m.min_examples
        else Column(m.column, partial(mean_metric, name=m.name), m.digits)
        for m in _SHOWN
        if m.name not in VERDICT_METRICS
    ]


def describe_metrics() -> str:
    """Explain the metrics of the table in one line."""
    scaled = "NLL, scaled: NLL at a temperature that each silo's validation examples choose (lower is better)"
    return f"{describe_columns(_SHOWN)}; {scaled}"


def compute_pooled_ece(records: Sequence[Record]) -> float:
    """Return the mean over seeds of the expected calibration error of all test examples.

    The folds of a seed are pooled, since together they predict every example once. Seeds are not: the errors of models
    of several seeds would cancel out.
    """
    sums = defaultdict[str, list[list[list[float]]]](list)
    for record in records:
        sums[FOLD.sub("", record["repeat"])].append(record["reliability"])
    return mean(_compute_ece(torch.tensor(of_seed, dtype=torch.float64).sum(0)) for of_seed in sums.values())


def _compute_ece(sums: torch.Tensor) -> float:
    return float(ece(sums)) if float(sums[0].sum()) >= MIN_CALIBRATION_EXAMPLES else nan


def make_repeats_table(records: Sequence[Record], method: str, test_to_train: float = 0.0) -> Table:
    """Make a table of the NLL of every silo by method, the means, and the differences paired by seed or fold."""
    names = list_names(records)
    table = Table(title="NLL of test examples (lower is better)", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    runs = {name: [record["silos"] for record in records if record["name"] == name] for name in names}
    for silo in runs[names[0]][0]:
        table.add_row(escape(silo), *(f"{mean(run[silo]['nll'] for run in runs[name]):.3f}" for name in names))
    table.add_section()
    table.add_row("mean over silos", *(f"{mean(get_values(records, name, 'nll')):.3f}" for name in names))
    table.add_row("accuracy", *(f"{mean(get_values(records, name, 'accuracy')):.1%}" for name in names))
    for column in list_further_columns():
        table.add_row(column.title, *(column.format(select_runs(records, name)) for name in names))
    if len(runs[method]) > 1:
        table.add_section()
        differences = {n: compare_methods(records, method, n, "nll", test_to_train) for n in names if n != method}
        for i, label in enumerate((f"NLL, {escape(method)} minus this", "95 % interval from", "to")):
            table.add_row(label, *(format_signed(differences[n][i], 3) if n in differences else "–" for n in names))
    return table


def format_repeats_table(records: Sequence[Record], method: str, test_to_train: float = 0.0) -> str:
    """Format means ± standard deviation over seeds or folds in Markdown, and the differences paired by them."""
    columns = list_further_columns()
    heads = ["method", "NLL", "accuracy", *(c.title for c in columns), f"NLL, {method} minus this (95 % interval)"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in list_names(records):
        nll, accuracy = (get_values(records, name, key) for key in VERDICT_METRICS)
        difference = "–"
        if name != method and len(nll) > 1:
            difference = format_difference(compare_methods(records, method, name, "nll", test_to_train), 3)
        further = [column.format(select_runs(records, name)) for column in columns]
        rows.append(f"| {' | '.join([name, _format_spread(nll), _format_spread(accuracy), *further, difference])} |")
    return "\n".join(rows)


def _format_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"
