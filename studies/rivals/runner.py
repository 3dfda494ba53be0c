"""Choose schedule and trials by validation, freeze them, then run fresh seeds; the same command resumes every step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from studies.archive import read_records
from studies.methods.runner import RunRecord, StudyResources, StudyRun, run_parallel
from studies.rivals.setups import SETUPS
from studies.rivals.trials import FEDAVG, IFCA, RATES, SEARCH_SEEDS, UEFL, Schedule, Setup, Trial
from uefl.core.errors import InputError

SEARCH = "schedule search"  # row of the runs that choose the schedule
RECEIVER_ROW = f"{UEFL}, extend="  # beginning of the rows in which other silos get codewords
ABLATION_ROW = f"{UEFL}, without: "  # beginning of the rows whose codebook lacks something
START = ", start="  # ending of the rows with further starts of IFCA
START_ROW = f"{IFCA}{START}"
NLL, ERROR = "validation_nll", "validation_error"  # what trials are compared by
NUM_STARTS = 3  # of IFCA, of which validation chooses one per seed


class Files(NamedTuple):
    """The records of a study."""

    search: Path
    trials: Path
    frozen: Path
    results: Path
    times: Path


class Choice(NamedTuple):
    """What was frozen for one setup."""

    schedule: Schedule
    trials: dict[str, int]  # by row: the number of its trial


# --- trials -----------------------------------------------------------------------------------------------------------


def list_schedule_search(name: str) -> list[StudyRun]:
    """List the runs of FedAvg's first trial with every schedule."""
    setup = SETUPS[name]
    return [
        make_run(name, FEDAVG, 0, schedule, seed, row=f"{SEARCH}: {schedule}")
        for schedule in setup.schedules
        for seed in setup.trial_seeds
    ]


def make_run(
    name: str, method: str, trial: int, schedule: Schedule, seed: int, *, fold: int = 0, row: str = ""
) -> StudyRun:
    """Return one run of a setup."""
    experiment = SETUPS[name].make_experiment(method, SETUPS[name].rows[method].trials[trial], schedule, seed, fold)
    return StudyRun(name, row or method, seed, experiment, with_silos=True)


def select_schedule(name: str, run_records: Sequence[RunRecord]) -> Schedule:
    """Return the schedule that is best for FedAvg on validation examples; at the edge of the grid it is an error."""
    setup = SETUPS[name]
    scores = {
        schedule: mean_validation_loss(
            [run for run in list_schedule_search(name) if run.method == f"{SEARCH}: {schedule}"],
            run_records,
            get_score_name(setup),
        )
        for schedule in setup.schedules
    }
    best = min(scores, key=lambda schedule: scores[schedule])
    rates = [schedule.lr for schedule in setup.schedules if schedule.schedule == best.schedule]
    if len(rates) > 1 and best.lr in (min(rates), max(rates)):
        raise InputError(f"{name}: the best learning rate {best.lr:g} is at the edge of {rates}; extend the grid")
    return best


def list_trials(name: str, schedule: Schedule) -> list[StudyRun]:
    """List the runs of all trials of all rows; with folds, every fold of every seed."""
    setup = SETUPS[name]
    return [
        make_trial_run(name, method, trial, schedule, seed, fold)
        for method, row in setup.rows.items()
        if setup.folds or (len(row.trials) > 1 and not is_chosen_elsewhere(name, method))
        for trial in range(len(row.trials))
        for seed, fold in list_trial_parts(setup)
    ]


def make_trial_run(name: str, method: str, trial: int, schedule: Schedule, seed: int, fold: int = 0) -> StudyRun:
    """Return the run of a trial: of another setup, if an equal one was run there."""
    setup = SETUPS[name]
    choice = setup.rows[method].trials[trial]
    run = make_run(name, method, trial, schedule, seed, fold=fold, row=f"{method}: {choice.label}")
    for other in setup.also_tried_in:
        row = SETUPS[other].rows.get(method)
        if row and choice in row.trials:
            experiment = SETUPS[other].make_experiment(method, choice, schedule, seed, fold)
            if experiment == run.experiment:
                return run._replace(setup=other)
    return run


def is_chosen_elsewhere(name: str, method: str) -> bool:
    """Return whether another setup has chosen the trial of this row already."""
    setup = SETUPS[name]
    return bool(setup.rows_of) and SETUPS[setup.rows_of].rows.get(method) is setup.rows[method]


def list_trial_parts(setup: Setup) -> list[tuple[int, int]]:
    """Return seeds and folds of the trials: with folds, trials are chosen again inside each, so all are run."""
    if setup.folds:
        return [(seed, fold) for seed in setup.seeds for fold in range(1, setup.folds + 1)]
    return [(seed, 0) for seed in setup.trial_seeds]


def mean_validation_loss(runs: Sequence[StudyRun], run_records: Sequence[RunRecord], score_name: str) -> float:
    """Return the mean validation NLL, or the mean error rate, of runs, all of which must be recorded."""
    values: list[float] = []
    for run in runs:
        matches = run.find_records(run_records)
        if not matches:
            raise InputError(f"{run.label} has no record; run `python -m studies.rivals select --setup {run.setup}`")
        record = matches[-1]
        values.append(1 - record["validation_accuracy"] if score_name == ERROR else record[score_name])
    return mean(values)


def run_trials(name: str, resources: StudyResources, files: Files, report: Callable[[str], None]) -> int:
    """Search the schedule, then run all trials; return the number of runs that failed or are left."""
    setup, left = SETUPS[name], 0
    if setup.trials_of:
        report(f"{name}: the trials are those of {setup.trials_of}")
        return 0
    if len(setup.schedules) > 1:
        left = run_parallel(list_schedule_search(name), resources, files.trials, report)
        if left:
            return left
    schedule = setup.schedules[0] if len(setup.schedules) == 1 else select_schedule(name, read_records(files.trials))
    report(f"{name}: schedule {schedule}")
    return run_parallel(list_trials(name, schedule), resources, files.trials, report)


# --- the search for UEFL's own settings -------------------------------------------------------------------------------


def list_search(name: str, schedule: Schedule) -> list[StudyRun]:
    """List the runs of the search: only the last round is evaluated, since nothing else is read."""
    setup = SETUPS[name]
    searched = replace(setup, rows=setup.search, rounds={**setup.rounds, "evaluate_every": 1000})
    return [
        StudyRun(name, f"{method}: {trial.label}", seed, searched.make_experiment(method, trial, schedule, seed, fold))
        for method, row in setup.search.items()
        for trial in row.trials
        for seed in SEARCH_SEEDS
        for fold in (range(1, setup.folds + 1) if setup.folds else [0])
    ]


def run_search(name: str, resources: StudyResources, files: Files, report: Callable[[str], None]) -> int:
    """Run the search with the schedule that FedAvg's trials chose."""
    setup = SETUPS[name]
    schedule = setup.schedules[0] if len(setup.schedules) == 1 else select_schedule(name, read_records(files.trials))
    return run_parallel(list_search(name, schedule), resources, files.search, report)


# --- freezing -------------------------------------------------------------------------------------------------------


def freeze_choice(name: str, files: Files) -> Choice:
    """Store the trial of every row that validation chooses; a frozen choice never changes, but rows may be added."""
    frozen, setup = read_frozen(files.frozen), SETUPS[name]
    added = {m: row for m, row in setup.rows.items() if m not in frozen.get(name, {}).get("trials", {})}
    if added:
        run_records = read_records(files.trials)
        if name in frozen:
            schedule = Schedule(**frozen[name]["schedule"])
        else:
            schedule = setup.schedules[0] if len(setup.schedules) == 1 else select_schedule(name, run_records)
        scores = defaultdict[str, list[float]](list)
        for method, row in added.items():
            if is_chosen_elsewhere(name, method):
                scores[method] = frozen[setup.rows_of][get_score_name(setup)][method]
                continue
            if len(row.trials) == 1:
                scores[method] = [0.0]  # nothing to choose
                continue
            scores[method] = score_trials(name, method, schedule, run_records, get_score_name(setup))
        trials = {method: values.index(min(values)) for method, values in scores.items()}
        if setup.chosen_by == "accuracy_within_nll":
            losses = {method: score_trials(name, method, schedule, run_records, NLL) for method in scores}
            limit = min(score_trials(name, FEDAVG, schedule, run_records, NLL))
            trials = {m: min(range(len(s)), key=lambda i: (losses[m][i] > limit, s[i])) for m, s in scores.items()}
        earlier = frozen.get(name, {"trials": {}, get_score_name(setup): {}})
        frozen[name] = {
            "schedule": {"schedule": schedule.schedule, "lr": schedule.lr},
            "trials": {**earlier["trials"], **trials},
            get_score_name(setup): {**earlier[get_score_name(setup)], **scores},
        }
        files.frozen.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n")
    entry = frozen[name]
    return Choice(Schedule(**entry["schedule"]), entry["trials"])


def score_trials(
    name: str, method: str, schedule: Schedule, run_records: Sequence[RunRecord], score_name: str
) -> list[float]:
    """Return the mean loss of every trial of a row."""
    setup = SETUPS[name]
    return [
        mean_validation_loss(
            [make_trial_run(name, method, trial, schedule, seed) for seed, _ in list_trial_parts(setup)],
            run_records,
            score_name,
        )
        for trial in range(len(setup.rows[method].trials))
    ]


def get_score_name(setup: Setup) -> str:
    """Return the name of what trials are compared by, lower values being better."""
    return NLL if setup.chosen_by == "nll" else ERROR


def read_frozen(path: Path) -> dict[str, Any]:
    """Return the frozen choices by setup."""
    return json.loads(path.read_text()) if path.exists() else {}


# --- fresh seeds ------------------------------------------------------------------------------------------------------


def list_final_runs(name: str, choice: Choice) -> list[StudyRun]:
    """List the runs of the frozen settings with fresh seeds."""
    return [
        make_run(name, method, trial, choice.schedule, seed)
        for method, trial in choice.trials.items()
        for seed in SETUPS[name].seeds
    ]


def list_rate_runs(name: str, choice: Choice) -> list[StudyRun]:
    """List the runs of all other rows with UEFL's learning rates, which start again before its group rounds."""
    setup = SETUPS[name]
    return [
        StudyRun(name, f"{method}{RATES}", seed, experiment, with_silos=True)
        for method in choice.trials
        if setup.restart_rounds and method != UEFL and method in (setup.restarted_rows or choice.trials)
        for trial in [choose_trial(name, f"{method}{RATES}", choice)]
        for seed in setup.seeds
        for experiment in [setup.make_experiment(method, trial, choice.schedule, seed)]
    ]


def choose_trial(name: str, row: str, choice: Choice) -> Trial:
    """Return the frozen trial of a row, which may have UEFL's learning rates."""
    setup, method = SETUPS[name], row.removesuffix(RATES)
    trial = setup.rows[method].trials[choice.trials[method]]
    if method == row:
        return trial
    return replace(trial, local={**trial.local, "restart_rounds": setup.restart_rounds})


def list_ifca_rows(name: str, choice: Choice) -> list[str]:
    """List the rows of IFCA, which depend on their initial models."""
    if IFCA not in choice.trials:
        return []
    return [IFCA, *([f"{IFCA}{RATES}"] if SETUPS[name].restart_rounds else [])]


def list_start_runs(name: str, choice: Choice) -> list[StudyRun]:
    """List IFCA's runs of the frozen settings and fresh seeds with other initial models."""
    setup = SETUPS[name]
    return [
        StudyRun(name, f"{row}{START}{start}", seed, experiment, with_silos=True)
        for row in list_ifca_rows(name, choice)
        for trial in [choose_trial(name, row, choice)]
        for start in range(1, NUM_STARTS)
        for restarted in [replace(trial, method={**trial.method, "start": start})]
        for seed in setup.seeds
        for experiment in [setup.make_experiment(IFCA, restarted, choice.schedule, seed)]
    ]


def list_receiver_runs(name: str, choice: Choice) -> list[StudyRun]:
    """List UEFL's runs in which other silos get codewords, so that the choice by uncertainty can be compared."""
    own = SETUPS[name].rows[UEFL].trials[choice.trials[UEFL]].method["codebook"].extend
    others = [extend for extend in SETUPS[name].receivers if extend != own]
    return [run for e in others for run in list_codebook_runs(name, choice, f"{RECEIVER_ROW}{e}", {"extend": e})]


def list_ablation_runs(name: str, choice: Choice) -> list[StudyRun]:
    """List UEFL's runs whose codebook lacks something, so that it can be seen what the gain comes from."""
    ablations = SETUPS[name].ablations.items()
    return [run for label, c in ablations for run in list_codebook_runs(name, choice, f"{ABLATION_ROW}{label}", c)]


def list_codebook_runs(name: str, choice: Choice, row: str, changes: Mapping[str, Any]) -> list[StudyRun]:
    """List UEFL's runs of a table with these settings of its codebook changed."""
    setup = SETUPS[name]
    trial = setup.rows[UEFL].trials[choice.trials[UEFL]]
    changed = replace(trial, method={**trial.method, "codebook": replace(trial.method["codebook"], **changes)})
    return [
        StudyRun(name, row, seed, experiment, with_silos=True)
        for seed, fold in list_table_parts(setup)
        for experiment in [setup.make_experiment(UEFL, changed, choice.schedule, seed, fold)]
    ]


def list_table_parts(setup: Setup) -> list[tuple[int, int]]:
    """Return seeds and folds of a table."""
    return list_trial_parts(setup) if setup.folds else [(seed, 0) for seed in setup.seeds]


def get_choice(name: str, files: Files) -> Choice | None:
    """Return what is frozen for a setup; with folds, the trial of UEFL whose receivers are exchanged."""
    setup = SETUPS[name]
    if setup.folds:
        return Choice(setup.schedules[0], {UEFL: setup.receiver_trial})
    entry = read_frozen(files.frozen).get(setup.trials_of or name)
    return Choice(Schedule(**entry["schedule"]), entry["trials"]) if entry else None


def run_final(name: str, resources: StudyResources, files: Files, report: Callable[[str], None]) -> int:
    """Freeze the settings, then run the fresh seeds; with folds, `select` ran the rows of the table already."""
    if SETUPS[name].folds:
        report(f"{name}: every fold chooses among its trials, so only variants of UEFL's codebook are left to compare")
        choice = Choice(SETUPS[name].schedules[0], {UEFL: SETUPS[name].receiver_trial})
        variants = [*list_receiver_runs(name, choice), *list_ablation_runs(name, choice)]
        return run_parallel(variants, resources, files.results, report)
    choice = freeze_choice(SETUPS[name].trials_of or name, files)
    runs = [*list_final_runs(name, choice), *list_start_runs(name, choice), *list_rate_runs(name, choice)]
    runs += [*list_receiver_runs(name, choice), *list_ablation_runs(name, choice)]
    return run_parallel(runs, resources, files.results, report)
