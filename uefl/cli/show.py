"""`uefl show`: print finished runs in one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uefl.core.errors import InputError

if TYPE_CHECKING:
    from uefl.experiment.run_folder import RunFolder


def register(app: typer.Typer) -> None:
    app.command()(show)


def show(folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs or of comparisons.")]) -> None:
    """Print finished runs in one table.

    \b
    Examples:
      uefl show runs/compare-0123456789ab
      uefl show runs/fedavg-* runs/uefl-*
    """
    from rich.console import Console

    from uefl.experiment.report import print_runs
    from uefl.experiment.seeds import SEEDS_TABLE_FILE

    console, paths = Console(), list_compared_runs(folders)
    for table in (path / SEEDS_TABLE_FILE for path in paths if (path / SEEDS_TABLE_FILE).exists()):
        console.print(table.read_text(), markup=False, soft_wrap=True)
    runs = name_runs(path for path in paths if not (path / SEEDS_TABLE_FILE).exists())
    if runs:
        print_runs(runs, console)


def list_compared_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders, with the folder of a comparison replaced by the runs beside it."""
    from uefl.experiment.comparison import COMPARISON_FILE

    paths = []
    for folder in folders:
        if (folder / COMPARISON_FILE).exists():
            runs = json.loads((folder / COMPARISON_FILE).read_text())["runs"]
            paths += [folder.resolve().parent / name for name in runs.values()]
        else:
            paths.append(folder)
    return paths


def name_runs(paths: Iterable[Path]) -> dict[str, Path]:
    """Return run folders by the name of their method; a second run of a method also has the end of its run id."""
    from uefl.experiment.run_folder import RunFolder

    runs: dict[str, Path] = {}
    for path in paths:
        name = _read_method_name(RunFolder(path))
        runs[name if name not in runs else f"{name} {path.name[-4:]}"] = path
    return runs


def _read_method_name(folder: RunFolder) -> str:
    if not folder.has_header:
        inside = sorted(header.parent for header in folder.path.glob(f"*/{folder.HEADER_FILE}"))
        hint = f"; it contains run folders, such as {inside[0]}" if inside else ""
        raise InputError(f"{folder.path} is not a run folder: it has no {folder.HEADER_FILE}{hint}")
    header = folder.read_header()
    if not folder.is_finished:
        raise InputError(f"{folder.path} is unfinished; run the original command again to resume it")
    return str(header["experiment"]["name"])
