"""Show the progress of methods that run with several seeds or folds."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from uefl.experiment.experiment import Experiment
from uefl.experiment.run import Event


class RepeatsProgress:
    """Show a bar per method on a terminal, a line per finished run elsewhere."""

    def __init__(self, console: Console, experiments: Mapping[tuple[str, str], Experiment]) -> None:
        self.console, self.start_time = console, time.monotonic()
        self.num_rounds = {key: experiment.method.total_rounds for key, experiment in experiments.items()}
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        names = list(dict.fromkeys(name for name, _ in experiments))[::-1]
        totals = {n: sum(rounds for (name, _), rounds in self.num_rounds.items() if name == n) for n in names}
        self.tasks = {name: self.progress.add_task(name, total=total) for name, total in totals.items()}
        self.rounds_done = dict.fromkeys(experiments, 0)
        self.warnings: set[str] = set()
        self.reported: set[tuple[str, str]] = set()  # runs whose end has its line; one that found no memory ends twice

    def __enter__(self) -> RepeatsProgress:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def on_event(self, key: tuple[str, str], event: Event) -> None:
        """Show one event of a run."""
        if event["kind"] == "warning" and event["message"] not in self.warnings:
            self.warnings.add(event["message"])
            self.console.print(f"warning: {event['message']}", style="yellow", soft_wrap=True, markup=False)
        match event["kind"]:
            case "start":
                self._show_rounds(key, event["round"])
            case "round":
                self._show_rounds(key, event["record"]["round"])
            case "finished":
                self._show_rounds(key, self.num_rounds[key])

    def _show_rounds(self, key: tuple[str, str], num_done: int) -> None:
        self.rounds_done[key] = num_done
        completed = sum(rounds for (name, _), rounds in self.rounds_done.items() if name == key[0])
        self.progress.update(self.tasks[key[0]], completed=completed)
        if num_done == self.num_rounds[key] and key not in self.reported and not self.console.is_terminal:
            self.reported.add(key)
            num_finished = sum(self.rounds_done[k] == rounds for k, rounds in self.num_rounds.items())
            self.console.print(
                f"{', '.join(key)}: finished, {num_finished} of {len(self.num_rounds)} runs after "
                f"{time.monotonic() - self.start_time:.0f} s",
                soft_wrap=True,
                markup=False,
            )
