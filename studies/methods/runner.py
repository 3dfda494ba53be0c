"""Run a study: several processes in parallel, and one record for each run that ends.

A process runs all seeds of one row, on CUDA in one stack. Every run has its own folder and resumes after a kill. A run
that has a record already is not run again.
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

from studies.methods.setups import FEDAVG, SETUPS, shrink_experiment
from uefl.core.errors import ResumableError
from uefl.core.metrics import TABLE_METRICS, mean_metric
from uefl.experiment import records
from uefl.experiment.experiment import RESULTS_VERSION, Experiment
from uefl.experiment.grouped_runs import group_runs, run_group
from uefl.experiment.parallel_runs import choose_workers
from uefl.experiment.records import AGGREGATIONS, DEFAULT_AGGREGATION
from uefl.experiment.run import Event
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.settings import iterate_settings

RunRecord = dict[str, Any]
# Settings that were added after the first records, with the value at which a record without them is still the same run.
ADDED_SETTINGS: Mapping[str, Any] = {
    "method.batch_norm": "personal",  # FedBN, before it was a value of this setting
    "method.codebook.codeword_gradient": "code",
    "method.codebook.gate": "none",
    "method.codebook.gate_value": 0.75,
    "method.codebook.min_examples": 10,  # changes results, as the notes of the page state
    "method.codebook.uncertainty_test": "permutation",  # a report, which decides nothing
    "method.codebook.uncertainty_level": 0.05,
    "method.fine_tuning_epochs": 0,
    "method.group_rounds": 0,
    "method.start": 0,  # of IFCA
    "method.evaluate_every": 1000,  # the studies use the last round, which is evaluated in either case
}
SILO_METRICS = ("domain", "accuracy", "entropy", "nll", "nll_scaled", "temperature", "brier", "ece", "augrc")
EARLIER_EXTEND_VALUES = {"uncertain": True, "none": False}  # of method.codebook.extend


class StudyResources(NamedTuple):
    """Device, engine, folder and limits of the runs of a study."""

    device: str
    engine: str
    out: Path  # folder of run folders
    stop_time: float  # time.time() at which runs stop; the same command resumes them
    workers: int  # 0: as many as the device allows


class StudyRun(NamedTuple):
    """One run of a study."""

    setup: str
    method: str  # row of the setup's table
    seed: int
    experiment: Experiment
    relative_cost: float = 1.0
    with_silos: bool = False  # the record has the metrics of every silo too

    @property
    def label(self) -> str:
        """Name the run in messages."""
        fold = f", fold {self.experiment.data.fold}" if self.experiment.data.fold else ""
        return f"{self.setup}, {self.method}, lr {self.experiment.method.local.lr:g}, seed {self.seed}{fold}"

    def is_recorded(self, run_records: Iterable[RunRecord]) -> bool:
        """Whether one of the records is this run's."""
        return bool(self.find_records(run_records))

    def find_records(self, run_records: Iterable[RunRecord]) -> list[RunRecord]:
        """Return the records of this run."""
        identity = {
            **identify_run(self.experiment),
            "results_version": RESULTS_VERSION,
            "setup": self.setup,
            "method": self.method,
        }
        return [
            record
            for record in run_records
            if all(drop_added_settings(value, record.get(name)) == record.get(name) for name, value in identity.items())
        ]


def drop_added_settings(value: Any, recorded: Any) -> Any:
    """Return the settings of a run as they were called when these settings were recorded, without later ones."""
    if not isinstance(value, dict) or not isinstance(recorded, dict):
        return value
    extend = "method.codebook.extend"
    if isinstance(recorded.get(extend), bool) and extend in value:
        value = {**value, extend: EARLIER_EXTEND_VALUES.get(value[extend])}
    return {n: v for n, v in value.items() if n in recorded or ADDED_SETTINGS.get(n, ...) != v}


def identify_run(experiment: Experiment) -> RunRecord:
    """Identify a run by its algorithm, its seed and the settings that differ from the defaults."""
    defaults = dict(iterate_settings(Experiment()))
    changed = {
        ".".join(path): value for path, value in iterate_settings(experiment) if defaults.get(path, ...) != value
    }
    seed = changed.pop("seed", 0)
    identity: RunRecord = json.loads(
        json.dumps({"algorithm": experiment.method_name, "seed": seed, "settings": changed})
    )
    return identity


# --- which runs ---------------------------------------------------------------------------------------------------


def list_lr_search(setup_names: Sequence[str]) -> list[StudyRun]:
    """List the runs of FedAvg that select the learning rate."""
    return [
        StudyRun(name, FEDAVG, 0, SETUPS[name].make_experiment(FEDAVG, lr, 0))
        for name in setup_names
        for lr in SETUPS[name].learning_rates
    ]


def select_lr(name: str, run_records: Sequence[RunRecord]) -> float | None:
    """Return the learning rate with the best validation accuracy of FedAvg, seed 0; None until all of them have run."""
    scores = {}
    for run_ in list_lr_search([name]):
        matches = run_.find_records(run_records)
        if not matches:
            return None
        scores[run_.experiment.method.local.lr] = matches[-1]["validation_accuracy"]
    return max(scores, key=lambda lr: scores[lr])


def list_runs(name: str, lr: float, methods: Sequence[str], seeds: Sequence[int]) -> list[StudyRun]:
    """List the runs of a setup; no methods means all."""
    setup = SETUPS[name]
    return [
        StudyRun(name, method, seed, setup.make_experiment(method, lr, seed), row.relative_cost)
        for seed in seeds
        for method, row in setup.methods.items()
        if not methods or method in methods
    ]


def run_study(
    setup_names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    resources: StudyResources,
    path: Path,
    report: Callable[[str], None],
) -> int:
    """Search the missing learning rates, then run everything; return the number of runs that failed or are left."""
    num_left = run_parallel(list_lr_search(setup_names), resources, path, report)
    run_records = records.read_records(path)
    learning_rates = {name: select_lr(name, run_records) for name in setup_names}
    report("learning rates: " + ", ".join(f"{name} {lr:g}" for name, lr in learning_rates.items() if lr))
    runs = [run_ for name, lr in learning_rates.items() if lr for run_ in list_runs(name, lr, methods, seeds)]
    runs.sort(key=lambda run_: -run_.relative_cost)  # long runs first, so that no process waits for one at the end
    return num_left + run_parallel(runs, resources, path, report)


def run_tiny_study(
    setup_names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    resources: StudyResources,
    path: Path,
    report: Callable[[str], None],
) -> int:
    """Run everything at a minimal size, with the middle learning rate."""
    runs = [run_ for name in setup_names for run_ in list_runs(name, SETUPS[name].learning_rates[1], methods, seeds)]
    return run_parallel(
        [run_._replace(experiment=shrink_experiment(run_.experiment)) for run_ in runs], resources, path, report
    )


# --- running ------------------------------------------------------------------------------------------------------


def run_parallel(runs: Sequence[StudyRun], resources: StudyResources, path: Path, report: Callable[[str], None]) -> int:
    """Run what has no record yet, `workers` at a time; return the number of runs that failed or were stopped."""
    run_records = records.read_records(path)
    missing = [run_ for run_ in runs if not run_.is_recorded(run_records)]
    report(f"{len(runs)} runs, {len(runs) - len(missing)} of them done")
    # Setups may share a run, such as that of FedAvg, and two processes must not write one folder.
    todo = list({str(run_.experiment): run_ for run_ in reversed(missing)}.values())[::-1]
    repeated = [run_ for run_ in missing if run_ not in todo]
    num_left = _run_each(todo, resources, path, report)
    return num_left + (_run_each(repeated, resources, path, report) if repeated else 0)


def _run_each(todo: Sequence[StudyRun], resources: StudyResources, path: Path, report: Callable[[str], None]) -> int:
    """Run experiments that all differ; return the number of runs that failed or were stopped."""
    if not todo or time.time() > resources.stop_time:
        return len(todo)
    for data in {run_.experiment.data.name: run_.experiment.data for run_ in reversed(todo)}.values():
        data.load(0)  # decode once, not in every process
    start, num_left, num_done = time.time(), 0, 0
    numbered = group_runs({str(i): run_.experiment for i, run_ in enumerate(todo)})
    groups = [[todo[int(i)] for i in group] for group in numbered]
    # Processes are reused: importing torch and initializing a GPU takes as long as some runs.
    resources = resources._replace(workers=choose_workers(resources.workers, len(groups), resources.device))
    with ProcessPoolExecutor(min(resources.workers, len(groups)), get_context("spawn"), _limit_threads) as pool:
        futures = {pool.submit(_execute_runs, group, resources, os.getpid()): group for group in groups}
        for future in as_completed(futures):
            group = futures[future]
            num_done += len(group)
            try:
                new_records = future.result()
            except ResumableError:
                num_left += len(group)
                continue
            except Exception as e:  # one bad run must not stop the others
                num_left += len(group)
                report(f"{', '.join(run_.label for run_ in group)}: {type(e).__name__}: {e}")
                continue
            records.append_records(path, new_records)
            for run_, record in zip(group, new_records):
                score = f"validation NLL {record['validation_nll']:.4f}"  # no test figures while settings are chosen
                progress = f"[{num_done}/{len(todo)} after {time.time() - start:.0f} s]"
                report(f"{progress} {run_.label}: {score}, {record['seconds']:.0f} s")
    return num_left


def _limit_threads() -> None:
    torch.set_num_threads(1)


def _execute_runs(runs: Sequence[StudyRun], resources: StudyResources, parent_pid: int) -> list[RunRecord]:
    """Execute the seeds of one row in this worker process, to their end or to the time limit."""

    def check_limits(_label: str, event: Event) -> None:
        if os.getppid() != parent_pid:
            os._exit(1)  # the study has ended; the checkpoint is written
        if event["kind"] in ("load", "round") and time.time() > resources.stop_time:
            raise ResumableError("time limit reached; run the same command again to resume")

    experiments = {run_.label: run_.experiment for run_ in runs}
    assert len(experiments) == len(runs), "two runs with one label would share a record"
    folders = run_group(
        experiments, resources.out, device=resources.device, engine=resources.engine, on_event=check_limits
    )
    return [
        {**summarize_run(run_, folders[run_.label], resources.workers), "seeds_in_stack": len(runs)} for run_ in runs
    ]


def summarize_run(run_: StudyRun, folder: Path, workers: int) -> RunRecord:
    """Summarize a finished run in one record."""
    run_folder = RunFolder(folder)
    header, summary = run_folder.read_header(), run_folder.read_summary()
    rounds = records.read_records(run_folder.records_path)
    messages = [silo for r in rounds for silo in r["silos"].values() if "bytes_up" in silo]
    environment = {key: header[key] for key in ("engine", "device", "torch", "uefl", "results_version", "fingerprint")}
    record: RunRecord = {
        "setup": run_.setup,
        "method": run_.method,
        **identify_run(run_.experiment),
        **{level: {m.label: summary[level][m.label] for m in TABLE_METRICS} for level in AGGREGATIONS},
        "domains": {d: metrics["accuracy"] for d, metrics in summary[DEFAULT_AGGREGATION]["domains"].items()},
        "validation_accuracy": summary["validation_accuracy"],
        "validation_nll": mean_metric(
            [silo["validation"] for silo in rounds[-1]["silos"].values() if "validation" in silo], "nll"
        ),
        "num_codewords": [  # in total, and the most of one silo
            summary["total_codewords"],
            max(silo["num_codewords"] for silo in summary["last"]["silos"].values()),
        ],
        "extensions": [len(extension["uncertain_silos"]) for extension in summary["extensions"]],
        "bytes_up": mean_metric(messages, "bytes_up"),  # of one silo's message in one round: weights and extras
        "bytes_down": mean_metric(messages, "bytes_down"),
        "seconds": summary["seconds"],
        "workers": workers,
        "total_rounds": run_.experiment.method.total_rounds,
        **environment,
    }
    if run_.with_silos:
        record["silos"] = {name: _select_metrics(silo) for name, silo in summary["last"]["silos"].items()}
    train = [mean_metric([m["train"] for m in r["silos"].values() if "train" in m], "accuracy") for r in rounds]
    if train[-1] == train[-1]:  # not nan: the training data were evaluated
        zero = next((i for i, accuracy in enumerate(train) if accuracy > 0.999), None)
        record |= {
            "train_accuracy": train[-1],
            "zero_error": _describe_zero_error(rounds[zero]) if zero is not None else None,
        }
    return record


def _select_metrics(silo: Mapping[str, Any]) -> RunRecord:
    """Return the metrics of a silo that tables show, with seven digits, and without those that are not numbers."""
    shown = {n: v for n, v in silo.items() if n in SILO_METRICS or n.startswith("auroc")}
    return {n: float(f"{v:.7g}") if isinstance(v, float) else v for n, v in shown.items() if v == v}


def _describe_zero_error(record: Mapping[str, Any]) -> RunRecord:
    """Return the round in which training error was first zero, and the accuracy on test images then."""
    return {
        "round": record["round"],
        "mA": mean_metric([m for m in record["silos"].values() if "accuracy" in m], "accuracy"),
    }
