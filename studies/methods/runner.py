"""Run a study: several processes in parallel, and one record for each run that ends.

A process runs all seeds of one row, on CUDA in one stack. Every run has its own folder and resumes after a kill. A run
that has a record already is not run again.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from studies.archive import read_records
from studies.methods.setups import FEDAVG, SETUPS, shrink_experiment
from uefl.core.errors import ResumableError
from uefl.core.metrics import TABLE_METRICS, mean_metric
from uefl.experiment import records
from uefl.experiment.experiment import RESULTS_VERSION, Experiment, Precision
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
    "method.codebook.alike_rule": "spacing",
    "method.codebook.codeword_gradient": "code",
    "method.codebook.gate": "none",
    "method.codebook.gate_value": 0.75,
    "method.codebook.min_examples": 10,  # changes results, as the notes of the page state
    "method.codebook.uncertainty_test": "permutation",  # a report, which decides nothing
    "method.codebook.uncertainty_level": 0.05,
    "method.fine_tuning_epochs": 0,
    "method.group_rounds": 0,
    "method.start": 0,  # of IFCA
    "method.evaluate_local": False,  # the studies use the averaged model
    "method.evaluate_every": 1000,  # the studies use the last rounds, which are evaluated in either case
    "method.evaluate_last": 5,
}
QUALITY_METRICS = {"NLL": "nll", "Brier": "brier", "AUGRC": "augrc"}  # by label; the first records lack them
POOLED_METRICS = {"ECE": "ece"}  # by label: of the test images of all silos together, since some silos have too few
SILO_METRICS = ("domain", "accuracy", "entropy", "nll", "nll_scaled", "temperature", "brier", "ece", "augrc")
LR_SEARCH_COST = 100.0  # added to their relative cost, so that they start before all other runs
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
    if not changed.get("method.group_rounds"):  # no study shares codewords of alike silos, the other use of the rule
        changed.pop("method.codebook.alike_rule", None)
    identity: RunRecord = json.loads(
        json.dumps({"algorithm": experiment.method_name, "seed": seed, "settings": changed})
    )
    return identity


# --- which runs ---------------------------------------------------------------------------------------------------


def list_lr_search(setup_names: Sequence[str], precision: Precision = "auto") -> list[StudyRun]:
    """List the runs of FedAvg that select the learning rate, with the costs of the longest run that waits for them."""
    return [
        StudyRun(
            name,
            FEDAVG,
            0,
            SETUPS[name].make_experiment(FEDAVG, lr, 0, precision),
            LR_SEARCH_COST + max(row.relative_cost for row in SETUPS[name].methods.values()),
        )
        for name in setup_names
        for lr in SETUPS[name].learning_rates
    ]


def select_lr(name: str, run_records: Sequence[RunRecord], precision: Precision = "auto") -> float | None:
    """Return the learning rate with the best validation accuracy of FedAvg, seed 0; None until all of them have run."""
    scores = {}
    for run_ in list_lr_search([name], precision):
        matches = run_.find_records(run_records)
        if not matches:
            return None
        scores[run_.experiment.method.local.lr] = matches[-1]["validation_accuracy"]
    return max(scores, key=lambda lr: scores[lr])


def list_runs(
    name: str, lr: float, methods: Sequence[str], seeds: Sequence[int], precision: Precision = "auto"
) -> list[StudyRun]:
    """List the runs of a setup; no methods means all."""
    setup = SETUPS[name]
    return [
        StudyRun(name, method, seed, setup.make_experiment(method, lr, seed, precision), row.relative_cost)
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
    precision: Precision = "auto",
) -> int:
    """Search the missing learning rates and run every setup that has one; return the number of runs failed or left."""
    waiting = list(setup_names)

    def list_setups_with_lr() -> list[StudyRun]:
        run_records = records.read_records(path)
        chosen = {name: lr for name in waiting if (lr := select_lr(name, run_records, precision))}
        waiting[:] = [name for name in waiting if name not in chosen]
        for name, lr in chosen.items():
            report(f"learning rate of {name}: {lr:g}")
        return [run_ for name, lr in chosen.items() for run_ in list_runs(name, lr, methods, seeds, precision)]

    return run_parallel(list_lr_search(setup_names, precision), resources, path, report, find_next=list_setups_with_lr)


def run_tiny_study(
    setup_names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    resources: StudyResources,
    path: Path,
    report: Callable[[str], None],
    precision: Precision = "auto",
) -> int:
    """Run everything at a minimal size, with the middle learning rate."""
    runs = [
        run_
        for name in setup_names
        for run_ in list_runs(name, SETUPS[name].learning_rates[1], methods, seeds, precision)
    ]
    return run_parallel(
        [run_._replace(experiment=shrink_experiment(run_.experiment)) for run_ in runs], resources, path, report
    )


# --- running ------------------------------------------------------------------------------------------------------


def run_parallel(
    runs: Sequence[StudyRun],
    resources: StudyResources,
    path: Path,
    report: Callable[[str], None],
    *,
    find_next: Callable[[], Sequence[StudyRun]] = tuple,
) -> int:
    """Run what has no record yet, `workers` at a time; return the number of runs that failed or were stopped.

    The longest runs start first, so that no process waits for one at the end. `find_next` returns the runs that the
    records so far make possible; it is asked at the beginning and after every run.
    """
    queue, num_left = _RunQueue(path, report), 0
    queue.add(runs)
    queue.add(find_next())
    num_groups = len(queue.groups) if find_next is tuple else os.cpu_count() or 1
    resources = resources._replace(workers=choose_workers(resources.workers, num_groups, resources.device))
    with ExitStack() as pools:
        pool, futures = _open_pool(pools, resources), dict[Future[list[RunRecord]], list[StudyRun]]()
        while queue.groups or futures:
            if time.time() > resources.stop_time:
                num_left += queue.drop_all()
            while queue.groups and len(futures) < resources.workers:
                group = queue.groups.pop(0)
                try:
                    future = pool.submit(_execute_runs, group, resources, os.getpid())
                except BrokenProcessPool:  # a process was killed, and the run that it had is reported
                    pool = _open_pool(pools, resources)
                    future = pool.submit(_execute_runs, group, resources, os.getpid())
                futures[future] = group
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                group = futures.pop(future)
                try:
                    queue.store(group, future.result())
                except ResumableError:
                    num_left += len(group)
                except Exception as e:  # one bad run must not stop the others
                    num_left += len(group)
                    report(f"{', '.join(run_.label for run_ in group)}: {type(e).__name__}: {e}")
                queue.release(group)
                queue.add(find_next())
    return num_left


def _open_pool(pools: ExitStack, resources: StudyResources) -> ProcessPoolExecutor:
    """Open processes that are reused: importing torch and initializing a GPU takes as long as some runs."""
    return pools.enter_context(ProcessPoolExecutor(resources.workers, get_context("spawn"), _limit_threads))


class _RunQueue:
    """Groups of runs without a record that have not started, the longest first."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path, self.report, self.start = path, report, time.time()
        self.groups: list[list[StudyRun]] = []
        # Setups may share a run, such as that of FedAvg, and two processes must not write one folder.
        self._started: set[str] = set()
        self._shared: list[StudyRun] = []
        self._num_runs = self._num_done = 0

    def add(self, runs: Sequence[StudyRun]) -> None:
        """Add the runs that have no record yet."""
        if not runs:
            return
        run_records = defaultdict[tuple[Any, ...], list[RunRecord]](list)  # a study may have ten thousands
        for record in read_records(self.path):
            run_records[record["setup"], record["method"], record["seed"]].append(record)
        missing = [run_ for run_ in runs if not run_.is_recorded(run_records[run_.setup, run_.method, run_.seed])]
        self.report(f"{len(runs)} runs, {len(runs) - len(missing)} of them done")
        for data in {run_.experiment.data.name: run_.experiment.data for run_ in reversed(missing)}.values():
            data.load(0)  # decode once, not in every process
        self._num_runs += len(missing)
        self._enqueue(missing)

    def _enqueue(self, runs: Sequence[StudyRun]) -> None:
        todo: list[StudyRun] = []
        for run_ in runs:
            (self._shared if str(run_.experiment) in self._started else todo).append(run_)
            self._started.add(str(run_.experiment))
        numbered = group_runs({str(i): run_.experiment for i, run_ in enumerate(todo)})
        self.groups += [[todo[int(i)] for i in group] for group in numbered]
        self.groups.sort(key=lambda group: -group[0].relative_cost)

    def store(self, group: Sequence[StudyRun], new_records: Sequence[RunRecord]) -> None:
        """Store the records of runs that have ended."""
        records.append_records(self.path, new_records)
        self._num_done += len(group)
        progress = f"[{self._num_done}/{self._num_runs} after {time.time() - self.start:.0f} s]"
        for run_, record in zip(group, new_records):
            score = f"validation NLL {record['validation_nll']:.4f}"  # no test figures while settings are chosen
            self.report(f"{progress} {run_.label}: {score}, {record['seconds']:.0f} s")
        for message in new_records[0].get("warnings", ()) if new_records else ():
            self.report(f"warning, {group[0].label}: {message}")

    def release(self, group: Sequence[StudyRun]) -> None:
        """Let runs of other setups start that share the folder of one of these; they find it finished."""
        self._started -= {str(run_.experiment) for run_ in group}
        shared, self._shared = self._shared, []
        self._enqueue(shared)

    def drop_all(self) -> int:
        """Drop what has not started and return the number of runs."""
        num_dropped = sum(map(len, self.groups)) + len(self._shared)
        self.groups, self._shared = [], []
        return num_dropped


def _limit_threads() -> None:
    torch.set_num_threads(1)


def _execute_runs(runs: Sequence[StudyRun], resources: StudyResources, parent_pid: int) -> list[RunRecord]:
    """Execute the seeds of one row in this worker process, to their end or to the time limit."""

    warnings: list[str] = []

    def check_limits(_label: str, event: Event) -> None:
        if event["kind"] == "warning" and event.get("about") != "data":
            warnings.append(event["message"])
        if os.getppid() != parent_pid:
            os._exit(1)  # the study has ended; the checkpoint is written
        if event["kind"] in ("load", "round") and time.time() > resources.stop_time:
            raise ResumableError("time limit reached; run the same command again to resume")

    experiments = {run_.label: run_.experiment for run_ in runs}
    assert len(experiments) == len(runs), "two runs with one label would share a record"
    folders = run_group(
        experiments, resources.out, device=resources.device, engine=resources.engine, on_event=check_limits
    )
    more = {"seeds_in_stack": len(runs), **({"warnings": warnings} if warnings else {})}
    return [{**summarize_run(run_, folders[run_.label], resources.workers), **more} for run_ in runs]


def summarize_run(run_: StudyRun, folder: Path, workers: int) -> RunRecord:
    """Summarize a finished run in one record."""
    run_folder = RunFolder(folder)
    header, summary = run_folder.read_header(), run_folder.read_summary()
    rounds = records.read_records(run_folder.records_path)
    messages = [silo for r in rounds for silo in r["silos"].values() if "bytes_up" in silo]
    names = ("engine", "device", "processor", "torch", "uefl", "results_version", "fingerprint")
    environment = {name: header[name] for name in names if name in header}  # earlier folders lack the processor
    record: RunRecord = {
        "setup": run_.setup,
        "method": run_.method,
        **identify_run(run_.experiment),
        **{level: _summarize_level(summary[level]) for level in AGGREGATIONS},
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
        record["all_silos"] = _round_metrics(summary["last"]["all_silos"])
    train = [mean_metric([m["train"] for m in r["silos"].values() if "train" in m], "accuracy") for r in rounds]
    if train[-1] == train[-1]:  # not nan: the training data were evaluated
        zero = next((i for i, accuracy in enumerate(train) if accuracy > 0.999), None)
        record |= {
            "train_accuracy": train[-1],
            "zero_error": _describe_zero_error(rounds[zero]) if zero is not None else None,
        }
    return record


def _summarize_level(level: Mapping[str, Any]) -> RunRecord:
    """Return the metrics of a run's table, and the quality metrics: means over silos, or of all test images."""
    silos = list(level["silos"].values())
    quality = {label: mean_metric(silos, name) for label, name in QUALITY_METRICS.items()}
    pooled = level["all_silos"]  # without metrics that need more examples
    quality |= {label: pooled[name] for label, name in POOLED_METRICS.items() if name in pooled}
    return {**{metric.label: level[metric.label] for metric in TABLE_METRICS}, **quality}


def _select_metrics(silo: Mapping[str, Any]) -> RunRecord:
    """Return the metrics of a silo that tables show."""
    return _round_metrics({n: v for n, v in silo.items() if n in SILO_METRICS or n.startswith("auroc")})


def _round_metrics(metrics: Mapping[str, Any]) -> RunRecord:
    """Return metrics with seven digits, and without those that are not numbers."""
    return {n: float(f"{v:.7g}") if isinstance(v, float) else v for n, v in metrics.items() if v == v}


def _describe_zero_error(record: Mapping[str, Any]) -> RunRecord:
    """Return the round in which training error was first zero, and the accuracy on test images then."""
    return {
        "round": record["round"],
        "mA": mean_metric([m for m in record["silos"].values() if "accuracy" in m], "accuracy"),
    }
