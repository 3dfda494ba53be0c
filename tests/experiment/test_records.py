"""Records of rounds: every round once, every field; and the summary of a run."""

import json
import math
from dataclasses import replace

import pytest
from harness import LOCAL, SHORT_RUN, SMALL_CODEBOOK, make_clients, make_short_method, run_rounds

from uefl.algorithms import METHODS
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import is_codeword_tensor
from uefl.experiment.records import append_records, read_records, summarize_records

PER_SILO = {
    *(
        "accuracy",
        "entropy",
        "perplexity",
        "code_loss",
        "local_accuracy",
        "local_entropy",
        "num_codewords",
        "is_uncertain",
    ),
    *(
        "bytes_down",
        "bytes_up",
        "seconds",
        "accuracy_sampled",
        "expected_entropy",
        "mutual_information",
        "nll",
        "brier",
        "augrc",
        "risk_at_80",
    ),
}
PER_ROUND = {
    *("round", "iteration", "participants", "total_codewords", "bytes_up", "bytes_down", "seconds", "kmeans_seconds"),
    "silos",
}


@pytest.fixture(scope="module")
def run():
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK)
    server, records = run_rounds(method, make_clients(method))
    return server, records


def test_every_round_is_recorded_once_with_every_field(run):
    _, records = run
    assert [r["round"] for r in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record.keys() >= PER_ROUND
        assert list(record["silos"]) == ["ada", "bob", "cyd", "dan"]
        for silo in record["silos"].values():
            assert silo.keys() >= PER_SILO
            assert silo["validation"].keys() >= {"accuracy", "entropy"}
            assert all(math.isfinite(v) for v in silo.values() if isinstance(v, float))


def test_records_are_json(run):
    _, records = run
    assert json.loads(json.dumps(records)) == records


def test_codewords_and_kmeans_time_are_those_of_the_round(run):
    server, records = run
    assert [r["total_codewords"] for r in records] == [0, 6, 6, 24, 24]
    assert [r["iteration"] for r in records] == [0, 0, 0, 1, 1]
    assert [r["kmeans_seconds"] > 0 for r in records] == [True, False, True, False, False]
    num_codewords = dict(zip(server.silo_names, server.access.sum(1).tolist()))
    assert {name: silo["num_codewords"] for name, silo in records[-1]["silos"].items()} == num_codewords
    assert [sum(silo["is_uncertain"] for silo in r["silos"].values()) for r in records] == [0, 0, 3, 0, 0]


def test_a_record_has_the_metrics_of_its_own_rounds_averaged_model():
    """Evaluating the server of that round again gives the same numbers, dropout draws included."""
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK)
    engine = make_clients(method)
    server, records, expected = method.initialize_server(engine), [], []
    while server.round < method.total_rounds:
        trained = method.run_round(engine, server)
        _, evaluations = method.evaluate_clients(make_clients(method), trained)  # before an extension
        expected.append(
            method.complete_open_record(trained.replace(completed_records=()), evaluations).completed_records[-1]
        )
        server = method.step(engine, server)
        records += server.completed_records
    for record, again in zip(records, expected):
        for name, silo in again["silos"].items():
            for metric in ("accuracy", "entropy", "nll", "perplexity", "code_loss"):
                assert record["silos"][name][metric] == silo[metric], (record["round"], name, metric)
            assert record["silos"][name]["validation"] == silo["validation"]


def test_bytes_are_the_size_of_the_messages(run):
    server, records = run
    shared = sum(t.numel() * t.element_size() for n, t in server.model_state.items() if not is_codeword_tensor(n))
    for record in records:
        for silo in record["silos"].values():
            assert silo["bytes_down"] == silo["bytes_up"] == shared + silo["num_codewords"] * 4 * 4
        training = sum(silo["bytes_down"] for silo in record["silos"].values())
        has_query = "initial_codewords" in record or "has_decision" in record or record is records[-1]
        assert record["bytes_down"] > training if has_query else record["bytes_down"] == training  # queries count too


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_summarized(name):
    method = make_short_method(METHODS[name])
    if method.codebook:
        method = replace(method, codebook=replace(method.codebook, num_codewords=6, segments=2))
    engine = make_clients(method)
    _, records = run_rounds(method, engine)
    summary = summarize_records(records, dict(engine.domains))
    assert summary["rounds"] == method.total_rounds
    for aggregation in ("last", "mean of last 5", "best by validation"):
        assert 0 <= summary[aggregation]["mA"] <= 1
        assert set(summary[aggregation]["silos"]) == {"ada", "bob", "cyd", "dan"}
        assert set(summary[aggregation]["domains"]) == {"upright", "rotated"}


def make_record(round_number, accuracy, validation, **fields):
    constant = {"num_examples": 5.0, "perplexity": 2.0, "num_codewords": 3, "is_uncertain": False}
    silos = {
        n: {**constant, "accuracy": a, "entropy": a / 2} | ({"validation": {"accuracy": v}} if v is not None else {})
        for (n, a), v in zip(accuracy.items(), validation)
    }
    totals = {"total_codewords": 3, "bytes_up": 10, "bytes_down": 20, "seconds": 1.0, "kmeans_seconds": 0.5}
    return {"round": round_number, "silos": silos, **totals, **fields}


def test_the_summary_is_the_mean_of_the_last_five_the_last_and_the_best_by_validation():
    accuracy = [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    validation = [0.1, 0.5, 0.8, 0.8, 0.3, 0.3, 0.3]
    records = [
        make_record(i + 1, {"ada": a, "bob": a + 0.1}, (v, v)) for i, (a, v) in enumerate(zip(accuracy, validation))
    ]
    summary = summarize_records(records, {"ada": "x", "bob": "y"})
    assert summary["last"]["mA"] == pytest.approx(0.65)
    assert summary["mean of last 5"]["mA"] == pytest.approx(0.45)
    assert summary["mean of last 5"]["mE"] == pytest.approx(0.225)
    assert summary["mean of last 5"]["mP"] == pytest.approx(2)
    assert summary["mean of last 5"]["domains"]["y"]["accuracy"] == pytest.approx(0.5)
    assert summary["best by validation"]["round"] == [3]  # the first of two equals; never by test accuracy
    assert summary["best by validation"]["mA"] == pytest.approx(0.25)
    assert summary["validation_accuracy"] == pytest.approx((0.8 + 0.8 + 0.3 * 3) / 5)
    assert summary["bytes_up"] == 70
    assert summary["kmeans_seconds"] == 3.5


def test_after_fine_tuning_a_summary_is_that_of_the_fine_tuned_models_alone():
    """Rounds before it have another model, whose accuracy must neither raise nor lower the mean."""
    records = [make_record(i + 1, {"ada": a}, (v,)) for i, (a, v) in enumerate(((0.2, 0.9), (0.3, 0.8), (0.6, 0.7)))]
    records[-1]["is_fine_tuned"] = True
    summary = summarize_records(records, {"ada": "x"})
    for aggregation in ("last", "mean of last 5", "best by validation"):
        assert summary[aggregation]["mA"] == pytest.approx(0.6)
        assert summary[aggregation]["round"] == [3]
    assert summary["validation_accuracy"] == pytest.approx(0.7)
    assert summary["bytes_up"] == 30


def test_a_summary_compares_own_models_with_the_shared_one_at_the_silos_that_have_both():
    record = make_record(1, {"ada": 0.5, "bob": 0.5, "cyd": 0.5}, (0.5, 0.5, 0.5))
    assert summarize_records([record], dict.fromkeys(record["silos"], "x"))["own_models"] == {}
    for name, (nll, shared_nll) in {"ada": (0.3, 0.5), "bob": (0.1, 0.2)}.items():
        record["silos"][name] |= {"nll": nll, "shared": {"nll": shared_nll}}
    record["silos"]["cyd"]["nll"] = 9.0  # joined later, or has no training examples
    own_models = summarize_records([record], dict.fromkeys(record["silos"], "x"))["own_models"]
    assert own_models == pytest.approx({"num_silos": 2, "nll": 0.2, "shared_nll": 0.35})


def test_the_mean_of_the_last_five_rounds_has_no_earlier_round_when_few_are_evaluated():
    """With evaluate_every=4, the last five evaluated rounds would go back to the beginning of a run."""
    records = [make_record(i + 1, {"ada": 0.1 * (i + 1)}, (0.1 * (i + 1),)) for i in range(9)]
    for record in records:
        if record["round"] not in (1, 5, 9):
            record["silos"]["ada"] = {"is_uncertain": False, "num_codewords": 0}
    summary = summarize_records(records, {"ada": "x"})
    assert summary["mean of last 5"]["round"] == [5, 9]
    assert summary["mean of last 5"]["mA"] == pytest.approx(0.7)
    assert summary["validation_accuracy"] == pytest.approx(0.7)


def test_codewords_of_a_summary_are_those_of_the_last_round():
    records = [make_record(i + 1, {"ada": 0.5}, (0.5,)) for i in range(3)]
    for record, num_codewords in zip(records, (3, 3, 9)):
        record["silos"]["ada"]["num_codewords"] = num_codewords
    summary = summarize_records(records, {"ada": "x"})
    assert summary["mean of last 5"]["silos"]["ada"]["num_codewords"] == 9


def test_a_round_without_validation_accuracy_is_not_the_best():
    records = [make_record(i + 1, {"ada": 0.1 * (i + 1)}, (v,)) for i, v in enumerate((None, 0.7, 0.6))]
    summary = summarize_records(records, {"ada": "x"})
    assert summary["best by validation"]["round"] == [2]
    assert summary["validation_accuracy"] == pytest.approx(0.65)


def test_extensions_list_uncertain_silos_and_new_codewords():
    records = [make_record(1, {"ada": 0.1, "bob": 0.2}, (0.1, 0.2), has_decision=True)]
    records[0]["silos"]["ada"] |= {"is_uncertain": True, "new_codewords": 6}
    records[0]["silos"]["bob"] |= {"new_codewords": 0}
    extensions = summarize_records(records, {"ada": "x", "bob": "x"})["extensions"]
    assert extensions == [{"round": 1, "uncertain_silos": ["ada"], "new_codewords": {"ada": 6}, "decision": {}}]


def test_records_are_appended_and_an_incomplete_one_is_dropped(tmp_path):
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    append_records(path, [{"round": 1}, {"round": 2}])
    append_records(path, [{"round": 3}])
    text = path.read_text()
    for end in range(len(text)):
        path.write_text(text[:end])
        assert [r["round"] for r in read_records(path)] == list(range(1, text[:end].count("\n") + 1))


def test_local_metrics_are_those_of_the_model_before_averaging():
    """With several local epochs the local model differs from the averaged one, and so does its entropy."""
    method = UEFL(**{**SHORT_RUN, "local": replace(LOCAL, epochs=4)}, codebook=SMALL_CODEBOOK)
    engine = make_clients(method)
    server, records = run_rounds(method, engine, 2)
    assert records[0]["silos"]["ada"]["local_entropy"] != records[0]["silos"]["ada"]["entropy"]
    engine = make_clients(method)
    start = method.initialize_server(engine)
    reply = next(iter(engine.fit(method, method.make_broadcast(engine, start)._replace(round=1))))
    local = start.replace(model_state=reply.tensors, round=1)
    _, evaluations = method.evaluate_clients(make_clients(method), local)
    sums = evaluations["ada"].received["test"]
    expected = float(sums["entropy"] / sums["num_examples"])
    assert records[0]["silos"]["ada"]["local_entropy"] == pytest.approx(expected, rel=1e-6)
    assert server.round == 2
