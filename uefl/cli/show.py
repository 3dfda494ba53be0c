"""`uefl show`: print finished runs in tables, and the state of unfinished ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uefl.core.errors import InputError

if TYPE_CHECKING:
    from uefl.experiment.run_folder import RunFolder


def register(app: typer.Typer) -> None:
    app.command()(show)


def show(folders: Annotated[list[Path], typer.Argument(help="Folders of runs or of comparisons.")]) -> None:
    """Print finished runs in one table per data set, and the state of the others.

    \b
    Examples:
      uefl show runs/compare-0123456789ab
      uefl show runs/fedavg-* runs/uefl-*
      uefl show runs/*
    """
    from rich.console import Console

    from uefl.experiment.repeats import VERDICT_FILE
    from uefl.experiment.report import print_runs
    from uefl.experiment.seeds import SEEDS_TABLE_FILE
    from uefl.experiment.targets import TARGETS_TABLE_FILE

    console, paths = Console(), list_compared_runs(folders)
    names = (SEEDS_TABLE_FILE, TARGETS_TABLE_FILE, VERDICT_FILE)
    tables = {path: path / name for path in paths for name in names if (path / name).exists()}
    for table in tables.values():
        console.print(table.read_text(), markup=False, soft_wrap=True)
    finished, states = sort_runs([path for path in paths if path not in tables])
    for data_name, runs in finished.items():
        if len(finished) > 1:
            console.print(f"\n{data_name}", style="bold", markup=False)
        print_runs(runs, console)
    for state in states:
        console.print(state, soft_wrap=True, markup=False)


def list_compared_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders, with the folder of a comparison replaced by the runs beside it, each once."""
    from uefl.experiment.comparison import COMPARISON_FILE

    paths = []
    for folder in folders:
        if (folder / COMPARISON_FILE).exists():
            runs = json.loads((folder / COMPARISON_FILE).read_text())["runs"]
            paths += [folder.resolve().parent / name for name in runs.values()]
        else:
            paths.append(folder)
    return list({path.resolve(): path for path in paths}.values())


def sort_runs(paths: Sequence[Path]) -> tuple[dict[str, dict[str, Path]], list[str]]:
    """Return finished runs by data and name, and a line for every other folder; a single bad folder is an error."""
    from uefl.experiment.records import count_silos
    from uefl.experiment.run_folder import RunFolder

    finished: dict[str, dict[str, Path]] = {}
    states: list[str] = []
    for path in paths:
        folder = RunFolder(path)
        try:
            header = _read_header(folder)
            if not folder.is_finished:
                states.append(describe_unfinished(folder, header))
                continue
            folder.read_records()  # or an error that they are damaged
            silos = count_silos(folder.read_summary()["last"])
        except InputError as e:
            if len(paths) == 1:
                raise
            if folder.has_header:  # other folders, such as those of figures, are no runs
                states.append(str(e))
            continue
        experiment = header["experiment"]
        data = experiment["data"]
        runs = finished.setdefault(f"{data['name']}, {data['partitioner']}, {silos} silos", {})
        name = str(experiment["name"])
        runs[name if name not in runs else f"{name} {path.name[-4:]}"] = path
    return finished, states


def describe_unfinished(folder: RunFolder, header: Mapping[str, Any]) -> str:
    """Describe how far an unfinished run is, and whether a process works on it."""
    rounds = max((record["round"] for record in folder.read_records()), default=0)
    state = "running" if folder.is_in_use else "unfinished; run the original command again to resume it"
    return f"{folder.path}: {rounds} of {header['total_rounds']} rounds recorded, {state}"


def _read_header(folder: RunFolder) -> dict[str, Any]:
    if not folder.has_header:
        inside = sorted(header.parent for header in folder.path.glob(f"*/{folder.HEADER_FILE}"))
        hint = f"; it contains run folders, such as {inside[0]}" if inside else ""
        raise InputError(f"{folder.path} is not a run folder: it has no {folder.HEADER_FILE}{hint}")
    return folder.read_header()
