"""Show the silos of a table before training: size, label mix, missing share and the range of every column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from uefl.core.federation import Examples, Silo, concatenate_examples, list_parts
from uefl.data.images import Images
from uefl.data.preview import check_figure_format, count_examples, name_parts, save_new_file
from uefl.data.table_format import Column

_MAX_SILOS = 12  # columns of tables; the others are only counted
_SILOS_PER_TABLE = 4  # of which each fits 80 characters
_MAX_LABELS = 4  # classes in a label mix


def make_silo_table(silos: Sequence[Silo], images: Images) -> Table:
    """Return a table with one row per silo: examples per split, label mix, share of missing cells."""
    table = Table(title=f"{images.name}: {len(silos)} silos, {len(images.y)} rows")
    table.add_column("silo")
    parts = name_parts(silos)
    for heading in parts:
        table.add_column(heading, justify="right")
    table.add_column("labels")
    table.add_column("missing", justify="right")
    for silo in silos:
        x, y = _join_splits(silo)
        counts = map(str, count_examples(silo, parts))
        table.add_row(silo.name, *counts, _describe_labels(y, images.classes), _format_share(x.isnan()))
    return table


def make_column_tables(silos: Sequence[Silo], images: Images) -> list[Table]:
    """Return tables with one row per column and one column per silo: the range, and the share that is missing."""
    assert images.table is not None
    shown = silos[:_MAX_SILOS]
    cells = [_join_splits(silo)[0] for silo in shown]
    tables = []
    for start in range(0, len(shown), _SILOS_PER_TABLE):
        own = slice(start, start + _SILOS_PER_TABLE)
        table = Table(title="Range or most frequent value of each column (share of missing values)")
        for heading in ("column", "kind", *(silo.name for silo in shown[own])):
            table.add_column(heading)
        for i, column in enumerate(images.table.columns):
            table.add_row(column.name, column.kind, *(_describe_values(column, x[:, i]) for x in cells[own]))
        tables.append(table)
    if len(silos) > _MAX_SILOS:
        tables[-1].caption = f"the first {_MAX_SILOS} of {len(silos)} silos"
    return tables


def draw_table_silos(silos: Sequence[Silo], images: Images, path: Path) -> Path:
    """Draw the share of missing values per column and the labels of each silo; return the path of the new file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_figure_format(path)
    assert images.table is not None
    names, shown = [column.name for column in images.table.columns], silos[:_MAX_SILOS]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    rows = [_join_splits(silo) for silo in shown]
    shares = torch.stack([x.isnan().double().mean(0) for x, _ in rows])
    left.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    left.set_xticks(range(len(names)), [name[:20] for name in names], rotation=90, fontsize=7)
    left.set_yticks(range(len(shown)), [silo.name for silo in shown], fontsize=8)
    left.set_title("share of missing values (white 0, blue 1)", fontsize=9)
    start = torch.zeros(len(shown), dtype=torch.float64)
    for c, name in enumerate(images.classes):
        share = torch.stack([(y == c).double().mean() for _, y in rows])
        right.barh(range(len(shown)), share.numpy(), left=start.numpy(), label=name[:20])
        start = start + share
    right.set_title("labels", fontsize=9)
    if len(images.classes) <= 10:
        right.legend(fontsize=7, loc="lower right")
    return save_new_file(figure, path)


def _join_splits(silo: Silo) -> Examples:
    return concatenate_examples(list(list_parts(silo).values()))


def _describe_labels(y: Tensor, classes: Sequence[str]) -> str:
    counts = torch.bincount(y, minlength=len(classes)).tolist()
    order = sorted(range(len(classes)), key=lambda c: -counts[c])
    shown = [f"{classes[c]} {counts[c] / len(y):.0%}" for c in order[:_MAX_LABELS] if counts[c]]
    num_more = sum(count > 0 for count in counts) - len(shown)
    return ", ".join(shown) + (f" and {num_more} more" if num_more else "")


def _describe_values(column: Column, values: Tensor) -> str:
    present = values[values.isfinite()]
    missing = f" ({_format_share(values.isnan())})" if len(present) < len(values) else ""
    if not len(present):
        return "all missing"
    if column.kind == "numeric":
        return f"{float(present.min()):g} to {float(present.max()):g}{missing}"
    if column.kind == "boolean":
        return f"{float(present.mean()):.0%} true{missing}"
    counts = torch.bincount(present.long(), minlength=len(column.levels))
    return f"{column.levels[int(counts.argmax())]} {int(counts.max()) / len(present):.0%}{missing}"


def _format_share(mask: Tensor) -> str:
    share = float(mask.double().mean())
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"
