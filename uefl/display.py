"""Live progress of one or several runs, and what happens in them in words."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from uefl.metrics import mean_over
from uefl.report import decided
from uefl.run import Event


class Display:
    """A bar a run on a terminal, a line a round elsewhere. Use as a context, and hand it the events of the runs."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.fields[run]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}
        self.state: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def hear(self, run: str, event: Event) -> None:
        """Take in one event of a run."""
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task("", total=None, run=run, facts="loads data", left="")
            self.state[run] = {"iteration": 0, "silo": "", "measured": "", "round": 0, "first": 0}
        getattr(self, f"_{event['kind']}", lambda *_: None)(run, event)

    def _start(self, run: str, event: Event) -> None:
        state = self.state[run]
        state |= {
            "budget": event["budget"],
            "round": event["round"],
            "began": time.monotonic(),
            "first": event["round"],
        }
        if event["round"]:
            self.console.print(f"{run}: goes on after round {event['round']} of {event['budget']}")
        self.progress.update(self.tasks[run], total=event["budget"], completed=event["round"])

    def _warning(self, run: str, event: Event) -> None:
        self.console.print(f"{run}: warning: {event['line']}", style="yellow", soft_wrap=True, markup=False)

    def _found(self, run: str, event: Event) -> None:
        self.console.print(f"{run}: finished before (engine {event['engine']}), in {event['folder']}", soft_wrap=True)
        self.progress.update(self.tasks[run], total=1, completed=1, facts="finished before")

    def _silo(self, run: str, event: Event) -> None:
        if not event["silo"]:  # nobody we know: a node that was turned away
            self.console.print(f"{run}: {event['doing']}", soft_wrap=True)
            return
        self.state[run]["silo"] = f"{event['silo']} {event['doing']}"
        self._refresh(run)

    def _round(self, run: str, event: Event) -> None:
        record, state = event["record"], self.state[run]
        silos = record["silos"].values()
        measured = f"mA {mean_over(silos, 'accuracy'):.3f}  mE {mean_over(silos, 'entropy'):.3f}"
        state |= {"measured": measured, "iteration": record["iteration"], "round": record["round"]}
        if "first_book" in record:
            self.console.print(f"{run}: after round {record['round']}, a first book of {record['first_book']} words")
        if record.get("judged"):
            uncertain = [n for n, mine in record["silos"].items() if mine["uncertain"]]
            new = {n: mine["new_words"] for n, mine in record["silos"].items() if mine["new_words"]}
            self.console.print(f"{run}: {decided(record['round'], uncertain, new)}", soft_wrap=True)
        for name, mine in record["silos"].items():
            if "refused" in mine:
                self.console.print(f"{run}: round {record['round']}, reply of {name} refused: {mine['refused']}")
        if not self.console.is_terminal:
            self.console.print(
                f"{run}: iteration {record['iteration'] + 1}, round {record['round']}/{state['budget']}  {measured}"
                f"{self._left(run)}",
                soft_wrap=True,
            )
        self._refresh(run)

    def _left(self, run: str) -> str:
        state = self.state[run]
        done = state["round"] - state["first"]
        if done < 1:
            return ""
        seconds = (time.monotonic() - state["began"]) / done * (state["budget"] - state["round"])
        return f"  about {seconds / 60:.0f} min left" if seconds > 90 else f"  about {seconds:.0f} s left"

    def _refresh(self, run: str) -> None:
        state = self.state[run]
        facts = f"iteration {state['iteration'] + 1}  {state['measured']}  {state['silo']}"
        self.progress.update(self.tasks[run], completed=state["round"], facts=facts, left=self._left(run))
