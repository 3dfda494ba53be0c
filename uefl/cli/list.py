"""`uefl list`: list methods, data sets, partitioners, encoders and engines, or the settings of a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uefl.cli.completion import complete_dataset, complete_topic

if TYPE_CHECKING:
    from rich.console import Console

    from uefl.core.registry import Registry

MIN_TABLE_WIDTH = 120  # a narrower terminal shows the meaning of a setting below it
METHOD_VARIANTS = {  # baselines of the paper that are a method with other settings
    "fedavg ensemble_size=5": "Deep ensemble of five networks instead of dropout (Lakshminarayanan et al., 2017)",
    "fedavg dropout=0 evaluate_train=true epochs=8 schedule=cosine": (
        "Neural collapse: no dropout; training continues after zero training error (Papyan et al., 2020)"
    ),
}


def register(app: typer.Typer) -> None:
    app.command("list")(list_topic)


def list_topic(
    topic: Annotated[
        str,
        typer.Argument(
            help="methods, data, partitioners, encoders, engines, or a method for its settings",
            autocompletion=complete_topic,
        ),
    ] = "",
    data: Annotated[
        str,
        typer.Argument(help="Data set for which to show the settings of a method.", autocompletion=complete_dataset),
    ] = "",
) -> None:
    """List what can be chosen, or all settings of a method on a data set.

    \b
    Examples:
      uefl list
      uefl list data
      uefl list uefl
      uefl list uefl mnist
    """
    from rich.console import Console

    print_topic(topic, Console(), data)  # a pipe has 80 columns, or those of the variable COLUMNS


def print_topic(topic: str, console: Console, data: str = "") -> None:
    """Print one topic, or all of them, or the settings of a method on a data set."""
    from uefl.algorithms import METHODS
    from uefl.core.errors import unknown_value_error
    from uefl.data import PARTITIONERS, SOURCES
    from uefl.engines import ENGINES
    from uefl.experiment.parsing import DEFAULT_DATASET
    from uefl.models import ENCODER_FAMILIES, ENCODERS

    registries: dict[str, Registry[Any]] = {
        "methods": METHODS,
        "data": SOURCES,
        "partitioners": PARTITIONERS,
        "encoders": ENCODERS,
        "engines": ENGINES,
    }
    if data:
        METHODS.check_name(topic)
        SOURCES.check_name(data)
    if topic in METHODS:
        _print_settings(topic, data or DEFAULT_DATASET, console)
    elif topic and topic not in registries:
        raise unknown_value_error("topic", topic, (*registries, *METHODS))
    else:
        for title in [topic] if topic else registries:
            _print_entries(title, {name: registries[title].describe(name) for name in registries[title]}, console)
            if title == "encoders":
                families = {f"{name}:NAME": ENCODER_FAMILIES.describe(name) for name in ENCODER_FAMILIES}
                _print_entries("families of encoders", families, console)
            if title == "methods":
                _print_entries("methods with other settings", METHOD_VARIANTS, console)


def _print_entries(title: str, entries: Mapping[str, str], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2), title=f"[bold]{title}[/bold]", title_justify="left")
    for name, description in entries.items():
        table.add_row(f"[bold]{name}[/bold]", description)
    console.print(table)
    console.print()


def _print_settings(method_name: str, data: str, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from uefl.experiment.recipes import make_experiment

    console.print(f"Settings of {method_name} on {data}. Change any of them as field=value, or as")
    console.print("group.field=value where two groups have a field of that name.\n")
    groups = describe_settings(make_experiment(method_name, data))
    if console.width < MIN_TABLE_WIDTH:
        _print_narrow_settings(groups, console)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("field", no_wrap=True)
    for heading, width in (("default", 13), ("type", 20), ("meaning", None)):
        table.add_column(heading, overflow="fold", max_width=width)
    for group, rows in groups.items():
        table.add_row(f"[bold]{group or 'experiment'}[/bold]")
        for name, *cells in rows:
            table.add_row(f"  {name}", *(Text(cell) for cell in cells))
    console.print(table)


def _print_narrow_settings(groups: Mapping[str, Sequence[tuple[str, str, str, str]]], console: Console) -> None:
    """Print every setting above its meaning, where a column for the meaning would have a few characters only."""
    from rich.padding import Padding
    from rich.text import Text

    for group, rows in groups.items():
        console.print(f"[bold]{group or 'experiment'}[/bold]")
        for name, default, type_, meaning in rows:
            assignment = f"{name}={default.replace(', ', ',')}"  # as it is typed
            console.print(Padding(Text(f"{assignment}  ({type_})"), (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(meaning), (0, 0, 0, 6), expand=False))


def describe_settings(settings: Any) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return name, default, type and meaning of every setting, by group, such as `method.local`."""
    from uefl.experiment.settings import describe_type, format_value, get_help_text, iterate_settings

    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for (*parents, name), value in iterate_settings(settings):
        owner = type(reduce(getattr, parents, settings))
        default = format_value(value).replace(",", ", ")  # so that a list breaks between its entries
        row = (name, default, describe_type(owner, name), get_help_text(owner, name))
        groups.setdefault(".".join(parents), []).append(row)
    return groups
