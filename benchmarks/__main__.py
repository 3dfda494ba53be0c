"""One command: run a benchmark, print its table, append its records."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.frame import RECORDS, Options, record, table

BENCHMARKS = {  # name: module with `run(options) -> figures`
    "federation": "benchmarks.federation",
    "release": "benchmarks.release",
    "passes": "benchmarks.passes",
    "kmeans": "benchmarks.clusters",
    "words": "benchmarks.words",
    "clients": "benchmarks.clients",
    "bytes": "benchmarks.traffic",
    "t11": "benchmarks.cost",
    "many": "benchmarks.many",
    "large": "benchmarks.large",
}


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(BENCHMARKS)}; none: list them")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 3,
    data: Annotated[
        str, typer.Option(envvar="UEFL_BENCH_DATA", help="mnist5k, mnist, or a safetensors file with x and y")
    ] = "mnist5k",
    tiny: Annotated[bool, typer.Option("--tiny", help="show that it runs; the figures mean nothing")] = False,
    out: Annotated[Path | None, typer.Option(help="file of records; default benchmarks/records/<name>.jsonl")] = None,
) -> None:
    """Measure, print a table with ratios against the peers of this very run, and append records."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log file has no width of its own
    if name not in BENCHMARKS:
        if name:
            console.print(f"unknown benchmark '{name}'; known:", highlight=False)
        for known, module in BENCHMARKS.items():
            console.print(f"{known:12} {(import_module(module).__doc__ or '').splitlines()[0]}", highlight=False)
        raise typer.Exit(2 if name else 0)
    torch.set_num_threads(1)  # two threads on two shared cores can be many times slower than one
    o = Options(device, repeats, tiny, data)
    figures = list(import_module(BENCHMARKS[name]).run(o))
    console.print(table(name, figures))
    if out or not tiny:
        record(name, figures, o, out or RECORDS / f"{name}.jsonl")


if __name__ == "__main__":
    typer.run(main)
