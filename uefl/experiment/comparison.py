"""Run one or several experiments, then print one table and draw one figure."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from uefl.core.errors import InputError
from uefl.engines.choosing import check_device
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import ensure_writable_folder, write_text
from uefl.experiment.parallel_runs import choose_workers, run_in_parallel
from uefl.experiment.progress import ProgressDisplay
from uefl.experiment.report import print_runs
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder

FEDAVG_NO_LAYER_NORM = "fedavg, no layer norm"
COMPARISON_FILE = RunFolder.COMPARISON_FILE


def add_fedavg_no_layer_norm(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Add FedAvg without layer norm where FedAvg with layer norm is compared with other methods."""
    fedavg = experiments.get("fedavg")
    if fedavg is None or len(experiments) == 1 or fedavg.model.feature_norm != "layer":
        return dict(experiments)
    return {**experiments, FEDAVG_NO_LAYER_NORM: replace(fedavg, model=replace(fedavg.model, feature_norm="none"))}


class RunResources(NamedTuple):
    """Device, threads, parallel runs and engine."""

    device: str = "cpu"
    threads: int = 1  # PyTorch threads per run
    workers: int = 0  # parallel runs; 0: one per core, on CUDA at most a few
    engine: str = "auto"
    num_workers: int = 0  # worker processes of a run with the engine `processes`; 0: one per core


def compare_experiments(
    experiments: Mapping[str, Experiment], out: Path, resources: RunResources, console: Console
) -> None:
    """Run experiments and print their results."""
    print_results(select_better_fedavg(run_experiments(experiments, out, resources, console), console), out, console)


def run_experiments(
    experiments: Mapping[str, Experiment], out: Path, resources: RunResources, console: Console
) -> dict[str, Path]:
    """Run experiments, each in its own folder, and show their progress."""
    device, threads, workers, engine, num_workers = resources
    check_device(device)
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")
    if engine == "processes" and len(experiments) > 1:
        if workers > 1:
            raise InputError(f"engine=processes gives all cores to one run; use engine=auto for {workers} at once")
        workers = 1
    workers = choose_workers(workers, len(experiments), device)
    torch.set_num_threads(threads)
    with ProgressDisplay(console) as display:
        if len(experiments) == 1:
            name, experiment = next(iter(experiments.items()))
            on_event = partial(display.on_event, name)
            folder = run(experiment, out, device=device, engine=engine, num_workers=num_workers, on_event=on_event)
            return {name: folder}
        return run_in_parallel(
            *(experiments, out),
            workers=workers,
            device=device,
            engine=engine,
            num_workers=num_workers,
            on_event=display.on_event,
        )


def create_comparison_folder(folders: Mapping[str, Path], out: Path) -> Path:
    """Create the folder of a comparison, named by a hash of the compared runs."""
    run_names = " ".join(sorted(folder.name for folder in folders.values()))
    return ensure_writable_folder(out / f"compare-{hashlib.sha256(run_names.encode()).hexdigest()[:12]}")


def select_better_fedavg(folders: Mapping[str, Path], console: Console) -> dict[str, Path]:
    """Keep the FedAvg variant with the higher validation accuracy, if both ran."""
    variants = ("fedavg", FEDAVG_NO_LAYER_NORM)
    if not all(name in folders for name in variants):
        return dict(folders)
    accuracy = {name: RunFolder(folders[name]).read_summary()["validation_accuracy"] for name in variants}
    scores = ", ".join(f"{name} {value:.3f}" for name, value in accuracy.items())
    console.print(f"Validation accuracy of the two FedAvg variants: {scores}. The better one is reported.")
    worse = min(accuracy, key=lambda name: accuracy[name])
    selected = {name: folder for name, folder in folders.items() if name != worse}
    if worse == "fedavg":  # the variant without layer norm takes the first place
        selected = {FEDAVG_NO_LAYER_NORM: selected.pop(FEDAVG_NO_LAYER_NORM), **selected}
    return selected


def print_results(folders: Mapping[str, Path], out: Path, console: Console) -> None:
    """Print the table of finished runs and where their files are; draw the figure of a comparison."""
    print_runs(folders, console)
    if len(folders) == 1:
        folder = RunFolder(next(iter(folders.values())))
        console.print(f"run folder: {folder.path}\nfigure:     {folder.figure_path}", soft_wrap=True)
        return
    from uefl.experiment.figures import plot_curves, plot_silos

    comparison = create_comparison_folder(folders, out)
    figure, silos_figure = (comparison / name for name in (RunFolder.FIGURE_FILE, RunFolder.SILOS_FIGURE_FILE))
    if not figure.exists() or not silos_figure.exists():
        records = {name: RunFolder(path).read_records() for name, path in folders.items()}
        plot_curves(records, figure)
        plot_silos(records, silos_figure)
        runs = {name: path.name for name, path in folders.items()}
        contents = {"command": shlex.join(["uefl", *sys.argv[1:]]), "runs": runs}
        write_text(comparison / COMPARISON_FILE, json.dumps(contents, indent=1) + "\n")
    console.print("run folders: " + ", ".join(str(path) for path in folders.values()), soft_wrap=True)
    console.print(f"figures:     {figure}, by silo: {silos_figure}", soft_wrap=True)
