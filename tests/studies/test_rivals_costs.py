"""What the rows of the study cost, and which silos get codewords: counted on small real federations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from studies.methods.timing import select_silos
from studies.rivals.further_tables import find_receiver_rows, render_aurocs, render_pooled, render_receivers
from studies.rivals.runner import RECEIVER_ROW, Choice, list_receiver_runs, list_table_parts, make_run
from studies.rivals.setups import SETUPS
from studies.rivals.tables import SMALL_SILO
from studies.rivals.timing import TimedRow, count_personal_values, find_frequent_labels
from studies.rivals.trials import FEDAVG, RECEIVERS, UEFL
from uefl.core.federation import is_codeword_tensor

HOSPITALS = SETUPS["hospitals"]
CHOICE = Choice(HOSPITALS.schedules[0], {UEFL: HOSPITALS.receiver_trial})


@pytest.fixture(scope="module")
def timed() -> dict[str, TimedRow]:
    silos, images = HOSPITALS.data.load(0)
    silos = select_silos(silos, 64)
    rows = {}
    for row in (FEDAVG, "Local-only", UEFL):
        trial = HOSPITALS.rows[row].trials[0]
        if row == UEFL:  # a fine-tuned network is all its own
            trial = replace(trial, method={**trial.method, "fine_tuning_epochs": 0})
        experiment = HOSPITALS.make_experiment(row, trial, HOSPITALS.schedules[0], 0)
        rows[row] = TimedRow(experiment, silos, len(images.classes), "cpu")
    for row in rows.values():
        row()
    return rows


def test_own_parameters_are_those_that_no_other_silo_has(timed: dict[str, TimedRow]) -> None:
    everything = sum(t.numel() for t in timed["Local-only"].clients.net.state_dict().values())
    assert timed[FEDAVG].count_own_parameters() == 0
    assert timed["Local-only"].count_own_parameters() == everything
    server = timed[UEFL].server
    own_codewords = server.access[:, server.access.sum(0) == 1].sum(1).float().mean()
    size = server.model_state["codebook.codewords"].shape[1]
    assert timed[UEFL].count_own_parameters() == round(float(own_codewords) * size) > 0


def test_a_model_of_a_group_is_not_a_silos_own(timed: dict[str, TimedRow]) -> None:
    method, net = timed[UEFL].method, timed[UEFL].clients.net
    weights = sum(t.numel() for n, t in net.state_dict().items() if not is_codeword_tensor(n))
    grouped = replace(method, group_rounds=2)
    assert count_personal_values(grouped, net) == count_personal_values(method, net) == 0
    assert count_personal_values(replace(grouped, fine_tuning_epochs=1), net) == weights > 0


def test_a_round_is_timed_with_codewords_of_every_silo(timed: dict[str, TimedRow]) -> None:
    assert (timed[UEFL].server.access.sum(1) > timed[UEFL].server.access.all(0).sum()).all()
    assert all(cost["seconds"] > 0 for cost in (row.summarize_costs() for row in timed.values()))


def test_the_timed_trial_is_the_one_that_most_folds_choose() -> None:
    def make_record(label: str, fold: int, nll: float) -> dict[str, Any]:
        return {
            "method": f"{FEDAVG}: {label}",
            "seed": 1,
            "settings": {"data.fold": f"{fold}/5"},
            "validation_nll": nll,
        }

    first, second = (t.label for t in HOSPITALS.rows[FEDAVG].trials[:2])
    records = [make_record(first, i, 0.1 * i) for i in (1, 2, 3)]
    records += [make_record(second, i, nll) for i, nll in ((1, 0.05), (2, 0.1), (3, 0.4))]
    assert find_frequent_labels(HOSPITALS, records) == {FEDAVG: second}


def test_runs_with_other_receivers_differ_in_extend_alone() -> None:
    runs = list_receiver_runs("hospitals", CHOICE)
    parts = list_table_parts(HOSPITALS)
    own = {
        part: make_run("hospitals", UEFL, HOSPITALS.receiver_trial, CHOICE.schedule, part[0], fold=part[1]).experiment
        for part in parts
    }
    assert len(runs) == len(parts) * (len(RECEIVERS) - 1)
    for run in runs:
        method = run.experiment.method
        assert method.codebook
        assert method.codebook.extend == run.method.removeprefix(RECEIVER_ROW) != "uncertain"
        same = replace(method, codebook=replace(method.codebook, extend="uncertain"))
        fold = int(run.experiment.data.fold.partition("/")[0])
        assert replace(run.experiment, method=same) == own[run.seed, fold]


def test_the_table_of_receivers_needs_all_runs_and_compares_with_uefls_choice() -> None:
    label = HOSPITALS.rows[UEFL].trials[HOSPITALS.receiver_trial].label
    trials, results = [], []
    for number, (seed, fold) in enumerate(list_table_parts(HOSPITALS)):
        trials.append(make_silo_record(f"{UEFL}: {label}", seed, fold, 0.30 + 0.001 * (number % 3)))
        for extend, nll in (("none", 0.40), ("random", 0.30), ("all", 0.20)):
            results.append(make_silo_record(f"{RECEIVER_ROW}{extend}", seed, fold, nll + 0.001 * (number % 2)))
    assert set(find_receiver_rows("hospitals", CHOICE, trials, results)) == {f"`{r}`" for r in RECEIVERS}
    lines = render_receivers("hospitals", CHOICE, trials, results).splitlines()
    verdicts = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert verdicts["none"].endswith("**ahead** |")
    assert verdicts["all"].endswith("**below** |")
    assert "ahead" not in verdicts["random"]
    assert render_receivers("hospitals", CHOICE, trials, results[1:]) == ""


def test_the_table_of_aurocs_has_wider_intervals_than_independent_folds_and_counts_folds_without_a_class() -> None:
    values = {UEFL: (0.80, 0.90), FEDAVG: (0.70, 0.80)}
    rows: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
        method: {(100 + i // 5, 1 + i % 5): {"silos": {"A": {"auroc": pair[i % 2]}, SMALL_SILO: {}}} for i in range(10)}
        for method, pair in values.items()
    }
    for part in ((100, 1), (100, 2), (101, 1)):
        for method in rows:
            rows[method][part]["silos"][SMALL_SILO] = {"auroc": 0.6}
    _, _, uefl, fedavg, gain, _, note = render_aurocs(HOSPITALS, rows).splitlines()
    deviation, quantile = 0.05 * (10 / 9) ** 0.5, 2.2621572  # of Student's t with 9 degrees of freedom
    half = quantile * deviation * (1 / 10 + 1 / 4) ** 0.5
    assert uefl == f"| {UEFL} | 0.850 [{0.85 - half:.3f}, {0.85 + half:.3f}] | 0.600 [0.600, 0.600] |"
    assert fedavg.startswith(f"| {FEDAVG} | 0.750 [")
    assert gain == "| UEFL − FedAvg | +0.100 [+0.100, +0.100] | +0.000 [+0.000, +0.000] |"
    assert "3 of 10 folds" in note
    assert note.endswith("reported, not judged.")


def make_silo_record(method: str, seed: int, fold: int, nll: float) -> dict[str, Any]:
    """Make a record with one silo."""
    silos = {"A": {"accuracy": 0.8, "nll": nll, "domain": "A"}}
    return {
        "setup": "hospitals",
        "method": method,
        "seed": seed,
        "settings": {"data.fold": f"{fold}/{HOSPITALS.folds}"},
        "silos": silos,
    }


def test_metrics_of_all_test_examples_are_shown_once_all_records_have_them() -> None:
    def make_record(shift: float) -> dict[str, Any]:
        return {"all_silos": {"ece": 0.01 + shift, "risk_at_50": 0.001, "risk_at_100": 0.05, "num_examples": 900.0}}

    rows = {method: {(seed, 0): make_record(0.02 * seed) for seed in (0, 1)} for method in ("FedAvg", "UEFL")}
    head, _, first, last = render_pooled(rows).splitlines()
    assert head == "| test examples of all silos together | ECE | error of the most certain 50 %, % | error of all, % |"
    assert first == "| FedAvg | 0.020 ± 0.014 | 0.10 ± 0.00 | 5.00 ± 0.00 |"
    assert last.startswith("| UEFL |")
    assert render_pooled({**rows, "FedBN": {(0, 0): {"silos": {}}}}) == ""
