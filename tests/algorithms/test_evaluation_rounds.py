"""Rounds that are not evaluated: the model is the same, and summaries use the evaluated rounds."""

from dataclasses import replace

import pytest
from harness import TINY_SETTINGS, call_cli, have_equal_bits, make_clients, make_method, run_rounds

from uefl.algorithms import METHODS
from uefl.core.errors import InputError
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
