"""Tables of methods that ran with the same seeds or folds, on a screen and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from rich.markup import escape
from rich.table import Table

from uefl.experiment.verdict import Record, compare_methods, format_difference, format_signed, get_values, list_names


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
    if len(runs[method]) > 1:
        table.add_section()
        differences = {n: compare_methods(records, method, n, "nll", test_to_train) for n in names if n != method}
        for i, label in enumerate((f"NLL, {escape(method)} minus this", "95 % interval from", "to")):
            table.add_row(label, *(format_signed(differences[n][i], 3) if n in differences else "–" for n in names))
    return table


def format_repeats_table(records: Sequence[Record], method: str, test_to_train: float = 0.0) -> str:
    """Format means ± standard deviation over seeds or folds in Markdown, and the differences paired by them."""
    rows = [f"| method | NLL | accuracy | NLL, {method} minus this (95 % interval) |", "|---|---|---|---|"]
    for name in list_names(records):
        nll, accuracy = (get_values(records, name, key) for key in ("nll", "accuracy"))
        difference = "–"
        if name != method and len(nll) > 1:
            difference = format_difference(compare_methods(records, method, name, "nll", test_to_train), 3)
        rows.append(f"| {name} | {_format_spread(nll)} | {_format_spread(accuracy)} | {difference} |")
    return "\n".join(rows)


def _format_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"
