"""`python -m studies.methods run | time | page`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from studies.methods import running, timing
from studies.methods.page import page
from studies.methods.set_ups import SEEDS, SET_UPS
from uefl.commands.seeds import parsed_seeds
from uefl.errors import InputError, unknown
from uefl.records import read
from uefl.run import ENGINES

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
RECORDS, TIMES = Path("results/methods.jsonl"), Path("results/methods-time.jsonl")
PAGE = Path("docs/methods.md")

Names = Annotated[list[str] | None, typer.Option("--set-up", help=f"of {', '.join(SET_UPS)}; none: all")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="rows of the tables, such as FedSR; none: all")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Records = Annotated[Path, typer.Option(help="file of lines, one a finished run; only ever appended to")]


@app.command()
def run(
    set_up: Names = None,
    method: Methods = None,
    seeds: str = ",".join(map(str, SEEDS)),
    device: Device = "cpu",
    engine: Annotated[str, typer.Option(help="as in `uefl run`")] = "auto",
    workers: Annotated[int, typer.Option(help="runs at a time, one process each")] = 1,
    minutes: Annotated[float, typer.Option(help="stop after so long; the same command goes on")] = 1e6,
    out: Annotated[Path, typer.Option(help="folder of run folders")] = Path("runs/methods"),
    records: Records = RECORDS,
    trial: Annotated[bool, typer.Option("--trial", help="tiny runs, to see that all goes through")] = False,
) -> None:
    """Run the study, or what is missing of it."""
    names, rows = chosen(set_up, method)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    where = running.Where(device, engine, out, time.time() + 60 * minutes, workers)
    records.parent.mkdir(parents=True, exist_ok=True)
    go = running.tried if trial else running.study
    left = go(names, rows, parsed_seeds(seeds), where, records, said)
    said(f"{left} runs failed or had no time" if left else f"all done: {records}")
    raise typer.Exit(3 if left else 0)


@app.command("time")
def time_(set_up: Names = None, method: Methods = None, device: Device = "cpu", records: Records = TIMES) -> None:
    """Measure what a round of each method costs, one after another: leave the machine alone meanwhile."""
    names, rows = chosen(set_up, method)
    records.parent.mkdir(parents=True, exist_ok=True)
    timing.timed(names, rows, device, records, said)


@app.command("page")
def page_(records: Records = RECORDS, times: Records = TIMES, to: Path = PAGE) -> None:
    """Write the page from the records."""
    to.write_text(page(read(records), read(times)))
    said(f"written: {to}")


def chosen(set_ups: list[str] | None, methods: list[str] | None) -> tuple[list[str], list[str]]:
    """What the user named, checked; no set-up means all, no method too."""
    for name in set_ups or []:
        if name not in SET_UPS:
            raise unknown("set-up", name, SET_UPS)
    names = set_ups or list(SET_UPS)
    rows = list(dict.fromkeys(row for name in names for row in SET_UPS[name].methods))
    for one in methods or []:
        if one not in rows:
            raise unknown("method", one, rows)
    return names, methods or []


def said(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        app()
    except InputError as e:
        print(f"studies: {e}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
