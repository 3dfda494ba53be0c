"""The study of all methods: its set-ups, its records and the page made from them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from studies.methods.__main__ import PAGE, RECORDS, TIMES
from studies.methods.page import found, page, table
from studies.methods.running import Job, Where, chosen_rate, jobs, search, settled, together
from studies.methods.set_ups import FEDAVG, SEEDS, SET_UPS
from uefl.algorithms import ALGORITHMS
from uefl.experiment import RESULTS, Architecture, Experiment
from uefl.recipes import recipe
from uefl.records import read

ROOT = Path(__file__).parents[2]
MADE_FOR = {
    "heldout-0": ("FedSR", "FedIIR"),
    "heldout-75": ("FedSR", "FedIIR"),
    "many": ("FedCR",),
    "skewed": ("VHL", "FedBR, means of images", "FedBR, mixture"),
    "rotated": ("FedBN", "DisTrans", "DisTrans, mean offset", "UEFL", "Deep ensemble of 5", "Neural collapse"),
    "rotated-sgd": ("SCAFFOLD",),
}


def line(job: Job, accuracy: float, validation: float = 0.5) -> dict:
    """What a run would leave."""
    level = {"mA": accuracy, "mE": 0.1, "mP": 0.0}
    return {
        "set-up": job.set_up,
        "method": job.method,
        **settled(job.experiment),
        **dict.fromkeys(("last", "mean of last 5", "best by validation"), level),
        "validation_accuracy": validation,
        "up": 2e6,
        "down": 3e6,
        "results": RESULTS,
    }


def searched(name: str, best: int) -> list[dict]:
    return [line(job, 0.8, 0.9 if i == best else 0.6) for i, job in enumerate(search([name]))]


def test_the_committed_page_is_what_the_committed_records_make():
    assert (ROOT / PAGE).read_text() == page(read(ROOT / RECORDS), read(ROOT / TIMES))


def test_every_method_is_in_the_study():
    kinds = {row.kind for set_up in SET_UPS.values() for row in set_up.methods.values()}
    assert kinds == set(ALGORITHMS.values())


@pytest.mark.parametrize(("name", "method"), [(name, method) for name, made in MADE_FOR.items() for method in made])
def test_no_method_is_two_points_below_fedavg_where_it_was_made_for(name, method):
    lines, level = read(ROOT / RECORDS), SET_UPS[name].level
    mine, base = found(name, method, lines), found(name, FEDAVG, lines)
    assert set(mine) == set(base) == set(SEEDS)
    assert mean(mine[seed][level]["mA"] - base[seed][level]["mA"] for seed in SEEDS) > -0.02


@pytest.mark.parametrize("name", SET_UPS)
def test_within_a_set_up_only_the_method_differs(name):
    rows = [row for row, variant in SET_UPS[name].methods.items() if not variant.local]
    made = [job.experiment for job in jobs(name, SET_UPS[name].rates[0], rows, [0])]
    assert len({e.data for e in made}) == 1
    assert len({e.method.local for e in made}) == 1
    assert len({(e.method.budget, e.method.participation, e.method.weights) for e in made}) == 1
    assert made[0].method.budget <= 150
    assert next(iter(SET_UPS[name].methods)) == FEDAVG


def test_the_rate_is_the_best_by_validation_and_none_before_all_have_run():
    lines = searched("many", best=2)
    assert chosen_rate("many", lines) == SET_UPS["many"].rates[2]
    assert chosen_rate("many", lines[1:]) is None
    assert chosen_rate("skewed", lines) is None


def test_a_run_is_known_by_its_settings_seed_and_results_version():
    one, other = jobs("many", 0.05, ["FedCR"], [0, 1])
    assert one.is_in([line(one, 0.5)])
    assert not other.is_in([line(one, 0.5)])
    assert not one.is_in([{**line(one, 0.5), "results": RESULTS - 1}])
    changed = replace(one.experiment.method, beta=0.5)
    assert not one._replace(experiment=replace(one.experiment, method=changed)).is_in([line(one, 0.5)])


def test_a_row_with_fewer_than_three_seeds_is_marked_incomplete():
    lines = searched("many", best=0)
    rate = SET_UPS["many"].rates[0]
    runs = jobs("many", rate, [], SEEDS)
    lines += [line(job, 0.8 + 0.01 * job.seed + (0.1 if job.method == "FedCR" else 0)) for job in runs if job.seed]
    fedavg, fedcr = table("many", lines, []).splitlines()[2:]
    assert "81.00 ± 1.00" in fedavg
    assert "incomplete: 2 of 3 seeds" in fedcr
    lines.append(line(next(job for job in runs if job.method == "FedCR" and job.seed == 0), 0.9))
    assert "| 91.00 ± 1.00 | +10.00 ± 0.00 |" in table("many", lines, []).splitlines()[3]


def test_a_page_of_complete_records_has_every_row_and_says_when_training_error_was_zero():
    lines = [one for name in SET_UPS for one in searched(name, best=1)]
    for name, set_up in SET_UPS.items():
        lines += [line(job, 0.9, 0.9) for job in jobs(name, set_up.rates[1], [], SEEDS)]
    zero = {"train_accuracy": 1.0, "zero_error": {"round": 7, "mA": 0.85}}
    lines = [{**one, **zero} if one["method"].startswith("Neural collapse") else one for one in lines]
    times = [
        {"set-up": "many", "method": row, "device": "cpu", "round": {"seconds": s, **asked}}
        for row, s, asked in (
            (FEDAVG, 2.0, {"up": 1, "up with questions": 1, "down": 1, "down with questions": 1}),
            ("FedCR", 3.0, {"up": 1, "up with questions": 500001, "down": 1, "down with questions": 1}),
        )
    ]
    made = page(lines, times)
    assert "incomplete" not in made
    assert "not chosen" not in made
    assert "zero error in round 7, mA then 85.00 %" in made
    fedcr = next(row for row in made.splitlines() if row.startswith("| FedCR"))
    assert "body, class statistics (2.50 MB)" in fedcr
    assert "× 1.50 | 93.78 (T4) |" in fedcr
    assert sum(row.startswith("| ") for row in made.splitlines()) > 40


def small() -> Experiment:
    experiment = recipe("fedavg", "mnist5k")
    method = replace(experiment.method, rounds=1, iterations=1, passes=2)
    data = replace(experiment.data, train=20, test=10, silos=(1, 1, 1))
    return replace(experiment, method=method, data=data, model=Architecture(width=4, depth=1, hidden=8))


def test_runs_leave_a_line_each_are_not_run_twice_and_stop_at_the_time_limit(tmp_path):
    heard: list[str] = []
    every = [Job("many", FEDAVG, seed, replace(small(), seed=seed)) for seed in (0, 1)]
    where = Where("cpu", "serial", tmp_path / "runs", time.time() + 600, 2)
    path = tmp_path / "records.jsonl"
    assert together(every, where._replace(until=0.0), path, heard.append) == 2
    assert read(path) == []
    assert together(every, where, path, heard.append) == 0
    assert sorted(one["seed"] for one in read(path)) == [0, 1]
    assert all(one["up"] > 0 and one["budget"] == 1 for one in read(path))
    assert together(every, where, path, heard.append) == 0
    assert len(read(path)) == 2


def test_a_run_that_fails_costs_only_itself(tmp_path):
    good = Job("many", FEDAVG, 0, small())
    bad = Job("many", FEDAVG, 1, replace(small(), model=Architecture(encoder="dirt", width=-1)))
    heard: list[str] = []
    where = Where("cpu", "serial", tmp_path / "runs", time.time() + 600, 1)
    assert together([bad, good], where, tmp_path / "records.jsonl", heard.append) == 1
    assert len(read(tmp_path / "records.jsonl")) == 1
    assert any("seed 1" in text and "Error" in text for text in heard)
