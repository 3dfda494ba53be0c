"""`uefl watch`: is this still the silo's data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from uefl.cli.options import DeviceOption
from uefl.core.errors import InputError

MIN_LEVEL = 1e-5  # per look


def register(app: typer.Typer) -> None:
    app.command()(watch)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a silo's copy.")],
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="New images, folders, zip archives, CSV files; labels are not needed."),
    ],
    silo: Annotated[str, typer.Option(help="Silo that the inputs should belong to; not needed in a silo's copy.")] = "",
    looks: Annotated[int, typer.Option(help="Planned looks, for example 12 in a year; they share the level.")] = 1,
    level: Annotated[float, typer.Option(help="Chance of a false alarm, over all planned looks.")] = 0.05,
    figure: Annotated[
        Path | None, typer.Option(help="PNG file of the picture; by default in the folder of the run.")
    ] = None,
    device: DeviceOption = "cpu",
) -> None:
    """Test whether new inputs are still like a silo's data; exit code 1 is an alarm.

    Compares the inputs with the silo's calibration examples, as the model sees
    them: predictive entropy and, for models with a codebook, the use of
    codewords. The tests permute whole images or rows. Without a change, an
    alarm has at most the chance of the level. No alarm is no proof that nothing
    has changed.

    Needs a run with calibration_fraction=0.2, or one that `uefl calibrate` has
    calibrated with labeled files. Draw inputs at random over classes as they
    occur: a change of their frequencies is a change of the data too.

    \b
    Examples:
      uefl watch runs/uefl-folder-… new/ --silo north
      uefl watch runs/uefl-folder-… january/ --silo north --looks 12
    """
    if looks < 1:
        raise InputError(f"looks={looks} must be at least 1")
    if not 0 < level < 1:
        raise InputError(f"level={level} must be greater than 0 and less than 1")
    if level / looks < MIN_LEVEL:
        raise InputError(
            f"level={level:g} over looks={looks} is {level / looks:g} per look, which takes hours of permutations; "
            f"it must be at least {MIN_LEVEL:g}"
        )
    if figure is not None and figure.suffix.lower() != ".png":
        raise InputError(f"figure={figure} must be a PNG file: a name that ends with .png")

    from uefl.data.readers.context import ReadContext, sanitize_line
    from uefl.engines.choosing import check_device
    from uefl.experiment.files import ensure_writable_folder
    from uefl.experiment.inputs import read_inputs
    from uefl.experiment.loading import find_model_file, open_models
    from uefl.experiment.watch import draw_watch, watch_silo

    check_device(device)
    model_file = find_model_file(run)
    models = open_models(model_file)
    silo = silo or models.description.owner
    if not silo:
        raise InputError(f"name the silo with --silo: {', '.join(models.list_trained())}")
    models.check_silo(silo)
    path = figure or model_file.parent / f"watch-{quote(silo, safe=' ')}.png"
    ensure_writable_folder(path.parent)
    context = ReadContext(skip_bad=True, show_progress=True)
    x = read_inputs(inputs, models.description, silo, context)
    for line in context.warnings:
        typer.echo(f"warning: {sanitize_line(line)}", err=True)
    for line in context.skipped_messages:
        typer.echo(f"skipped: {sanitize_line(line)}", err=True)
    report = watch_silo(models, silo, x, level=level, looks=looks, device=device)
    for line in report.describe():
        typer.echo(line)
    typer.echo(f"figure: {draw_watch(report, path)}")
    if report.is_alarm:
        raise typer.Exit(1)
