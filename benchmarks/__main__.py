"""Run a benchmark, print its table and append its records."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.harness import RECORDS, Options, append_records, make_table, read_load

BENCHMARKS = {  # name: module with `run(options) -> Iterator[Measurement]`
    "frameworks": "benchmarks.frameworks",
    "authors-code": "benchmarks.authors_code",
    "mc-dropout": "benchmarks.mc_dropout",
    "kmeans": "benchmarks.kmeans_speed",
    "codebook": "benchmarks.codebook_step",
    "client-scaling": "benchmarks.client_scaling",
    "ten-thousand-clients": "benchmarks.ten_thousand_clients",
    "traffic": "benchmarks.traffic",
    "cost": "benchmarks.cost",
    "many-clients": "benchmarks.many_clients",
    "large-network": "benchmarks.large_network",
    "round-cost": "benchmarks.round_cost",
    "seed-stack": "benchmarks.seed_stack",
    "processes": "benchmarks.processes",
}


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}; default: list them.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every contender.")] = 3,
    data: Annotated[
        str, typer.Option(envvar="UEFL_BENCH_DATA", help="mnist5k, mnist, or a safetensors file with x and y.")
    ] = "mnist5k",
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes of every contender in `processes`; 0 means one per core.")
    ] = 0,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Smoke test at a minimal size; the measurements are not meaningful."),
    ] = False,
    kernels: Annotated[
        Path | None, typer.Option(help="File for the kernels of a round of training on a GPU, with their times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File of records; default: benchmarks/records/<name>.jsonl.")] = None,
) -> None:
    """Measure, print a table with ratios to the peers of the same run, and append records."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log file has no width
    if name not in BENCHMARKS:
        if name:
            console.print(f"unknown benchmark '{name}'; known:", highlight=False)
        for known, module in BENCHMARKS.items():
            console.print(f"{known:20} {(import_module(module).__doc__ or '').splitlines()[0]}", highlight=False)
        raise typer.Exit(2 if name else 0)
    torch.set_num_threads(1)  # two threads on two shared cores can be many times slower than one
    options, load = Options(device, repeats, tiny, data, workers, kernels), read_load()
    measurements = list(import_module(BENCHMARKS[name]).run(options))
    console.print(make_table(name, measurements))
    if out or not tiny:
        append_records(name, measurements, options, out or RECORDS / f"{name}.jsonl", load_before=load)


if __name__ == "__main__":
    typer.run(main)
