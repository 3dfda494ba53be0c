"""`uefl data`: inspect silos before training on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from uefl.cli.completion import complete_dataset
from uefl.cli.options import SkipBadOption, StrictOption, add_flag_settings

group = typer.Typer(help="Inspect images and silos.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="data")


@group.callback()
def data() -> None:
    """Inspect images and silos."""


@group.command()
def show(
    dataset: Annotated[
        str,
        typer.Argument(help="Data set, such as mnist5k; `uefl list data` lists them.", autocompletion=complete_dataset),
    ],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIELD=VALUE]...", help="Settings, such as partitioner=dirichlet-vhl alpha=0.3."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Figure to write; an existing file is never overwritten.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partitioner.")] = 0,
    skip_bad: SkipBadOption = False,
    strict: StrictOption = False,
) -> None:
    """Count and plot the examples of every silo.

    Partitions a data set into silos, prints the number of examples per silo,
    and plots sample images and label histograms. For a table it prints label
    mix, missing share and range of every column.

    \b
    Examples:
      uefl data show mnist
      uefl data show mnist partitioner=dirichlet alpha=0.3 --out silos.png
      uefl data show table path=own.csv label=ill silo=site
    """
    from uefl.data import PARTITIONERS, SOURCES
    from uefl.experiment.parsing import get_assigned_value, reject_path

    settings = add_flag_settings(assignments, skip_bad=skip_bad, strict=strict)
    partitioner = get_assigned_value(settings, "partitioner")  # it determines the defaults of the other settings
    if dataset not in SOURCES:
        reject_path(dataset)
    SOURCES.check_name(dataset)
    if partitioner:
        PARTITIONERS.check_name(partitioner)

    import torch
    from rich.console import Console

    from uefl.data.defaults import get_default_config
    from uefl.data.preview import draw_silos, make_count_table
    from uefl.data.quality import collect_warnings
    from uefl.data.table_preview import draw_table_silos, make_column_tables, make_silo_table
    from uefl.experiment.settings import find_assigned_paths, override_settings

    torch.set_num_threads(1)
    defaults = get_default_config(dataset, partitioner)
    config = override_settings(defaults, settings)
    config.check_used(find_assigned_paths(defaults, settings))
    silos, images = config.load(seed)
    console, path = Console(), out or Path(f"{dataset}-silos.png")
    if images.table:
        silos = config.make_silos(images, seed)  # with the cells of the table instead of features
        console.print(make_silo_table(silos, images))
        for table in make_column_tables(silos, images):
            console.print(table)
        figure = draw_table_silos(silos, images, path)
    else:
        console.print(make_count_table(silos, images))
        figure = draw_silos(silos, images, path)
    for line in collect_warnings(silos, images):
        console.print(f"warning: {line}", style="yellow")
    console.print(f"figure: {figure}", soft_wrap=True)
