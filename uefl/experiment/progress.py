"""Show the live progress of runs, and describe their events."""

from __future__ import annotations

import re
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from uefl.core.metrics import mean_metric, select_table_metrics
from uefl.experiment.chance import is_at_chance, mean_accuracy
from uefl.experiment.plan import describe_seconds
from uefl.experiment.records import is_evaluated, summarize_decision, summarize_revocation
from uefl.experiment.report import describe_decision, describe_revocation
from uefl.experiment.run import Event

SEED_OR_TARGET = re.compile(r", (seed \d+|without .+)$")  # end of the name of a run in a comparison over these


class StatusColumn(TextColumn):
    """Text that is cut off where the line is too long, in place of the counts and times beside it."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False, table_column=Column())

    def render(self, task: Task) -> Text:
        """Return the text of a task on one line."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class ProgressDisplay:
    """Show a bar per run on a terminal, a line per round elsewhere. Use it as a context and pass it all events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.fields[run]}", markup=False),
            BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            StatusColumn("{task.fields[status]}"),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[time_left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}
        self.printed_warnings: set[str] = set()
        self.run_states: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> ProgressDisplay:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def on_event(self, run: str, event: Event) -> None:
        """Show one event of a run."""
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task("", total=None, run=run, status="loading data", time_left="")
            self.run_states[run] = {
                "phase": "iteration 1",
                "silo": "",
                "metrics_text": "",
                "round": 0,
                "first_round": 0,
                "header": {},
            }
        handlers = {
            "start": self._on_start,
            "plan": self._on_plan,
            "warning": self._on_warning,
            "finished": self._on_finished,
            "silo": self._on_silo,
            "trained": self._on_trained,
            "round": self._on_round,
        }
        if handler := handlers.get(event["kind"]):
            handler(run, event)

    def _on_start(self, run: str, event: Event) -> None:
        round_number, total_rounds = event["round"], event["total_rounds"]
        self.run_states[run] |= {
            "total_rounds": total_rounds,
            "round": round_number,
            "start_time": time.monotonic(),
            "header": event.get("header", {}),
            "first_round": round_number,
        }
        if round_number:
            self.console.print(f"{run}: resumed after round {round_number} of {total_rounds}", markup=False)
        self.progress.update(self.tasks[run], total=total_rounds, completed=round_number)

    def _on_plan(self, run: str, event: Event) -> None:
        size = event.get("codebook_size")
        codebook = f"{size.num_codewords} codewords of {size.segments} segments per feature, " if size else ""
        self.console.print(
            f"{run}: {event['num_images']} examples, {event['num_silos']} silos, {event['num_parameters']} parameters, "
            f"{codebook}{event['num_rounds']} rounds; estimated time: {describe_seconds(event['seconds'])}",
            soft_wrap=True,
            markup=False,
        )

    def _on_warning(self, run: str, event: Event) -> None:
        label = f"{run}: "
        if event.get("about") == "data":  # the same for all runs of a comparison
            label = ""
        elif event.get("about") == "settings":  # the same for all seeds or targets of a method
            label = f"{SEED_OR_TARGET.sub('', run)}: "
        line = f"{label}warning: {event['message']}"
        if "about" in event and line in self.printed_warnings:
            return
        self.printed_warnings.add(line)
        self.console.print(line, style="yellow", soft_wrap=True, markup=False)

    def _on_finished(self, run: str, event: Event) -> None:
        self.console.print(
            f"{run}: already finished (engine {event['engine']}), in {event['folder']}", soft_wrap=True, markup=False
        )
        self.progress.update(self.tasks[run], total=1, completed=1, status="already finished")

    def _on_silo(self, run: str, event: Event) -> None:
        if not event["silo"]:  # a node that is no silo of this run
            self.console.print(f"{run}: {event['activity']}", soft_wrap=True, markup=False)
            return
        self.run_states[run]["silo"] = f"{event['silo']} {event['activity'].replace('_', ' ')}"  # some name a task
        self._refresh(run)

    def _on_trained(self, run: str, event: Event) -> None:
        """Show the first round without a terminal, where nothing else moves."""
        if not self.console.is_terminal:
            total = self.run_states[run]["total_rounds"]
            self.console.print(
                f"{run}: round {event['round']}/{total} trained in {describe_seconds(event['seconds'])}; "
                "its metrics follow with the next round",
                soft_wrap=True,
                markup=False,
            )

    def _on_round(self, run: str, event: Event) -> None:
        record, state = event["record"], self.run_states[run]
        round_number, silos = record["round"], record["silos"]
        if is_evaluated(record):
            means = [
                f"{metric.label} {mean_metric(silos.values(), metric.name):.{metric.digits}f}"
                for metric in select_table_metrics(with_codebook=False)
            ]
            sample = (
                f"  ({record['num_evaluated']} of {record['num_silos']} silos)" if "num_evaluated" in record else ""
            )
            state["metrics_text"] = "  ".join(means) + sample
        phase = "in groups" if record.get("groups") else f"iteration {record['iteration'] + 1}"
        state |= {"phase": phase, "round": round_number}
        if "initial_codewords" in record:
            count = record["initial_codewords"]
            self.console.print(
                f"{run}: after round {round_number}, an initial codebook of {count} codewords", markup=False
            )
        if revocation := summarize_revocation(record):
            self.console.print(f"{run}: {describe_revocation(revocation)}", soft_wrap=True, markup=False)
        if record.get("has_decision"):
            is_untrained = bool(state["header"]) and is_at_chance(mean_accuracy(record), state["header"])
            decision = describe_decision(summarize_decision(record), is_untrained=is_untrained)
            self.console.print(f"{run}: {decision}", soft_wrap=True, markup=False)
        for name, silo in silos.items():
            if "rejected" in silo:
                line = f"{run}: round {round_number}, reply of {name} rejected: {silo['rejected']}"
                self.console.print(line, soft_wrap=True, markup=False)
        if not self.console.is_terminal:
            self.console.print(
                f"{run}: {phase}, round {round_number}/{state['total_rounds']}  "
                f"{state['metrics_text'] if is_evaluated(record) else 'not evaluated'}{self._format_time_left(run)}",
                soft_wrap=True,
                markup=False,
            )
        self._refresh(run)

    def _format_time_left(self, run: str) -> str:
        state = self.run_states[run]
        rounds_done = state["round"] - state["first_round"]
        if rounds_done < 1:
            return ""
        seconds_per_round = (time.monotonic() - state["start_time"]) / rounds_done
        seconds = seconds_per_round * (state["total_rounds"] - state["round"])
        return f"  about {seconds / 60:.0f} min left" if seconds > 90 else f"  about {seconds:.0f} s left"

    def _refresh(self, run: str) -> None:
        state, time_left = self.run_states[run], self._format_time_left(run)
        status = f"{state['phase']}  {state['metrics_text']}  {state['silo']}"
        self.progress.update(self.tasks[run], completed=state["round"], status=status, time_left=time_left)
