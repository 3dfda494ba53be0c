"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from uefl.cli.completion import complete_argument

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[METHOD] [DATA] [FIELD=VALUE]...",
        help="Method, data set and settings (see `uefl list`); by default, the embedded digits.",
        autocompletion=complete_argument,
    ),
]
OutputOption = Annotated[Path, typer.Option(help="Folder for run folders.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or one of several: cuda:1.")]
ThreadsOption = Annotated[
    int, typer.Option(help="PyTorch threads per run; more than one can be slower on shared cores.")
]
EngineOption = Annotated[
    str,
    typer.Option(
        help="serial: one silo after another; processes: silos spread over all cores, with the bits of serial (CPU); "
        "stacked: many silos in one tensor; compiled: stacked with torch.compile (CUDA); flower: one process per silo; "
        "auto: on a CPU serial, or processes for a run of half a minute or more, on CUDA the fastest suitable "
        "engine."
    ),
]
PresetOption = Annotated[
    str,
    typer.Option(
        help="default: one configuration for all data, chosen by validation on embedded digits and hospitals; paper: "
        "the row of the paper for this data set and partitioner, see docs/presets.md."
    ),
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Skip invalid images, rows and silos, and report how many were skipped.")
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Treat warnings as errors: training images repeated in the test split, silos with only one class.",
    ),
]


def add_flag_settings(arguments: Sequence[str] | None, *, skip_bad: bool, strict: bool) -> list[str]:
    """Return the arguments with the flags appended as settings."""
    flags = [*(["skip_bad=true"] if skip_bad else []), *(["strict=true"] if strict else [])]
    return [*(arguments or []), *(flag for flag in flags if flag not in (arguments or []))]
