"""Run a study: several runs side by side, one line of the records file for each that ends.

Every run has its own folder and goes on after a kill. A run whose line is there already is not run again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from studies.methods.set_ups import FEDAVG, SET_UPS, SetUp, trial
from uefl import records
from uefl.errors import Stopped
from uefl.experiment import RESULTS, Experiment
from uefl.metrics import mean_over
from uefl.report import LEVEL, summary
from uefl.run import HEADER, RECORDS, Event, run
from uefl.settings import leaves

LEVELS = ("last", LEVEL, "best by validation")
Line = dict[str, Any]


class Where(NamedTuple):
    """What runs run on."""

    device: str
    engine: str
    out: Path  # folder of run folders
    until: float  # time.time() at which runs stop; they can go on later
    workers: int


class Job(NamedTuple):
    """One run."""

    set_up: str
    method: str
    seed: int
    experiment: Experiment
    slow: float = 1.0

    @property
    def words(self) -> str:
        return f"{self.set_up}, {self.method}, rate {self.experiment.method.local.rate:g}, seed {self.seed}"

    def is_in(self, lines: Iterable[Line]) -> bool:
        """Whether a line of the records is this run's."""
        about = {**settled(self.experiment), "results": RESULTS, "set-up": self.set_up, "method": self.method}
        return any(all(line.get(name) == value for name, value in about.items()) for line in lines)


def settled(experiment: Experiment) -> Line:
    """What a run is, in few words: the settings that are not everyone's defaults."""
    usual = dict(leaves(Experiment()))
    changed = {".".join(path): value for path, value in leaves(experiment) if usual.get(path, ...) != value}
    seed = changed.pop("seed", 0)
    plain: Line = json.loads(json.dumps({"algorithm": experiment.name, "seed": seed, "settings": changed}))
    return plain


# --- which runs ---------------------------------------------------------------------------------------------------


def search(names: Sequence[str]) -> list[Job]:
    """FedAvg at every rate, by which the rate is chosen."""
    return [
        Job(name, FEDAVG, 0, SET_UPS[name].experiment(FEDAVG, rate, 0))
        for name in names
        for rate in SET_UPS[name].rates
    ]


def chosen_rate(name: str, lines: Sequence[Line]) -> float | None:
    """The rate at which FedAvg, seed 0, validates best; none before all of them have run."""
    scores = {}
    for job in search([name]):
        found = [line for line in lines if job.is_in([line])]
        if not found:
            return None
        scores[job.experiment.method.local.rate] = found[-1]["validation_accuracy"]
    return max(scores, key=lambda rate: scores[rate])


def jobs(name: str, rate: float, methods: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """The runs of a set-up."""
    set_up: SetUp = SET_UPS[name]
    return [
        Job(name, method, seed, set_up.experiment(method, rate, seed), row.slow)
        for seed in seeds
        for method, row in set_up.methods.items()
        if not methods or method in methods
    ]


def study(
    names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    where: Where,
    path: Path,
    say: Callable[[str], None],
) -> int:
    """Search the rates that are not known yet, then run everything; returns how many runs failed or are left."""
    left = together(search(names), where, path, say)
    lines = records.read(path)
    rates = {name: chosen_rate(name, lines) for name in names}
    say("rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items() if rate))
    every = [job for name, rate in rates.items() if rate for job in jobs(name, rate, methods, seeds)]
    # Whole seeds first, so that a study cut short has complete ones; within a seed long runs first.
    return left + together(sorted(every, key=lambda job: (job.seed, -job.slow)), where, path, say)


def tried(
    names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    where: Where,
    path: Path,
    say: Callable[[str], None],
) -> int:
    """The same at a size for a look, at the middle rate."""
    every = [job for name in names for job in jobs(name, SET_UPS[name].rates[1], methods, seeds)]
    return together([job._replace(experiment=trial(job.experiment)) for job in every], where, path, say)


# --- running ------------------------------------------------------------------------------------------------------


def together(every: Sequence[Job], where: Where, path: Path, say: Callable[[str], None]) -> int:
    """Run what has no line yet, `workers` at a time; returns how many failed or had no time."""
    lines = records.read(path)
    todo = [job for job in every if not job.is_in(lines)]
    say(f"{len(every)} runs, {len(every) - len(todo)} of them done")
    if not todo or time.time() > where.until:
        return len(todo)
    for name in {job.experiment.data.name for job in todo}:
        next(job for job in todo if job.experiment.data.name == name).experiment.data.load(
            0
        )  # decode once, not in every process
    began, left = time.time(), 0
    # Processes stay for many runs: to load torch and wake a GPU takes as long as some runs.
    with ProcessPoolExecutor(min(where.workers, len(todo)), get_context("spawn"), _prepare) as pool:
        futures = {pool.submit(_work, job, where, os.getpid()): job for job in todo}
        for done, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            try:
                line = future.result()
            except Stopped:
                left += 1
                continue
            except Exception as e:  # one bad run must not cost the others
                left += 1
                say(f"{job.words}: {type(e).__name__}: {e}")
                continue
            records.append(path, [line])
            facts = " ".join(f"{m} {line[LEVEL][m]:.3f}" for m in ("mA", "mE"))
            say(f"[{done}/{len(todo)} after {time.time() - began:.0f} s] {job.words}: {facts}, {line['seconds']:.0f} s")
    return left


def _prepare() -> None:
    torch.set_num_threads(1)


def _work(job: Job, where: Where, parent: int) -> Line:
    """In a process of its own: one run, to its end or to the time limit."""

    def listen(event: Event) -> None:
        if os.getppid() != parent:
            os._exit(1)  # nobody is left to hear: the checkpoint stands
        if event["kind"] in ("load", "round") and time.time() > where.until:
            raise Stopped("no time left; run again to go on")

    folder = run(job.experiment, where.out, device=where.device, engine=where.engine, listen=listen)
    return line_of(job, folder, where.workers)


def line_of(job: Job, folder: Path, workers: int) -> Line:
    """A finished run in one line."""
    header, found = json.loads((folder / HEADER).read_text()), summary(folder)
    rounds = records.read(folder / RECORDS)
    trained = [mine for r in rounds for mine in r["silos"].values() if "up" in mine]
    about = {key: header[key] for key in ("engine", "device", "torch", "uefl", "results", "fingerprint", "budget")}
    line: Line = {
        "set-up": job.set_up,
        "method": job.method,
        **settled(job.experiment),
        **{level: {m: found[level][m] for m in ("mA", "mE", "mP")} for level in LEVELS},
        "domains": {d: mine["accuracy"] for d, mine in found[LEVEL]["domains"].items()},
        "validation_accuracy": found["validation_accuracy"],
        "words": [found["words_total"], max(mine["words"] for mine in found["last"]["silos"].values())],
        "extensions": [len(step["uncertain"]) for step in found["extensions"]],
        "up": mean_over(trained, "up"),  # bytes of one silo's message in one round, weights and what goes with them
        "down": mean_over(trained, "down"),
        "seconds": found["seconds"],
        "workers": workers,
        **about,
    }
    fitted = [mean_over([m["train"] for m in r["silos"].values() if "train" in m], "accuracy") for r in rounds]
    if fitted[-1] == fitted[-1]:  # the training data were watched
        zero = next((i for i, accuracy in enumerate(fitted) if accuracy > 0.999), None)
        line |= {"train_accuracy": fitted[-1], "zero_error": _at(rounds[zero]) if zero is not None else None}
    return line


def _at(record: Mapping[str, Any]) -> Line:
    """When training error was first zero, and what the accuracy on test images was then."""
    return {
        "round": record["round"],
        "mA": mean_over([m for m in record["silos"].values() if "accuracy" in m], "accuracy"),
    }
