"""`uefl run`: run one method on one data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from uefl.cli.options import (
    Arguments,
    DeviceOption,
    EngineOption,
    OutputOption,
    PresetOption,
    SkipBadOption,
    StrictOption,
    ThreadsOption,
    add_flag_settings,
)
from uefl.core.errors import InputError


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    arguments: Arguments = None,
    out: OutputOption = Path("runs"),
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    workers: Annotated[int, typer.Option(help="Worker processes of the engine processes; 0 means one per core.")] = 0,
    preset: PresetOption = "default",
    engine: EngineOption = "auto",
    skip_bad: SkipBadOption = False,
    strict: StrictOption = False,
) -> None:
    """Run one method on one data set.

    \b
    Examples:
      uefl run
      uefl run fedavg mnist seed=1
      uefl run uefl folder path=photos rounds=5 local.lr=3e-4
      uefl run uefl folder path=photos partitioner=leave-one-domain-out target=all
    """
    from uefl.experiment.parsing import parse_experiments

    experiments = parse_experiments(add_flag_settings(arguments, skip_bad=skip_bad, strict=strict), ["uefl"], preset)
    if len(experiments) > 1:
        raise InputError(f"`uefl run` accepts one method, not {', '.join(experiments)}; use `uefl compare` for several")
    from rich.console import Console

    from uefl.experiment.comparison import RunResources, compare_experiments
    from uefl.experiment.targets import compare_targets, leaves_all_out

    compare = compare_targets if leaves_all_out(experiments) else compare_experiments
    compare(experiments, out, RunResources(device, threads, 1, engine, workers), Console())
