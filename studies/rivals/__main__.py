"""`python -m studies.rivals select | search | run | time | page`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from studies.methods.runner import StudyResources
from studies.rivals import runner
from studies.rivals.page import render_page
from studies.rivals.setups import SETUPS
from studies.rivals.timing import time_rows
from uefl.core.errors import InputError, unknown_value_error

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
PAGE = Path("docs/rivals.md")

SetupOption = Annotated[
    list[str] | None, typer.Option("--setup", help=f"A setup: {', '.join(SETUPS)}. Repeatable; default: all.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
EngineOption = Annotated[
    str, typer.Option(help="auto, or stacked: seeds and folds of a small table in one stack on a CPU too.")
]
WorkersOption = Annotated[int, typer.Option(help="Processes; on one GPU, more than three slow each other down.")]
LimitOption = Annotated[float, typer.Option(help="Time limit in minutes; the same command resumes.")]
OutOption = Annotated[Path, typer.Option(help="Folder of run folders.")]
FolderOption = Annotated[Path, typer.Option("--results", help="Folder of the records.")]


@app.command()
def select(
    setup: SetupOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = "auto",
    workers: WorkersOption = 1,
    max_minutes: LimitOption = 1e6,
    out: OutOption = Path("runs/rivals"),
    results: FolderOption = Path("results"),
) -> None:
    """Choose the schedule with FedAvg, and run the trials of all methods."""
    resources = StudyResources(device, engine, out, time.time() + 60 * max_minutes, workers)
    finish(sum(runner.run_trials(n, resources, get_files(results), print_line) for n in check_setups(setup)))


@app.command()
def search(
    setup: SetupOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = "auto",
    workers: WorkersOption = 1,
    max_minutes: LimitOption = 1e6,
    out: OutOption = Path("runs/rivals-search"),
    results: FolderOption = Path("results"),
) -> None:
    """Try settings of UEFL, on seeds of their own, before its trials are fixed."""
    names = [n for n in check_setups(setup) if not SETUPS[n].trials_of]
    resources = StudyResources(device, engine, out, time.time() + 60 * max_minutes, workers)
    finish(sum(runner.run_search(n, resources, get_files(results), print_line) for n in names))


@app.command()
def run(
    setup: SetupOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = "auto",
    workers: WorkersOption = 1,
    max_minutes: LimitOption = 1e6,
    out: OutOption = Path("runs/rivals"),
    results: FolderOption = Path("results"),
) -> None:
    """Freeze the trial of every method by validation, and run it with fresh seeds."""
    resources = StudyResources(device, engine, out, time.time() + 60 * max_minutes, workers)
    finish(sum(runner.run_final(n, resources, get_files(results), print_line) for n in check_setups(setup)))


@app.command("time")
def time_(setup: SetupOption = None, device: DeviceOption = "cpu", results: FolderOption = Path("results")) -> None:
    """Time a round of every method with the trial that validation chose."""
    torch.set_num_threads(1)
    files = get_files(results)
    for name in check_setups(setup):
        time_rows(name, device, files, print_line)


@app.command()
def page(results: FolderOption = Path("results")) -> None:
    """Write docs/rivals.md from the records."""
    PAGE.write_text(render_page(get_files(results)))
    print_line(f"wrote {PAGE}")


def get_files(folder: Path) -> runner.Files:
    """Return the files of the study in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("rivals-search.jsonl", "rivals-trials.jsonl", "rivals-frozen.json", "rivals.jsonl", "rivals-time.jsonl")
    return runner.Files(*(folder / name for name in names))


def check_setups(names: list[str] | None) -> list[str]:
    """Return the chosen setups, or all."""
    for name in names or ():
        if name not in SETUPS:
            raise unknown_value_error("setup", name, SETUPS)
    return names or list(SETUPS)


def finish(left: int) -> None:
    """End with exit code 1 if runs failed or are left."""
    print_line(f"{left} runs failed or were stopped by the time limit; the same command resumes." if left else "done")
    raise typer.Exit(1 if left else 0)


def print_line(text: str) -> None:
    """Print at once, for logs."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command line; an input error is one line."""
    try:
        app()
    except InputError as e:
        Console(stderr=True).print(f"error: {e}", markup=False, highlight=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
