"""`uefl show`: finished runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from uefl.commands.compare import COMPARED
from uefl.commands.seeds import SEEDS
from uefl.errors import InputError
from uefl.report import beside, extensions, unheard
from uefl.run import HEADER, SUMMARY


def showing(folders: Sequence[Path], console: Console) -> None:
    runs: dict[str, Path] = {}
    for folder in (one for given in folders for one in compared(given)):
        if (folder / SEEDS).exists():
            console.print((folder / SEEDS).read_text(), markup=False, soft_wrap=True)
            continue
        if not (folder / HEADER).exists():
            inside = sorted(path.parent.name for path in folder.glob(f"*/{HEADER}"))
            hint = f"; it holds some, such as {folder / inside[0]}" if inside else ""
            raise InputError(f"{folder} is not a run folder: it has no {HEADER}{hint}")
        if not (folder / SUMMARY).exists():
            raise InputError(f"{folder} is not finished; the command that began it goes on with it")
        name = json.loads((folder / HEADER).read_text())["experiment"]["name"]
        runs[name if name not in runs else f"{name} {folder.name[-4:]}"] = folder
    if not runs:
        return
    for line in extensions(runs) + unheard(runs):
        console.print(line, soft_wrap=True)
    console.print(beside(runs))


def compared(folder: Path) -> list[Path]:
    """The runs of a comparison, which lie beside its folder; any other folder stands for itself."""
    if not (folder / COMPARED).exists():
        return [folder]
    return [folder.resolve().parent / name for name in json.loads((folder / COMPARED).read_text())["runs"].values()]
