"""`uefl export`: write a silo's model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from uefl.cli.options import ThreadsOption
from uefl.core.errors import InputError


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or a model file.")],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: .onnx, or .pt2 for torch.export.")],
    silo: Annotated[str, typer.Option(help="Silo whose model is written; without it, what all silos share.")] = "",
    samples: Annotated[
        int | None, typer.Option(help="Dropout masks for the uncertainty; by default as many passes as in training.")
    ] = None,
    threads: ThreadsOption = 1,
) -> None:
    """Write the model of one silo as an ONNX file, or as a program of torch.export.

    Raw pixels, cells or numbers go in. Logits, probabilities, predictive
    entropy and mutual information come out, for any number of examples.
    Scaling, codewords, label prior and temperature of the silo are inside;
    nothing of another silo is. The file is checked against `predict` before
    it gets its name. ONNX needs the extra `onnx`.

    \b
    Examples:
      uefl export runs/uefl-folder-… --silo north north.onnx
      uefl export runs/uefl-folder-… --silo north north.pt2
    """
    if samples is not None and samples < 1:
        raise InputError(f"samples={samples} must be at least 1")
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")

    import torch

    from uefl.experiment.export_files import check_export_path, export_model
    from uefl.experiment.loading import find_model_file, open_models

    torch.set_num_threads(threads)
    models = open_models(run)
    if silo:
        models.check_silo(silo)
    check_export_path(path)
    typer.echo("exporting …", err=True)
    result = export_model(models, silo, path, run_name=find_model_file(run).resolve().parent.name, mc_samples=samples)
    shape = ", ".join(map(str, result.input.shape))
    dtype = str(result.input.dtype).removeprefix("torch.")
    typer.echo(f"input {result.input.name} [n, {shape}] {dtype}: {result.input.meaning}")
    typer.echo(f"uncertainty from {result.metadata['uefl.uncertainty']}")
    typer.echo(
        f"largest difference: {result.check.probabilities:.1e} in a probability of predict, "
        f"{result.check.outputs:.1e} in any output of the same graph"
    )
    if "masks" in result.metadata["uefl.uncertainty"]:
        typer.echo(f"entropy differs by {result.check.entropy:.1e} on average: predict draws other masks")
    owner = f"silo {name}" if (name := result.metadata["uefl.silo"]) else "all silos"
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB): the model of {owner}")
