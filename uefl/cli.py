"""`uefl`: the command line. A user's mistake is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from uefl.commands import compare as compare_
from uefl.commands import data, deploy, listing, showing
from uefl.commands.flags import SkipBad, Strict, flagged
from uefl.commands.seeds import compare_seeds, parsed_seeds
from uefl.commands.words import spoken
from uefl.errors import InputError, Stopped

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Federated learning across silos whose data do not look alike.

Every silo measures how unsure the shared model is on its data; the silos that stand out get codewords of their own.

    uefl compare                     FedAvg beside UEFL, on embedded digits

    uefl run                         UEFL alone on the same digits

    uefl run uefl mnist gamma=0.2    other data, one setting changed

    uefl list                        methods, data sets, cuts, encoders

    uefl list uefl                   every setting of a method

    uefl data show mnist             a picture of the silos, before training

    uefl show runs/…                 the table of a finished run

Results go to `runs/`, one folder a run. Nothing is overwritten: a finished run is shown, an unfinished one goes on.""",
)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[METHOD] [DATA] [FIELD=VALUE]...", help="see `uefl list`; nothing: the embedded default"),
]
Out = Annotated[Path, typer.Option(help="folder of run folders")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Threads = Annotated[int, typer.Option(help="torch threads a run; more than one can be slower on shared cores")]
Engine = Annotated[
    str,
    typer.Option(
        help="serial: one silo after another; stacked: many in one tensor; compiled: the same, large networks by "
        "torch.compile (CUDA); flower: a process each; auto: serial on a CPU, on CUDA what suits network and schedule"
    ),
]
Preset = Annotated[str, typer.Option(help="default (what won) or paper (what the paper says)")]


@app.command()
def run(
    words: Words = None,
    out: Out = Path("runs"),
    device: Device = "cpu",
    threads: Threads = 1,
    preset: Preset = "default",
    engine: Engine = "auto",
    skip_bad: SkipBad = False,
    strict: Strict = False,
) -> None:
    """Run one method on one data set.

    Examples: `uefl run`, `uefl run fedavg mnist seed=1`, `uefl run uefl folder path=photos rounds=5 local.rate=3e-4`.
    """
    experiments = spoken(flagged(words, skip_bad=skip_bad, strict=strict), ["uefl"], preset)
    if len(experiments) > 1:
        raise InputError(f"run takes one method, not {', '.join(experiments)}; `uefl compare` takes several")
    compare_.compare(experiments, out, compare_.Where(device, threads, 1, engine), Console())


@app.command()
def compare(
    words: Words = None,
    out: Out = Path("runs"),
    device: Device = "cpu",
    threads: Threads = 1,
    workers: Annotated[int, typer.Option(help="runs at a time; 0: one a core")] = 0,
    engine: Engine = "auto",
    preset: Preset = "default",
    seeds: Annotated[str, typer.Option(help="several seeds, such as 0,1,2: means with their spread")] = "",
    skip_bad: SkipBad = False,
    strict: Strict = False,
) -> None:
    """Run several methods at equal rounds and set them side by side.

    FedAvg runs with and without layer norm, and the better one by validation stands in the table: a strong FedAvg.
    Who says `normalise=` has chosen, and it runs once.

    Examples: `uefl compare`, `uefl compare --seeds 0,1,2`, `uefl compare fedavg vq-fedavg uefl seed=2`.
    """
    given = flagged(words, skip_bad=skip_bad, strict=strict)
    experiments = spoken(given, ["fedavg", "uefl"], preset)
    if not any(word.partition("=")[0].endswith("normalise") for word in given):
        experiments = compare_.strong(experiments)
    where = compare_.Where(device, threads, workers, engine)
    if seeds and (one := next((word for word in given if word.startswith("seed=")), "")):
        raise InputError(f"{one} and --seeds {seeds} do not go together: give one of them")
    if seeds:
        compare_seeds(experiments, parsed_seeds(seeds), out, where, Console())
    else:
        compare_.compare(experiments, out, where, Console())


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, data, cuts, encoders, or a method for its settings")] = "",
) -> None:
    """List methods, data sets and encoders, or all settings of a method."""
    listing.listing(what, Console())


@app.command()
def show(folder: Annotated[list[Path], typer.Argument(help="folders of finished runs or of comparisons")]) -> None:
    """Show finished runs as one table."""
    showing.showing(folder, Console())


def main() -> None:
    """Entry point: errors a user can mend are one line and exit code 2."""
    torch.set_num_threads(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress must be seen through a pipe or in a log file too
    try:
        app()
    except InputError as e:
        print(f"uefl: {e}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except torch.OutOfMemoryError as e:
        why = str(e).partition(". ")[0]  # the rest is advice to developers
        print(f"uefl: the device is out of memory ({why}); a smaller local.batch needs less", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except Stopped as e:
        print(f"uefl: {e}", file=sys.stderr)  # noqa: T201
        sys.exit(3)
    except KeyboardInterrupt:
        print("uefl: stopped; the same command goes on from the last round", file=sys.stderr)  # noqa: T201
        sys.exit(130)


if __name__ == "__main__":
    main()
