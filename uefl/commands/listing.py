"""`uefl list`: what there is to choose from."""

from __future__ import annotations

from functools import reduce

from rich.console import Console
from rich.table import Table

from uefl.algorithms import ALGORITHMS
from uefl.commands.described import means, takes
from uefl.data import CUTS, SOURCES
from uefl.errors import unknown
from uefl.models.encoders import ENCODERS
from uefl.plugins import brought
from uefl.recipes import recipe
from uefl.settings import leaves

WIDE = 160  # of a pipe or a file, which have no width of their own
SECTIONS = ("methods", "data", "cuts", "encoders")
SETTINGS = {  # what the paper compares with too, and is no method but a way to train one
    "fedavg members=5": "Deep ensemble of five networks in place of dropout (Lakshminarayanan et al., 2017).",
    "fedavg dropout=0 watch_train=true epochs=8 schedule=cosine": (
        "Neural collapse: no dropout, on past zero training error (Papyan et al., 2020)."
    ),
}


def listing(what: str, console: Console) -> None:
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    methods = brought(ALGORITHMS, "uefl.methods")
    if what and what not in (*SECTIONS, *methods):
        raise unknown("list", what, (*SECTIONS, *methods))
    if what in methods:
        _settings(what, console)
        return
    sections = {
        "methods": {name: (kind.__doc__ or "").split("\n")[0] for name, kind in methods.items()} | SETTINGS,
        "data": {name: source.about for name, source in brought(SOURCES, "uefl.readers").items()},
        "cuts": {name: (cut.__doc__ or "").split("\n")[0] for name, cut in CUTS.items()},
        "encoders": {name: entry.about for name, entry in brought(ENCODERS, "uefl.encoders").items()},
    }
    for title in [what] if what else SECTIONS:
        table = Table(box=None, show_header=False, padding=(0, 2), title=f"[bold]{title}[/bold]", title_justify="left")
        for name, about in sections[title].items():
            table.add_row(f"[bold]{name}[/bold]", about)
        console.print(table)
        console.print()


def _settings(method: str, console: Console) -> None:
    table = Table(title=f"settings of {method} on mnist5k: change any as field=value", title_justify="left", box=None)
    for heading in ("field", "value", "takes", "meaning"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "field")
    experiment = recipe(method, "mnist5k")
    for path, value in leaves(experiment):
        owner = type(reduce(getattr, path[:-1], experiment))
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        table.add_row(".".join(path), shown, takes(owner, path[-1]), means(owner, path[-1]))
    console.print(table)
