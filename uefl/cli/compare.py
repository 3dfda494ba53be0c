"""`uefl compare`: run several methods with equal numbers of rounds, and print one table."""

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
    app.command()(compare)


def compare(
    arguments: Arguments = None,
    out: OutputOption = Path("runs"),
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    workers: Annotated[int, typer.Option(help="Number of parallel runs; 0 means one per core, fewer on CUDA.")] = 0,
    engine: EngineOption = "auto",
    preset: PresetOption = "default",
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated seeds, such as 0,1,2; prints means with standard errors. On CUDA the seeds of a "
            "method run in one stack."
        ),
    ] = None,
    skip_bad: SkipBadOption = False,
    strict: StrictOption = False,
) -> None:
    """Run several methods with equal numbers of rounds and compare them in one table.

    FedAvg runs with and without layer norm; the table shows the variant with
    the higher validation accuracy. With --seeds it shows both, marks that one,
    and adds the differences from it, paired by seed, with 95 % intervals. If
    you set `feature_norm=`, FedAvg runs once with that setting. Without names
    of methods, FedAvg, FedAvg with local fine-tuning and UEFL run; UEFL
    fine-tunes, too. A method that needs another optimizer is named below the
    progress, with its settings: SCAFFOLD trains with SGD.

    \b
    Examples:
      uefl compare
      uefl compare --seeds 0,1,2
      uefl compare fedavg vq-fedavg uefl seed=2
    """
    from uefl.experiment.parsing import parse_experiments, parse_seeds

    arguments = add_flag_settings(arguments, skip_bad=skip_bad, strict=strict)
    seed_list = None if seeds is None else parse_seeds(seeds)
    if seeds and (seed := next((a for a in arguments if a.startswith("seed=")), "")):
        raise InputError(f"use either {seed} or --seeds {seeds}, not both")
    experiments = parse_experiments(arguments, ["fedavg", "fine-tuning", "uefl"], preset)
    from rich.console import Console

    from uefl.experiment.comparison import RunResources, add_fedavg_no_layer_norm, compare_experiments
    from uefl.experiment.targets import compare_targets, leaves_all_out

    if not any(a.partition("=")[0].endswith("feature_norm") for a in arguments):
        experiments = add_fedavg_no_layer_norm(experiments)
    resources = RunResources(device, threads, workers, engine)
    if leaves_all_out(experiments):
        if seed_list:
            raise InputError(f"use either target=all or --seeds {seeds}, not both")
        compare_targets(experiments, out, resources, Console())
    elif seed_list:
        from uefl.experiment.seeds import compare_seeds

        compare_seeds(experiments, seed_list, out, resources, Console())
    else:
        compare_experiments(experiments, out, resources, Console())
