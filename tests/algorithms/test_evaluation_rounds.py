"""Rounds and silos that are not evaluated: the model is the same, and summaries use what was evaluated."""

import json
from dataclasses import replace

import pytest
from harness import (
    TINY_SETTINGS,
    TINY_SETTINGS_NO_CODEBOOK,
    call_cli,
    call_with_mistake,
    drop_seconds,
    have_equal_bits,
    make_clients,
    make_method,
    make_striped_silos,
    run_rounds,
)

from uefl.algorithms import METHODS
from uefl.core.errors import InputError
from uefl.core.federation import Examples
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.records import is_evaluated, summarize_records

DOMAINS = {"ada": "upright", "bob": "upright", "cyd": "rotated", "dan": "rotated"}


def list_evaluated(records):
    return [record["round"] for record in records if is_evaluated(record)]


@pytest.mark.parametrize("name", METHODS)
def test_the_model_does_not_depend_on_its_evaluations(name):
    method = make_method(name, rounds=5, iterations=1)
    expected, _ = run_rounds(method, make_clients(method))
    rarely = replace(method, evaluate_every=3)
    server, records = run_rounds(rarely, make_clients(rarely))
    assert have_equal_bits(server.model_state, expected.model_state)
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
    warm_up = [method.codebook.warmup_rounds] if method.codebook else []  # its end is a decision
    assert list_evaluated(records) == [*warm_up, 3, 5]


def test_decisions_are_evaluated_in_any_round():
    method = make_method("uefl", rounds=4, extra_rounds=3, iterations=2, codebook=True, evaluate_every=100)
    server, records = run_rounds(method, make_clients(method))
    assert list_evaluated(records) == [1, 4, 7], "after the warm-up, at the decision and at the end"
    expected, _ = run_rounds(replace(method, evaluate_every=1), make_clients(method))
    assert have_equal_bits(server.model_state, expected.model_state)


def test_a_round_of_few_clients_queries_no_other_silo_unless_it_is_evaluated():
    queries = []

    class CountingEngine(StackedEngine):
        def query(self, method, task, broadcast, splits):
            queries.append((task, broadcast.round))
            return super().query(method, task, broadcast, splits)

    method = make_method("fedavg", rounds=6, iterations=1, clients_per_round=2, evaluate_every=4)
    _, records = run_rounds(method, make_clients(method, engine=CountingEngine))
    assert queries == [("evaluate", 4), ("evaluate", 6)]
    assert list_evaluated(records) == [4, 6]


def test_the_last_rounds_are_evaluated_in_any_case():
    method = make_method("uefl", rounds=5, extra_rounds=4, iterations=2, codebook=True, evaluate_every=100)
    for evaluate_last, expected in ((1, [1, 5, 9]), (3, [1, 5, 7, 8, 9]), (100, [*range(1, 10)])):
        changed = replace(method, evaluate_last=evaluate_last)
        _, records = run_rounds(changed, make_clients(changed))
        assert list_evaluated(records) == expected
    summary = summarize_records(records, DOMAINS)
    few = replace(method, evaluate_last=5)
    assert (
        summarize_records(run_rounds(few, make_clients(few))[1], DOMAINS)["mean of last 5"] == summary["mean of last 5"]
    )


def test_summaries_use_the_evaluated_rounds():
    method = make_method("fedavg", rounds=7, iterations=1, evaluate_every=3)
    _, records = run_rounds(method, make_clients(method))
    summary = summarize_records(records, DOMAINS)
    assert summary["last"]["round"] == [7]
    assert summary["mean of last 5"]["round"] == [3, 6, 7]
    assert summary["best by validation"]["round"][0] in (3, 6, 7)


def test_a_screen_without_terminal_says_which_rounds_are_not_evaluated(tmp_path):
    answer = call_cli("run", "uefl", *TINY_SETTINGS, "evaluate_every=100", "--out", str(tmp_path))
    assert answer.code == 0
    assert "round 4/5  not evaluated" in answer.stdout + answer.stderr
    assert "nan" not in answer.stdout + answer.stderr


def test_never_evaluating_is_an_input_error():
    with pytest.raises(InputError, match="evaluate_every=0 must be at least 1"):
        make_method("fedavg", evaluate_every=0)


# --- eval_clients: a sample of the silos measures ---------------------------------------------------------------------


def list_measured(record):
    return sorted(name for name, silo in record["silos"].items() if "accuracy" in silo)


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
def test_a_sample_of_the_silos_measures_and_the_model_stays_the_same(engine):
    method = make_method("fedavg", rounds=6, iterations=1, eval_clients=2)
    everywhere = replace(method, eval_clients=0)
    expected, full = run_rounds(everywhere, make_clients(everywhere, engine=engine))
    server, records = run_rounds(method, make_clients(method, engine=engine))
    assert have_equal_bits(server.model_state, expected.model_state)
    assert [len(list_measured(record)) for record in records] == [2] * 6, "also in the last round"
    assert len({tuple(list_measured(record)) for record in records}) > 1, "drawn anew in every round"
    assert [(record["num_evaluated"], record["num_silos"]) for record in records] == [(2, 4)] * 6
    for record, other in zip(records, full, strict=True):
        for name in list_measured(record):
            # Only a training message brings the metrics of a silo's own model before averaging.
            entries = {n: v for n, v in drop_seconds(other["silos"][name]).items() if not n.startswith("local_")}
            assert drop_seconds(record["silos"][name]) == entries


def test_a_sample_depends_on_seed_and_round_alone():
    method = make_method("fedavg", rounds=6, iterations=1, eval_clients=1)

    def list_samples(**settings):
        changed = replace(method, **settings.pop("method", {}))
        return [list_measured(r) for r in run_rounds(changed, make_clients(changed, **settings))[1]]

    samples = list_samples()
    assert list_samples(method={"clients_per_round": 1}) == samples
    assert list_samples(method={"evaluate_every": 6})[-1] == samples[-1]
    assert list_samples(seed=1) != samples


def test_a_resumed_run_draws_the_same_samples():
    method = make_method("fedavg", rounds=6, iterations=1, eval_clients=2, clients_per_round=2)
    _, expected = run_rounds(method, make_clients(method))
    first, records = run_rounds(method, make_clients(method), rounds=3)
    _, later = run_rounds(method, make_clients(method), server=first.replace(completed_records=()))
    assert list(map(drop_seconds, records + later)) == list(map(drop_seconds, expected))


def test_a_round_asks_only_its_participants_and_its_sample():
    asked = []

    class AskedEngine(SerialEngine):
        def query(self, method, task, broadcast, splits):
            asked.append((task, len(broadcast.participants)))
            return super().query(method, task, broadcast, splits)

    method = make_method("fedavg", rounds=3, iterations=1, clients_per_round=1, eval_clients=2)
    _, records = run_rounds(method, make_clients(method, engine=AskedEngine))
    assert asked == [("evaluate", 2)] * 3
    assert all(set(r["silos"]) == {*r["participants"], *list_measured(r)} for r in records), "no entry of other silos"


def test_a_silo_without_training_data_always_measures():
    silos = make_striped_silos()
    empty = Examples(silos[3].train.x[:0], silos[3].train.y[:0])
    silos[3] = replace(silos[3], train=empty)
    method = make_method("fedavg", rounds=4, iterations=1, eval_clients=1)
    _, records = run_rounds(method, make_clients(method, silos))
    assert all("dan" in list_measured(record) and len(list_measured(record)) == 2 for record in records)


def test_as_many_silos_as_there_are_is_no_sample():
    method = make_method("fedavg", rounds=2, iterations=1, eval_clients=4)
    _, records = run_rounds(method, make_clients(method))
    _, expected = run_rounds(replace(method, eval_clients=0), make_clients(method))
    assert list(map(drop_seconds, records)) == list(map(drop_seconds, expected))


def test_a_summary_has_every_silo_that_measured_one_of_its_rounds():
    method = make_method("fedavg", rounds=6, iterations=1, eval_clients=2)
    _, records = run_rounds(method, make_clients(method))
    summary = summarize_records(records, DOMAINS)["mean of last 5"]
    measured = {
        name: [r["silos"][name]["accuracy"] for r in records[1:] if name in list_measured(r)] for name in DOMAINS
    }
    means = {name: sum(values) / len(values) for name, values in measured.items() if values}
    assert {name: silo["accuracy"] for name, silo in summary["silos"].items()} == pytest.approx(means)
    assert summary["mA"] == pytest.approx(sum(means.values()) / len(means))
    assert summary["sample"] == {"num_evaluated": [2] * 5, "num_silos": 4}


def test_tables_tell_how_many_silos_measured(tmp_path):
    settings = [*TINY_SETTINGS_NO_CODEBOOK, "eval_clients=2", "clients_per_round=3"]
    answer = call_cli("run", "fedavg", *settings, "--out", str(tmp_path))
    assert answer.code == 0, answer.stderr
    assert "metrics are of 2 of 9 silos per evaluated round" in answer.stdout
    assert "(2 of 9 silos)" in answer.stdout + answer.stderr
    assert "D1-1" not in answer.stdout, "a silo that one round measured has no row"
    (run,) = (path for path in tmp_path.iterdir() if (path / "summary.json").exists())
    assert "9 silos" in call_cli("show", str(run)).stdout
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    assert all(len(record["silos"]) <= 5 for record in records)


def test_the_decisions_of_a_codebook_and_the_choices_of_ifca_need_all_silos():
    mistake = call_with_mistake("run", "uefl", "eval_clients=3")
    assert mistake == "eval_clients=3 must be 0 here: the decisions on a codebook need the measurements of all silos"
    assert "every silo chooses its model" in call_with_mistake("run", "ifca", "eval_clients=3")
