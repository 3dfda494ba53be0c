"""`uefl run` and `uefl compare`: run experiments, then one table and one picture."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from uefl import records
from uefl.checkpoint import made, write_text
from uefl.display import Display
from uefl.errors import InputError
from uefl.experiment import Experiment
from uefl.report import beside, extensions, summary, unheard
from uefl.run import RECORDS, run
from uefl.side_by_side import side_by_side

PLAIN = "fedavg, no layer norm"
COMPARED = "compare.json"  # in the folder of a comparison: which runs it is of


def strong(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """FedAvg twice, with layer norm and without, where a method with a codebook is compared with it."""
    found = dict(experiments)
    if "fedavg" in found and len(found) > 1 and found["fedavg"].model.normalise == "layer":
        fedavg = found["fedavg"]
        found[PLAIN] = replace(fedavg, model=replace(fedavg.model, normalise="none"))
    return found


class Where(NamedTuple):
    """What runs run on."""

    device: str = "cpu"
    threads: int = 1  # of torch, a run
    workers: int = 0  # runs at a time; 0: one a core
    engine: str = "auto"


def compare(experiments: Mapping[str, Experiment], out: Path, where: Where, console: Console) -> None:
    """Run, then show."""
    show(chosen(ran(experiments, out, where, console), console), out, console)


def ran(experiments: Mapping[str, Experiment], out: Path, where: Where, console: Console) -> dict[str, Path]:
    """Run experiments, each in its folder, with live progress."""
    device, threads, workers, engine = where
    if device not in _devices():
        raise InputError(f"device={device} is not to be had here; allowed: {', '.join(_devices())}")
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")
    if workers < 0:
        raise InputError(f"workers={workers} must be at least 0")
    torch.set_num_threads(threads)
    with Display(console) as display:
        if len(experiments) == 1:
            name, experiment = next(iter(experiments.items()))
            listen = partial(display.hear, name)
            return {name: run(experiment, out, device=device, engine=engine, listen=listen)}
        workers = workers or min(len(experiments), os.cpu_count() or 1)
        return side_by_side(experiments, out, workers=workers, device=device, engine=engine, hear=display.hear)


def _devices() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]


def folder_of(folders: Mapping[str, Path], out: Path) -> Path:
    """The folder of a comparison, named by the runs that are compared."""
    mark = hashlib.sha256(" ".join(sorted(f.name for f in folders.values())).encode()).hexdigest()[:12]
    together = out / f"compare-{mark}"
    made(together)
    return together


def chosen(folders: Mapping[str, Path], console: Console) -> dict[str, Path]:
    """Of the two FedAvgs the better one, by validation alone."""
    found = dict(folders)
    if PLAIN in found and "fedavg" in found:
        scores = {name: summary(found[name])["validation_accuracy"] for name in ("fedavg", PLAIN)}
        worse = min(scores, key=lambda name: scores[name])
        listed = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
        console.print(f"FedAvg, the better by validation accuracy: {listed}")
        del found[worse]
        if worse == "fedavg":  # the one without layer norm takes its place in front
            found = {PLAIN: found.pop(PLAIN), **found}
    return found


def show(folders: Mapping[str, Path], out: Path, console: Console) -> None:
    """The table, what happened in words, and where everything lies."""
    for line in extensions(folders) + unheard(folders):
        console.print(line, soft_wrap=True)
    console.print(beside(folders))
    if len(folders) == 1:
        folder = next(iter(folders.values()))
        console.print(f"run folder: {folder}\npicture:    {folder / 'figure.png'}", soft_wrap=True)
        return
    from uefl.figure import curves

    together = folder_of(folders, out)
    picture = together / "figure.png"
    if not picture.exists():
        curves({name: records.read(folder / RECORDS) for name, folder in folders.items()}, picture)
        about = {"command": shlex.join(["uefl", *sys.argv[1:]]), "runs": {n: f.name for n, f in folders.items()}}
        write_text(together / COMPARED, json.dumps(about, indent=1) + "\n")
    console.print("run folders: " + ", ".join(str(f) for f in folders.values()), soft_wrap=True)
    console.print(f"picture:     {picture}", soft_wrap=True)
