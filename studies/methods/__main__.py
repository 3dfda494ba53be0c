"""`python -m studies.methods run | time | page`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
import typer
from rich.console import Console

from studies.methods import runner, timing
from studies.methods.page import render_page
from studies.methods.setups import SEEDS, SETUPS
from uefl.core.errors import InputError, unknown_value_error
from uefl.engines import ENGINE_NAMES
from uefl.experiment.experiment import Precision
from uefl.experiment.parsing import parse_seeds
from uefl.experiment.records import read_records

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
RECORDS, TIMES = Path("results/methods.jsonl"), Path("results/methods-time.jsonl")
HALF_PRECISION = Path("results/methods-bf16.jsonl")  # of the same study in bfloat16
PAGE = Path("docs/methods.md")

SetupOption = Annotated[
    list[str] | None, typer.Option("--setup", help=f"A setup: {', '.join(SETUPS)}. Repeatable; default: all.")
]
MethodOption = Annotated[
    list[str] | None, typer.Option("--method", help="A row of the tables, such as FedSR. Repeatable; default: all.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
RecordsOption = Annotated[Path, typer.Option(help="File of records, one line per finished run; lines are appended.")]


@app.command()
def run(
    setup: SetupOption = None,
    method: MethodOption = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = ",".join(map(str, SEEDS)),
    device: DeviceOption = "cpu",
    engine: Annotated[str, typer.Option(help="As in `uefl run`.")] = "auto",
    precision: Annotated[str, typer.Option(help="As in `uefl run`; bf16 is faster on a GPU.")] = "auto",
    workers: Annotated[int, typer.Option(min=0, help="Parallel processes; 0 means one per core, fewer on CUDA.")] = 0,
    max_minutes: Annotated[float, typer.Option(help="Time limit in minutes; the same command resumes.")] = 1e6,
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs/methods"),
    records: Annotated[
        Path | None,
        typer.Option(help=f"File of records; lines are appended. Default: {RECORDS}, in bf16 {HALF_PRECISION}."),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Smoke test: run every method at a minimal size.")] = False,
) -> None:
    """Run the study, or what is missing of it."""
    setup_names, methods = validate_selection(setup, method)
    if engine not in ENGINE_NAMES:
        raise unknown_value_error("engine", engine, ENGINE_NAMES)
    if precision not in get_args(Precision):
        raise unknown_value_error("precision", precision, get_args(Precision))
    resources = runner.StudyResources(device, engine, out, time.time() + 60 * max_minutes, workers)
    records = records or (HALF_PRECISION if precision == "bf16" else RECORDS)
    records.parent.mkdir(parents=True, exist_ok=True)
    run_all = runner.run_tiny_study if tiny else runner.run_study
    start = time.perf_counter()
    left = run_all(setup_names, methods, parse_seeds(seeds), resources, records, print_line, cast(Precision, precision))
    print_line(
        f"{left} runs failed or were stopped by the time limit; run the same command again to resume."
        if left
        else f"all done after {time.perf_counter() - start:.0f} s: {records}"
    )
    raise typer.Exit(3 if left else 0)


@app.command("time")
def time_(
    setup: SetupOption = None, method: MethodOption = None, device: DeviceOption = "cpu", records: RecordsOption = TIMES
) -> None:
    """Measure the cost of a round of each method; run nothing else on the machine meanwhile."""
    setup_names, methods = validate_selection(setup, method)
    records.parent.mkdir(parents=True, exist_ok=True)
    timing.time_methods(setup_names, methods, device, records, print_line)


@app.command("page")
def page_(
    records: RecordsOption = RECORDS,
    timings: RecordsOption = TIMES,
    half_precision: RecordsOption = HALF_PRECISION,
    out: Path = PAGE,
) -> None:
    """Write the page from the records."""
    out.write_text(render_page(*map(read_records, (records, timings, half_precision))))
    print_line(f"wrote {out}")


def validate_selection(setups: list[str] | None, methods: list[str] | None) -> tuple[list[str], list[str]]:
    """Check the setups and methods that the user named; none means all."""
    for name in setups or []:
        if name not in SETUPS:
            raise unknown_value_error("setup", name, SETUPS)
    setup_names = setups or list(SETUPS)
    rows = list(dict.fromkeys(row for name in setup_names for row in SETUPS[name].methods))
    for method in methods or []:
        if method not in rows:
            raise unknown_value_error("method", method, rows)
    return setup_names, methods or []


def print_line(text: str) -> None:
    """Print one line without wrapping or markup."""
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        app()
    except InputError as e:
        print(f"studies: {e}", file=sys.stderr)
        sys.exit(2)
