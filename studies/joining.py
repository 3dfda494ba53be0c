"""Measure what a silo gains by joining a finished run, by the number of its labeled examples.

`python -m studies.joining run hospitals` lets each of the four hospitals of the embedded table join a run of the other
three; `run rotations` lets a fourth rotation of the embedded digits join three (`--dataset mnist` uses MNIST). Beside
joining stand: the shared model as it is, training alone, a linear probe on the features of a FedAvg model,
fine-tuning that model, and UEFL with the silo from the start. All see the same labeled examples, of which a fifth
validates. Records go to results/joining.jsonl, one per silo, seed, number of examples and way; what is there already is
not computed again. Seeds, silos and numbers of examples run in stacks on CUDA, otherwise in parallel processes.
`python -m studies.joining page` writes docs/joining-study.md from the records.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from studies.joining_page import COUNTS, PAGE, RECORDS, WAYS, render_page
from studies.joining_ways import (
    PARENTS,
    SHARED_MODEL,
    TRAININGS,
    Metrics,
    Resources,
    Task,
    find_federation,
    group_tasks,
    load_federations,
    run_job,
)
from uefl import __version__
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import Silo
from uefl.engines.choosing import check_device
from uefl.experiment.files import write_text
from uefl.experiment.parsing import parse_seeds
from uefl.experiment.records import append_records, read_records

app = typer.Typer(add_completion=False, help=__doc__)


def list_counts(silo: Silo) -> list[int]:
    """Return the numbers of labeled examples; the last is all that the silo has, if it has fewer than the largest."""
    available = len(silo.train.y) + len(silo.validation.y)
    return sorted({min(count, available) for count in COUNTS})


def list_tasks(
    setup: Any, dataset: str, settings: tuple[str, ...], seeds: Sequence[int], chosen: Sequence[str] = tuple(WAYS)
) -> Iterator[Task]:
    """Yield the chosen ways that exist, for every silo, seed and number of labeled examples."""
    for seed in seeds:
        for name, federation in load_federations(setup, seed, dataset, settings).items():
            ways = [way for way in chosen if way != "join, own batch norm" or federation.has_batch_norm]
            for count in list_counts(federation.newcomer):
                for way in ways:
                    yield Task(setup, dataset, settings, name, seed, count, way)


def make_key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes a record from others."""
    names = ("setup", "dataset", "silo", "seed", "count", "way")
    return (*(record[name] for name in names), *record.get("settings", ()))


def list_missing(tasks: Sequence[Task], done: set[tuple[Any, ...]]) -> list[Task]:
    """Return the tasks without a record; a join measures the shared model too."""
    missing = [task for task in tasks if make_key(asdict(task)) not in done]
    replaced = [replace(task, way="join") if task.way == SHARED_MODEL else task for task in missing]
    return list(dict.fromkeys(replaced))


@app.command()
def run(
    setup: Annotated[str, typer.Argument(help="hospitals or rotations.")],
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    dataset: Annotated[str, typer.Option(help="Digits of rotations: mnist5k, or mnist.")] = "mnist5k",
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    engine: Annotated[
        str, typer.Option(help="stacked: many tasks in one stack; serial; auto: stacked on CUDA.")
    ] = "auto",
    workers: Annotated[int, typer.Option(help="Parallel processes; 0: one per core.")] = 1,
    settings: Annotated[str, typer.Option(help="Settings of UEFL as field=value, separated by spaces.")] = "",
    ways: Annotated[str, typer.Option(help="Rows of the table, separated by semicolons; empty: all.")] = "",
    counts: Annotated[str, typer.Option(help="Numbers of labeled examples, separated by commas; empty: all.")] = "",
    models: Annotated[Path, typer.Option(help="Folder of the trained federations of the other silos.")] = Path(
        "runs/joining"
    ),
    out: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
) -> None:
    """Measure every way at every number of labeled examples; append a record for each."""
    if setup not in ("hospitals", "rotations"):
        raise unknown_value_error("setup", setup, ("hospitals", "rotations"))
    if engine not in ("auto", "stacked", "serial"):
        raise unknown_value_error("engine", engine, ("auto", "stacked", "serial"))
    chosen = [way.strip() for way in ways.split(";")] if ways else list(WAYS)
    if unknown := [way for way in chosen if way not in WAYS]:
        raise unknown_value_error("way", unknown[0], tuple(WAYS))
    check_device(device)
    out.parent.mkdir(parents=True, exist_ok=True)
    is_stacked = engine == "stacked" or (engine == "auto" and device.startswith("cuda"))
    resources = Resources(device, is_stacked, models)
    name = "heart" if setup == "hospitals" else dataset
    tasks = list(list_tasks(setup, name, tuple(shlex.split(settings)), parse_seeds(seeds), chosen))
    if counts:
        tasks = [task for task in tasks if str(task.count) in counts.split(",")]
    done = {make_key(record) for record in read_records(out)}
    missing = list_missing(tasks, done)
    parents = dict.fromkeys(task.parent for task in missing if task.way in PARENTS)
    first = [task for task in parents if not task.locate_models(models).exists()]
    first += [task for task in missing if task.way in TRAININGS]
    num_done = sum(make_key(asdict(task)) in done for task in tasks)
    typer.echo(f"{len(tasks)} records, {num_done} of them done; {len(first)} trainings, then {len(missing)} ways")
    for stage in (first, [task for task in missing if task.way not in TRAININGS]):
        _run_stage(stage, resources, workers or os.cpu_count() or 1, done, out)


def _run_stage(stage: Sequence[Task], resources: Resources, workers: int, done: set[Any], out: Path) -> None:
    """Run the tasks of a stage in parallel processes, and append their records as they end."""
    jobs, start, num_done = group_tasks(stage, resources), time.monotonic(), 0
    for tasks, results in _run_jobs(jobs, resources, workers):
        num_done += len(tasks)
        _write_records(tasks, results, done, out)
        seconds = time.monotonic() - start
        typer.echo(f"{num_done} of {len(stage)} after {seconds:.0f} s: {tasks[0].way}, {len(tasks)} at once")


def _run_jobs(
    jobs: Sequence[list[Task]], resources: Resources, workers: int
) -> Iterator[tuple[list[Task], list[dict[str, Metrics]]]]:
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            yield job, run_job(job, resources)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        futures = {pool.submit(run_job, job, resources): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write_records(tasks: Sequence[Task], results: Sequence[dict[str, Metrics]], done: set[Any], out: Path) -> None:
    command = shlex.join(["python", "-m", "studies.joining", *sys.argv[1:]])
    versions = {"uefl": __version__, "torch": torch.__version__, "command": command}
    records = []
    for task, result in zip(tasks, results):
        num_test = len(find_federation(task).newcomer.test.y)
        for way, metrics in result.items():
            record = {**asdict(task), "way": way, **metrics, "num_test": num_test, **versions}
            if not task.settings:
                record.pop("settings")
            if make_key(record) not in done:
                records.append(record)
                done.add(make_key(record))
    append_records(out, records)


@app.command()
def page(
    records_path: Annotated[Path, typer.Option("--records", help="File of records.")] = RECORDS,
    out: Annotated[Path, typer.Option(help="Page to write.")] = PAGE,
) -> None:
    """Write the page of all records."""
    records = read_records(records_path)
    if not records:
        raise InputError(f"{records_path} has no records; use `python -m studies.joining run` first")
    write_text(out, render_page(records))
    typer.echo(f"written: {out}")


if __name__ == "__main__":
    app()
