"""`uefl calibrate`: prediction sets and abstaining for the silos of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uefl.cli.options import DeviceOption
from uefl.core.errors import InputError

if TYPE_CHECKING:
    from uefl.experiment.calibration import CalibrationSettings
    from uefl.experiment.held_out import HeldOut
    from uefl.experiment.run_folder import RunFolder
    from uefl.experiment.silo_models import SiloModels


def register(app: typer.Typer) -> None:
    app.command()(calibrate)


def calibrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a silo's copy.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[coverage=0.9] [risk=0.05] [pooling=0] [label=COLUMN] [PATH]...",
            help="What is asked, and labeled files of the silo: folders <class>/…, zip archives, CSV files.",
        ),
    ] = None,
    silo: Annotated[
        str, typer.Option(help="Calibrate only this silo; needed with files, except in a silo's copy.")
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace another calibration; the old one is kept under a new name.")
    ] = False,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Remove the calibration of --silo, or of all; `uefl predict` is as before it."),
    ] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Calibrate a finished run, silo by silo; `uefl predict` then gives prediction sets and abstains.

    coverage: at least this share of prediction sets has the true class.
    risk: at most this share of the answers is wrong; where that cannot be
    certified, the model abstains. risk=0 answers always. pooling: the scores of
    other silos count as so many examples of a small silo, without a guarantee.

    Each silo uses its calibration part: train with calibration_fraction=0.2.
    For other runs, give labeled files that the silo did not train with. At
    least 9 examples are needed for coverage=0.9, and 45 for risk=0.05.

    Nothing is sent. The result is calibration.json in the folder of the run.
    --reset removes it again, with what was stored of labeled files; the files
    before are kept under new names.

    \b
    Examples:
      uefl calibrate runs/uefl-folder-… coverage=0.9 risk=0.05
      uefl calibrate runs/uefl-folder-… coverage=0.8 --replace
      uefl calibrate runs/uefl-folder-… labeled/ --silo north
      uefl calibrate runs/uefl-folder-… --reset --silo north
    """
    from rich.console import Console

    from uefl.engines.choosing import check_device
    from uefl.experiment.calibration import calibrate_silos, find_changes, read_calibrations, write_calibrations
    from uefl.experiment.calibration_report import explain_calibration, make_calibration_table
    from uefl.experiment.files import ensure_writable_folder, keep_old_version
    from uefl.experiment.held_out import save_held_out
    from uefl.experiment.loading import find_model_file, open_models
    from uefl.experiment.run_folder import RunFolder

    check_device(device)
    if reset and (given := [*(arguments or []), *(["--replace"] if replace else [])]):
        raise InputError(f"--reset removes a calibration and takes only --silo, not {given[0]}")
    settings, label_column, paths = parse_arguments(arguments or [])
    model_file = find_model_file(run)
    if model_file.name != RunFolder.MODEL_FILE:
        raise InputError(f"{run} is a model file of another name; give the folder of a run or of a silo's copy")
    models = open_models(model_file)
    silo = silo or models.description.owner
    if paths and not silo:
        raise InputError(f"files belong to one silo; name it with --silo: {', '.join(models.list_trained())}")
    if silo:
        models.check_silo(silo)
    folder = RunFolder(ensure_writable_folder(model_file.parent))
    if reset:
        _reset(folder, models, silo)
        return
    with folder.lock():
        held_out = dict(models.held_out)
        if paths:
            if silo in held_out and not replace:
                raise InputError(
                    f"silo {silo} has {len(held_out[silo].labels)} examples already, {held_out[silo].source}; "
                    "leave the files out, or add --replace to use them instead"
                )
            held_out[silo] = _hold_out_files(models, silo, paths, label_column, device)
        found = calibrate_silos(_check_held_out(held_out, silo, run), settings, len(models.description.class_names))
        chosen = {name: own for name, own in found.items() if not silo or name == silo}
        old = read_calibrations(folder.calibration_path, models)
        if (changed := find_changes(old, chosen)) and not replace:
            before = old[changed[0]]
            raise InputError(
                f"silo {changed[0]} is calibrated with coverage={before.coverage:g} risk={before.risk:g} "
                f"pooling={before.pooling}, {before.source}; add --replace, which keeps the old calibration"
            )
        if paths:
            if silo in models.held_out:
                keep_old_version(folder.held_out_path)
            save_held_out(folder.held_out_path, models, held_out)
        if changed:
            typer.echo(f"the calibration before is kept as {keep_old_version(folder.calibration_path).name}")
        if old != {**old, **chosen}:
            write_calibrations(folder.calibration_path, models, {**old, **chosen})
    console = Console()
    console.print(make_calibration_table(chosen))
    for line in explain_calibration(chosen):
        console.print(line, markup=False, soft_wrap=True)
    if without := [name for name in models.description.silo_names if name not in found and not silo]:
        console.print(f"not calibrated, without examples: {', '.join(without)}", markup=False, soft_wrap=True)
    console.print(f"written: {folder.calibration_path}", markup=False, soft_wrap=True)


def _reset(folder: RunFolder, models: SiloModels, silo: str) -> None:
    """Remove calibrations and print what was removed."""
    from uefl.experiment.calibration_reset import remove_calibrations

    with folder.lock():
        removal = remove_calibrations(folder, models, silo)
    for line in removal.describe():
        typer.echo(line)


def parse_arguments(arguments: Sequence[str]) -> tuple[CalibrationSettings, str, list[Path]]:
    """Return the settings, the column of labels and the paths; an argument that exists as a path is one."""
    from uefl.experiment.calibration import CalibrationSettings
    from uefl.experiment.settings import override_settings

    paths = [Path(text) for text in arguments if "=" not in text or Path(text).exists()]
    assignments = [text for text in arguments if Path(text) not in paths]
    labels = [text.partition("=")[2] for text in assignments if text.startswith("label=")]
    rest = [text for text in assignments if not text.startswith("label=")]
    return override_settings(CalibrationSettings(), rest), (labels or [""])[-1], paths


def _hold_out_files(models: SiloModels, silo: str, paths: Sequence[Path], label_column: str, device: str) -> HeldOut:
    from uefl.data.readers.context import ReadContext, sanitize_line
    from uefl.experiment.held_out import LABELED_FILES, HeldOut, measure_examples
    from uefl.experiment.inputs import read_labeled_inputs

    context = ReadContext(skip_bad=True, show_progress=True)
    examples = read_labeled_inputs(paths, models.description, silo, context, label_column)
    for line in context.skipped_messages:
        typer.echo(f"skipped: {sanitize_line(line)}", err=True)
    measurements = measure_examples(models.build(silo, device), examples.x, show_progress=True)
    return HeldOut(examples.y, measurements, source=LABELED_FILES)


def _check_held_out(held_out: dict[str, HeldOut], silo: str, run: Path) -> dict[str, HeldOut]:
    if not held_out or (silo and silo not in held_out):
        owner = f"silo {silo}" if silo else str(run)
        raise InputError(
            f"{owner} has no calibration part; give labeled files of a silo (PATH --silo NAME), or train again with "
            "calibration_fraction=0.2"
        )
    return held_out
