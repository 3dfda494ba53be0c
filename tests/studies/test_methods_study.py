"""The study of all methods: its setups, its records and the page made from them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from studies.methods.__main__ import HALF_PRECISION, PAGE, RECORDS, TIMES
from studies.methods.page import (
    CODEBOOK_PAIRS,
    EXCHANGES,
    choose_versions,
    find_runs,
    render_codebook_table,
    render_page,
    render_precision_table,
    render_table,
)
from studies.methods.runner import (
    QUALITY_METRICS,
    StudyResources,
    StudyRun,
    identify_run,
    list_lr_search,
    list_runs,
    run_parallel,
    select_lr,
)
from studies.methods.setups import FEDAVG, SEEDS, SETUPS
from studies.methods.timing import TimedMethod, select_silos
from uefl.algorithms import METHODS
from uefl.experiment.experiment import RESULTS_VERSION, Experiment, ModelConfig
from uefl.experiment.recipes import make_experiment
from uefl.experiment.records import read_records

ROOT = Path(__file__).parents[2]
MADE_FOR = {
    "leave-out-0": ("FedSR", "FedIIR"),
    "leave-out-75": ("FedSR", "FedIIR"),
    "hundred-clients": ("FedCR",),
    "label-skew": ("VHL", "FedBR, means of images", "FedBR, mixture"),
    "rotated": ("FedBN", "DisTrans", "DisTrans, mean offset", "UEFL", "Deep ensemble of 5", "Neural collapse"),
    "rotated-sgd": ("SCAFFOLD",),
}


def make_record(run: StudyRun, accuracy: float, validation: float = 0.5) -> dict:
    """Make the record that a run would leave."""
    level = {"mA": accuracy, "mE": 0.1, "mP": 0.0}
    return {
        "setup": run.setup,
        "method": run.method,
        **identify_run(run.experiment),
        **dict.fromkeys(("last", "mean of last 5", "best by validation"), level),
        "validation_accuracy": validation,
        "bytes_up": 2e6,
        "bytes_down": 3e6,
        "results_version": RESULTS_VERSION,
    }


def make_lr_search_records(name: str, best: int) -> list[dict]:
    return [make_record(run, 0.8, 0.9 if i == best else 0.6) for i, run in enumerate(list_lr_search([name]))]


@pytest.mark.records
def test_the_committed_page_is_what_the_committed_records_make():
    files = (ROOT / RECORDS, ROOT / TIMES, ROOT / HALF_PRECISION)
    assert (ROOT / PAGE).read_text() == render_page(*map(read_records, files))


def test_every_method_of_the_registry_is_in_the_study():
    assert {row.method for setup in SETUPS.values() for row in setup.methods.values()} == set(METHODS)


def test_the_page_describes_the_exchange_of_every_method_of_the_registry():
    assert set(EXCHANGES) == set(METHODS)


def test_every_method_that_supports_a_codebook_is_compared_with_and_without_it():
    supporting = {name for name in METHODS if not METHODS[name].codebook_unsupported_reason}
    references = {"uefl", "vq-fedavg", "centralized"}  # two have one by definition, one has no silos
    rows = [SETUPS[name].methods[row] for name, pairs in CODEBOOK_PAIRS.items() for row in pairs]
    assert {row.method for row in rows} == supporting - references


@pytest.mark.records
@pytest.mark.parametrize(("name", "method"), [(name, method) for name, made in MADE_FOR.items() for method in made])
def test_no_method_is_two_points_below_fedavg_where_it_was_made_for(name, method):
    """Two points were chosen with the records at hand: docs/methods.md states them, and new records are held to them.

    A difference varies by up to 2.9 points over seeds there, so its mean over three has an error of up to 1.7.
    """
    run_records, level = read_records(ROOT / RECORDS), SETUPS[name].summary_level
    runs, fedavg = find_runs(name, method, run_records), find_runs(name, FEDAVG, run_records)
    assert set(runs) == set(fedavg) == set(SEEDS)
    assert mean(runs[seed][level]["mA"] - fedavg[seed][level]["mA"] for seed in SEEDS) > -0.02


@pytest.mark.records
@pytest.mark.parametrize("name", CODEBOOK_PAIRS)
def test_the_table_of_codebooks_has_the_figures_of_its_setups_table(name):
    run_records = read_records(ROOT / RECORDS)
    cells = {
        line.split(" | ")[0].strip("| "): line.split(" | ") for line in render_table(name, run_records, []).splitlines()
    }
    for line in render_codebook_table(run_records).splitlines():
        method, setup, without, *_ = line.strip("| ").split(" | ")
        if setup == f"`{name}`":
            assert without == cells[method.removesuffix(" (with: UEFL)")][1]


@pytest.mark.parametrize("name", SETUPS)
def test_within_a_setup_only_the_method_differs(name):
    rows = [row for row, variant in SETUPS[name].methods.items() if not variant.local]
    experiments = [run.experiment for run in list_runs(name, SETUPS[name].learning_rates[0], rows, [0])]
    methods = [experiment.method for experiment in experiments]
    assert len({experiment.data for experiment in experiments}) == 1
    assert len({method.local for method in methods}) == 1
    assert len({(m.total_rounds, m.clients_per_round, m.aggregation_weights) for m in methods}) == 1
    assert methods[0].total_rounds <= 150
    assert next(iter(SETUPS[name].methods)) == FEDAVG


def test_the_learning_rate_is_the_best_by_validation_and_none_before_all_have_run():
    run_records = make_lr_search_records("hundred-clients", best=2)
    assert select_lr("hundred-clients", run_records) == SETUPS["hundred-clients"].learning_rates[2]
    assert select_lr("hundred-clients", run_records[1:]) is None
    assert select_lr("label-skew", run_records) is None


def test_a_run_is_identified_by_its_settings_seed_and_results_version():
    run, other = list_runs("hundred-clients", 0.05, ["FedCR"], [0, 1])
    record = make_record(run, 0.5)
    assert run.is_recorded([record])
    assert not other.is_recorded([record])
    assert not run.is_recorded([{**record, "results_version": RESULTS_VERSION - 1}])
    changed = replace(run.experiment.method, beta=0.5)
    assert not run._replace(experiment=replace(run.experiment, method=changed)).is_recorded([record])


def test_a_row_with_fewer_than_three_seeds_is_marked_incomplete():
    run_records = make_lr_search_records("hundred-clients", best=0)
    runs = list_runs("hundred-clients", SETUPS["hundred-clients"].learning_rates[0], [], SEEDS)
    run_records += [
        make_record(run, 0.8 + 0.01 * run.seed + (0.1 if run.method == "FedCR" else 0)) for run in runs if run.seed
    ]
    fedavg, fedcr = render_table("hundred-clients", run_records, []).splitlines()[2:]
    assert "81.00 ± 1.00" in fedavg
    assert "incomplete: 2 of 3 seeds" in fedcr
    run_records.append(make_record(next(run for run in runs if run.method == "FedCR" and run.seed == 0), 0.9))
    assert "| 91.00 ± 1.00 | +10.00 ± 0.00 |" in render_table("hundred-clients", run_records, []).splitlines()[3]


def test_a_table_has_columns_of_quality_where_its_records_have_them():
    (run,) = (run for run in list_runs("hundred-clients", 0.05, [], [0]) if run.method == FEDAVG)
    search = make_lr_search_records("hundred-clients", best=1)
    plain = [make_record(run._replace(seed=s, experiment=replace(run.experiment, seed=s)), 0.8, 0.9) for s in SEEDS]
    assert "NLL" not in render_table("hundred-clients", [*search, *plain], [])
    quality = {"NLL": 0.5, "Brier": 0.3, "AUGRC": 0.1}
    known = [{**r, "last": {**r["last"], **quality}} for r in [*search, *plain]]
    head, _, fedavg = render_table("hundred-clients", known, []).splitlines()[:3]
    assert "| mE | NLL | Brier | AUGRC |" in head
    assert "| 0.500 ± 0.000 | 0.300 ± 0.000 | 0.1000 ± 0.0000 |" in fedavg


def test_a_page_of_complete_records_has_every_row_and_says_when_training_error_was_zero():
    run_records = [record for name in SETUPS for record in make_lr_search_records(name, best=1)]
    for name, setup in SETUPS.items():
        run_records += [make_record(run, 0.9, 0.9) for run in list_runs(name, setup.learning_rates[1], [], SEEDS)]
    zero = {"train_accuracy": 1.0, "zero_error": {"round": 7, "mA": 0.85}}
    run_records = [{**r, **zero} if r["method"].startswith("Neural collapse") else r for r in run_records]
    num_bytes = {"bytes_up": 1, "bytes_up_with_queries": 1, "bytes_down": 1, "bytes_down_with_queries": 1}
    timings = [
        {"setup": "hundred-clients", "method": row, "device": "cpu", "round": {"seconds": seconds, **num_bytes, **more}}
        for row, seconds, more in ((FEDAVG, 2.0, {}), ("FedCR", 3.0, {"bytes_up_with_queries": 500001}))
    ]
    page = render_page(run_records, timings)
    assert "incomplete" not in page
    assert "not selected yet" not in page
    assert "zero error in round 7, mA then 85.00 %" in page
    fedcr = next(row for row in page.splitlines() if row.startswith("| FedCR"))
    assert "body, class statistics (2.50 MB)" in fedcr
    assert "× 1.50 | 93.78 (T4) |" in fedcr
    assert sum(row.startswith("| ") for row in page.splitlines()) > 40


def test_the_table_of_precisions_compares_runs_of_equal_seeds_and_names_the_row_that_differs_most():
    name, half = "hundred-clients", {"mA": 0.85, "mE": 0.1}
    lr, other_lr = SETUPS[name].learning_rates[1:]
    search, rows = make_lr_search_records(name, best=1), list_runs(name, lr, [], SEEDS)
    full = [*search, *(make_record(run, 0.8 + 0.01 * run.seed, 0.9) for run in rows)]
    runs = [*list_lr_search([name], "bf16"), *list_runs(name, other_lr, [], SEEDS, "bf16")]
    in_half = [
        make_record(run, 0.8 + 0.01 * run.seed, 0.9 if run.experiment.method.local.lr == other_lr else 0.6)
        for run in runs
    ]
    in_half = [{**r, "last": half} if (r["method"], r["seed"]) == ("FedCR", 2) else r for r in in_half]
    table = render_precision_table(full, in_half).splitlines()
    assert len(table) == 3, "setups without records in half precision are left out"
    # One of three seeds differs by three points, and the mean of the two rows is half of that third.
    assert table[2] == f"| `{name}` | 2 of 2 | {other_lr:g} instead of {lr:g} | +0.50 | +1.00 (FedCR) | 1.00 |"
    assert "half precision" not in render_page(full, [])


@pytest.mark.records
def test_all_rows_have_a_quality_of_uncertainty():
    run_records = choose_versions(read_records(ROOT / RECORDS))
    for name in SETUPS:
        head, _, *rows = render_table(name, run_records, []).splitlines()
        assert "| NLL | Brier | AUGRC |" in head
        assert len(rows) == len(SETUPS[name].methods)
        assert not any("nan" in row or "incomplete" in row for row in rows)


def make_small_experiment() -> Experiment:
    experiment = make_experiment("fedavg", "mnist5k")
    method = replace(experiment.method, rounds=1, iterations=1, mc_samples=2)
    data = replace(experiment.data, train_per_silo=20, test_per_silo=10, num_silos=(1, 1, 1))
    return replace(experiment, method=method, data=data, model=ModelConfig(width=4, depth=1, hidden_size=8))


def test_runs_leave_one_record_each_are_not_run_twice_and_stop_at_the_time_limit(tmp_path):
    messages: list[str] = []
    runs = [StudyRun("rotated", FEDAVG, seed, replace(make_small_experiment(), seed=seed)) for seed in (0, 1)]
    resources = StudyResources("cpu", "serial", tmp_path / "runs", time.time() + 600, 2)
    path = tmp_path / "records.jsonl"
    assert run_parallel(runs, resources._replace(stop_time=0.0), path, messages.append) == 2
    assert read_records(path) == []
    assert run_parallel(runs, resources, path, messages.append) == 0
    assert sorted(record["seed"] for record in read_records(path)) == [0, 1]
    assert all(record["bytes_up"] > 0 and record["total_rounds"] == 1 for record in read_records(path))
    assert all(record["last"][label] > 0 for record in read_records(path) for label in QUALITY_METRICS)
    assert run_parallel(runs, resources, path, messages.append) == 0
    assert len(read_records(path)) == 2


def test_a_table_has_the_records_of_one_version_the_newest_that_is_as_complete():
    def make(setup, version, seeds):
        return [{"setup": setup, "method": "A", "seed": seed, "results_version": version} for seed in seeds]

    chosen = choose_versions([*make("x", 2, (0, 1)), *make("x", 4, (1, 2)), *make("y", 2, (0, 1)), *make("y", 4, (0,))])
    assert [(r["setup"], r["seed"], r["version_when_run"]) for r in chosen] == [
        *(("x", 1, 4), ("x", 2, 4)),
        *(("y", 0, 2), ("y", 1, 2)),
    ]
    assert choose_versions(chosen) == chosen


def test_two_setups_share_a_run_and_both_have_its_record(tmp_path):
    messages: list[str] = []
    runs = [StudyRun(setup, FEDAVG, 0, make_small_experiment()) for setup in ("rotated", "rotated-personal")]
    resources = StudyResources("cpu", "serial", tmp_path / "runs", time.time() + 600, 2)
    assert run_parallel(runs, resources, tmp_path / "records.jsonl", messages.append) == 0, messages
    one, other = read_records(tmp_path / "records.jsonl")
    assert [one.pop("setup"), other.pop("setup")] == ["rotated", "rotated-personal"]
    assert one == {**other, "workers": one["workers"]}
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_runs_start_when_records_make_them_possible_and_the_longest_first(tmp_path):
    experiment, path = make_small_experiment(), tmp_path / "records.jsonl"
    search = [StudyRun(setup, FEDAVG, 0, experiment) for setup in ("rotated", "rotated-personal")]
    wide, deep = (replace(experiment, model=replace(experiment.model, **size)) for size in ({"width": 8}, {"depth": 2}))
    later = [StudyRun("rotated", "short", 0, wide), StudyRun("rotated", "long", 0, deep, relative_cost=5.0)]
    asked: list[int] = []

    def find_next():
        asked.append(len(read_records(path)))
        return later if asked[-1] == len(search) else []

    resources = StudyResources("cpu", "serial", tmp_path / "runs", time.time() + 600, 1)
    assert run_parallel(search, resources, path, [].append, find_next=find_next) == 0
    names = [(record["setup"], record["method"]) for record in read_records(path)]
    assert names == [("rotated", FEDAVG), ("rotated-personal", FEDAVG), ("rotated", "long"), ("rotated", "short")]
    assert asked == [0, 1, 2, 3, 4]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    good = StudyRun("rotated", FEDAVG, 0, make_small_experiment())
    bad = good._replace(
        seed=1, experiment=replace(make_small_experiment(), model=ModelConfig(encoder="dirt", pretrained_weights="no"))
    )
    messages: list[str] = []
    resources = StudyResources("cpu", "serial", tmp_path / "runs", time.time() + 600, 1)
    assert run_parallel([bad, good], resources, tmp_path / "records.jsonl", messages.append) == 1
    assert len(read_records(tmp_path / "records.jsonl")) == 1
    assert any("seed 1" in text and "Error" in text for text in messages)


class Killer(str):
    """A name that ends the process which receives it, as the system does when memory ends."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_process_that_is_killed_does_not_stop_the_other_runs(tmp_path):
    good = StudyRun("rotated", FEDAVG, 0, make_small_experiment())
    wide = replace(good.experiment, model=replace(good.experiment.model, width=8))
    bad = good._replace(method=Killer("killed"), experiment=wide, relative_cost=9.0)
    messages: list[str] = []
    resources = StudyResources("cpu", "serial", tmp_path / "runs", time.time() + 600, 1)
    assert run_parallel([good, bad], resources, tmp_path / "records.jsonl", messages.append) == 1
    assert [record["method"] for record in read_records(tmp_path / "records.jsonl")] == [FEDAVG]
    assert any("killed" in text and "BrokenProcessPool" in text for text in messages)


def test_a_timed_round_has_seconds_and_bytes():
    experiment = make_small_experiment()
    silos, images = experiment.data.load(0)
    timed = TimedMethod(experiment, select_silos(silos, train_per_silo=30), len(images.classes), "cpu")
    timed()
    costs = timed.summarize_costs()
    assert costs["seconds"] > 0
    assert costs["bytes_up"] == costs["bytes_up_with_queries"] > 0
    assert costs["bytes_down"] == costs["bytes_down_with_queries"] > 0
