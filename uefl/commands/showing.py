"""`uefl show`: finished runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from uefl.errors import InputError
from uefl.report import beside, extensions
from uefl.run import HEADER, SUMMARY


def showing(folders: Sequence[Path], console: Console) -> None:
    runs: dict[str, Path] = {}
    for folder in folders:
        if not (folder / HEADER).exists():
            raise InputError(f"{folder} is not a run folder: it has no {HEADER}")
        if not (folder / SUMMARY).exists():
            raise InputError(f"{folder} is not finished; the command that began it goes on with it")
        name = json.loads((folder / HEADER).read_text())["experiment"]["name"]
        runs[name if name not in runs else f"{name} {folder.name[-4:]}"] = folder
    for line in extensions(runs):
        console.print(line, soft_wrap=True)
    console.print(beside(runs))
