"""`uefl demo`: two comparisons on data that ship with the package and its dependencies, in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from uefl.cli.options import OutputOption


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    out: OutputOption = Path("runs"),
    workers: Annotated[int, typer.Option(help="Number of parallel runs; 0 means one per core.")] = 0,
) -> None:
    """Compare UEFL with simpler methods on four hospitals and on digits, in two minutes on two cores.

    The hospitals compare logistic regression at each hospital alone, a network
    at each hospital alone, FedAvg, FedAvg with local fine-tuning, and UEFL. The
    digits have three alike silos and two of other domains. Each data set ends
    with a table, one sentence that claims no more than its 95 % interval, the
    silos that UEFL found uncertain, and a picture. Nothing is downloaded.

    \b
    Examples:
      uefl demo
      uefl demo --workers 1
    """
    from rich.console import Console

    from uefl.experiment.demo_comparisons import run_demo

    run_demo(out, workers, Console())
