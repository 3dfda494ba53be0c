"""`uefl join`: let a further silo join a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uefl.cli.options import DeviceOption, ThreadsOption
from uefl.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from uefl.experiment.join_folder import Parent
    from uefl.experiment.joining import JoinResult, JoinSettings


def register(app: typer.Typer) -> None:
    app.command()(join)


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Labeled data of the new silo: a folder <class>/, a zip archive, or a CSV file."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIELD=VALUE]...", help="Settings of the join, listed above."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the new run folder; by default that of RUN.")] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
) -> None:
    """Let a further silo join a finished run, without changing the run.

    The new silo gets codewords by K-means on its own features and trains only
    what is its own. No tensor of another silo and no shared tensor changes. Its
    own labeled examples choose what is trained: codewords under the shared
    classifier, a classifier too, or a new classifier on features that pass
    beside the codewords. Its test examples choose nothing. PATH is read with
    the data settings of the run. The result is a new run folder, for `uefl
    predict`, `calibrate`, `watch`, `export`, `show` and `uefl.load`.

    \b
    Settings, as FIELD=VALUE:
      name=east           name of the silo; by default that of its folder
      epochs=30           passes over its training examples
      lr=1e-3,1e-2        learning rates to choose from
      head=auto           classifier: shared, own, new, or auto (the choice above)
      gate=own            features pass beside codewords, under any classifier
      codewords=shared    no codewords of its own
      batch_norm=own      batch-norm statistics of its own, too
      others=train        instead: rounds=5 further rounds of all silos

    \b
    Examples:
      uefl join runs/uefl-folder-… photos/east
      uefl join runs/uefl-table-… east.csv name=east epochs=50
      uefl join runs/uefl-folder-… east.zip others=train rounds=3
    """
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")

    import torch
    from rich.console import Console

    from uefl.core.federation import list_parts
    from uefl.engines.choosing import check_device
    from uefl.experiment.join_folder import join_run, load_newcomer, name_newcomer, open_parent
    from uefl.experiment.joining import JoinSettings, check_newcomer
    from uefl.experiment.settings import override_settings

    check_device(device)
    torch.set_num_threads(threads)
    chosen = name_newcomer(path, override_settings(JoinSettings(), settings or []))
    parent, console = open_parent(run), Console()
    silo = check_newcomer(parent.models, load_newcomer(parent, path, chosen.name))
    sizes = ", ".join(f"{len(examples.y)} {part}" for part, examples in list_parts(silo).items())
    console.print(f"{silo.name}: {sizes} examples; joins {run}", soft_wrap=True, markup=False, highlight=False)
    out = out or run.resolve().parent
    if chosen.others == "train":
        from uefl.experiment.progress import ProgressDisplay

        with ProgressDisplay(console) as display:
            folder, result = join_run(
                *(parent, silo, path, chosen, out),
                device=device,
                on_event=lambda event: display.on_event(f"{silo.name} joins", event),
            )
    else:
        with JoinProgress(console) as progress:
            folder, result = join_run(
                *(parent, silo, path, chosen, out), device=device, on_progress=progress.on_progress
            )
    _report(console, parent, result, chosen, folder, len(silo.train.y))


class JoinProgress:
    """A bar of the epochs of all learning rates on a terminal, a line per learning rate elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress

        self.console, self.activity = console, ""
        self.bar = Progress(console=console, disable=not console.is_terminal, transient=True)
        self.task = self.bar.add_task("loading", total=None)

    def __enter__(self) -> JoinProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_progress(self, activity: str, done: int, total: int) -> None:
        """Show what the silo is at."""
        if activity != self.activity and not self.console.is_terminal:
            self.console.print(f"{activity} …", highlight=False)
        self.activity = activity
        self.bar.update(self.task, description=activity, completed=done, total=total or None)


def _report(
    console: Console, parent: Parent, result: JoinResult | None, settings: JoinSettings, folder: Path, num_train: int
) -> None:
    """Print what was found and done, the table, and the new folder."""
    from uefl.experiment.join_folder import read_evaluations
    from uefl.experiment.join_report import (
        describe_choice,
        describe_last_decision,
        describe_missing_calibration,
        describe_missing_codewords,
        describe_own_parts,
        describe_uncertainty,
        make_join_table,
    )
    from uefl.experiment.report import print_runs

    if result is None:
        lines = ["already joined with these data and settings"]
    else:
        models, codebook = parent.models, parent.models.method.codebook
        test = codebook.uncertainty_test if codebook else ""
        lines = [
            describe_uncertainty(models, result.silo_name, result.shared),
            describe_last_decision(parent.folder.read_records(), test),
            describe_own_parts(models, result),
            describe_missing_codewords(models, result, num_train),
            describe_choice(result) if settings.others == "fixed" else "",
            describe_missing_calibration(models, result.silo_name, settings.others),
        ]
    for line in filter(None, lines):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(make_join_table(read_evaluations(folder)))
    if settings.others == "train":
        print_runs({f"{settings.name} joined": folder}, console)
    else:
        console.print("no tensor of another silo and no shared tensor has changed", highlight=False)
    console.print(f"run folder: {folder}", soft_wrap=True, markup=False, highlight=False)
