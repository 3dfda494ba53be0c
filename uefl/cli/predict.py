"""`uefl predict`: predict the classes of new images with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uefl.cli.options import DeviceOption, ThreadsOption
from uefl.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from uefl.data.readers.context import ReadContext
    from uefl.experiment.silo_models import SiloModels


def register(app: typer.Typer) -> None:
    app.command()(predict)


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or a model file.")],
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Images or CSV tables, folders and zip archives of them, or CSV lists of images (column `path`).",
        ),
    ],
    silo: Annotated[
        str,
        typer.Option(
            help="Silo whose model is used; auto: the one that fits the inputs best; without it, what all silos share."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="File to write; an existing one is never overwritten. Default: the terminal.")
    ] = None,
    format_name: Annotated[
        str, typer.Option("--format", help="csv or jsonl (JSON lines); by default that of the file's name, else csv.")
    ] = "",
    samples: Annotated[
        int | None, typer.Option(help="Passes with dropout, for the uncertainty; by default as in training.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the passes; by default that of the training.")] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
) -> None:
    """Predict the classes of new images, or of new rows of a table.

    Writes one row per image or row: file (and line), label, probability,
    predictive entropy and mutual information (both in nats); after `uefl
    calibrate`, also prediction set and abstain. Images, rows and tables that
    cannot be used are named, counted and skipped; the exit code is 2 if nothing
    is left, else 0. All inputs of one command use the same model.

    \b
    Examples:
      uefl predict runs/uefl-folder-… photos/new --silo north
      uefl predict runs/uefl-folder-… a.png b.png --silo auto
      uefl predict runs/uefl-folder-… new.zip --silo north --out new.jsonl
    """
    if samples is not None and samples < 1:
        raise InputError(f"samples={samples} must be at least 1")
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")

    import torch

    from uefl.data.readers.context import ReadContext
    from uefl.data.readers.unlabeled_files import list_table_files, list_unlabeled_files
    from uefl.engines.choosing import check_device
    from uefl.experiment.inputs import find_silo_column
    from uefl.experiment.loading import open_models
    from uefl.experiment.prediction_rows import (
        choose_format,
        decode_probes,
        open_output,
        predict_files,
        predict_table_rows,
        read_table_inputs,
        write_rows,
    )
    from uefl.experiment.silo_choice import AUTO

    check_device(device)
    torch.set_num_threads(threads)
    chosen_format, context = choose_format(format_name, out), ReadContext(skip_bad=True, show_progress=True)
    models = open_models(run)
    input_format = models.description.input_format
    if silo and silo != AUTO:
        models.check_silo(silo)
    if input_format.table:
        column = find_silo_column(models.description, silo).column
        table_rows = read_table_inputs(list_table_files(inputs, context), input_format, context, column)
        silo = _choose_silo(models, table_rows.probes, device) if silo == AUTO else silo
        model = models.build(silo, device)
        _warn_other_silos(models, model.silo_name, table_rows.silo_values)
        rows = predict_table_rows(model, table_rows, context, mc_samples=samples, seed=seed)
    elif input_format.is_image:
        files = list_unlabeled_files(inputs, context)
        silo = _choose_silo(models, decode_probes(files, input_format), device) if silo == AUTO else silo
        model = models.build(silo, device)
        rows = predict_files(model, files, context, mc_samples=samples, seed=seed)
    else:
        raise InputError(f"{run} takes neither images nor tables; use uefl.load and predict in Python")
    if out is None:
        count = write_rows(rows, sys.stdout, chosen_format)
    else:
        with open_output(out) as file:
            if not (count := write_rows(rows, file, chosen_format)):
                raise no_usable_image(context)  # and leave no file
    _report(context, count, f"silo {model.silo_name}" if model.silo_name else "all silos", out)
    if not model.silo_name and models.is_calibrated:
        typer.echo("no prediction sets: a calibration belongs to a silo; choose one with --silo", err=True)


def _choose_silo(models: SiloModels, probes: Tensor, device: str) -> str:
    from uefl.experiment.silo_choice import choose_silo

    choice = choose_silo(models, probes, device)
    typer.echo(choice.describe(), err=True)
    return choice.silo_name


def _warn_other_silos(models: SiloModels, silo: str, silo_values: Sequence[str]) -> None:
    """Count the rows that name another silo than the one whose model is used; that may be intended."""
    from uefl.data.readers.context import sanitize_line
    from uefl.experiment.inputs import find_silo_column

    if silo and (line := find_silo_column(models.description, silo).describe_others(silo_values)):
        typer.echo(f"warning: {sanitize_line(line)}", err=True)


def _report(context: ReadContext, count: int, owner: str, out: Path | None) -> None:
    """Name what was skipped and count what was predicted, beside the output."""
    from uefl.data.readers.context import sanitize_line

    skipped = context.skipped_messages
    for note, number in sorted(context.note_counts.items()):
        typer.echo(f"{number} {note}", err=True)
    for line in skipped:
        typer.echo(f"skipped: {sanitize_line(line)}", err=True)
    if not count:
        raise no_usable_image(context)
    bad = f"; {len(skipped)} bad {'one' if len(skipped) == 1 else 'ones'} skipped" if skipped else ""
    where = f", in {out}" if out else ""
    typer.echo(f"{count} predicted with the model of {owner}{bad}{where}", err=True)


def no_usable_image(context: ReadContext) -> InputError:
    """Return the error of a command that predicted nothing."""
    lines = context.skipped_messages
    return InputError(f"none of the {len(lines)} images is usable; the first: {lines[0]}")
