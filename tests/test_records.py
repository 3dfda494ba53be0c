"""What a run writes down: every round once, every field, and the summary that follows."""

import json
import math
from dataclasses import replace

import pytest
from stripes import LOCAL, ROUNDS, clients, play, short

from uefl.algorithms import ALGORITHMS, UEFL, Book
from uefl.records import append, read, summarise

EAGER = Book(words=6, segments=2, warm_up=1, gamma=0.0, errors=0)
PER_SILO = {
    *("accuracy", "entropy", "perplexity", "code_loss", "local_accuracy", "local_entropy", "words", "uncertain"),
    *("down", "up", "seconds", "accuracy_sampled", "expected_entropy", "mutual_information", "nll", "brier", "ece"),
}
PER_ROUND = {"round", "iteration", "who", "words_total", "bytes_up", "bytes_down", "seconds", "kmeans_seconds", "silos"}


@pytest.fixture(scope="module")
def run():
    method = UEFL(**ROUNDS, codebook=EAGER)
    server, records = play(method, clients(method))
    return server, records


def test_every_round_is_recorded_once_with_every_field(run):
    _, records = run
    assert [r["round"] for r in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record.keys() >= PER_ROUND
        assert list(record["silos"]) == ["ada", "bob", "cyd", "dan"]
        for mine in record["silos"].values():
            assert mine.keys() >= PER_SILO
            assert mine["validation"].keys() >= {"accuracy", "entropy"}
            assert all(math.isfinite(v) for v in mine.values() if isinstance(v, float))


def test_records_are_json(run):
    _, records = run
    assert json.loads(json.dumps(records)) == records


def test_words_and_k_means_time_are_those_of_the_round(run):
    server, records = run
    assert [r["words_total"] for r in records] == [0, 6, 6, 24, 24]
    assert [r["iteration"] for r in records] == [0, 0, 0, 1, 1]
    assert [r["kmeans_seconds"] > 0 for r in records] == [True, False, True, False, False]
    assert {n: m["words"] for n, m in records[-1]["silos"].items()} == dict(
        zip(server.silos, server.access.sum(1).tolist())
    )
    assert [sum(m["uncertain"] for m in r["silos"].values()) for r in records] == [0, 0, 3, 0, 0]


def test_a_record_measures_the_integrated_model_of_its_own_round():
    """Measured again from the server of that round: the same numbers, dropout draws included."""
    method = UEFL(**ROUNDS, codebook=EAGER)
    engine = clients(method)
    server, records, expected = method.start(engine), [], []
    while server.round < method.budget:
        trained = method.round(engine, server)
        _, answers = method.measured(clients(method), trained)  # before an extension
        expected.append(method.close(trained.but(records=()), answers).records[-1])
        server = method.step(engine, server)
        records += server.records
    for record, again in zip(records, expected):
        for who, mine in again["silos"].items():
            for metric in ("accuracy", "entropy", "nll", "perplexity", "code_loss"):
                assert record["silos"][who][metric] == mine[metric], (record["round"], who, metric)
            assert record["silos"][who]["validation"] == mine["validation"]


def test_bytes_are_those_of_what_travels(run):
    server, records = run
    shared = sum(t.numel() * t.element_size() for n, t in server.state.items() if not n.endswith("words"))
    for record in records:
        for mine in record["silos"].values():
            assert mine["down"] == mine["up"] == shared + mine["words"] * 4 * 4
        trained = sum(mine["down"] for mine in record["silos"].values())
        asked = "first_book" in record or "judged" in record or record is records[-1]
        assert record["bytes_down"] > trained if asked else record["bytes_down"] == trained  # questions count too


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_can_be_summarised(name):
    method = short(ALGORITHMS[name])
    if method.codebook:
        method = replace(method, codebook=replace(method.codebook, words=6, segments=2))
    engine = clients(method)
    _, records = play(method, engine)
    found = summarise(records, dict(engine.domains))
    assert found["rounds"] == method.budget
    for level in ("last", "mean of last 5", "best by validation"):
        assert 0 <= found[level]["mA"] <= 1
        assert set(found[level]["silos"]) == {"ada", "bob", "cyd", "dan"}
        assert set(found[level]["domains"]) == {"upright", "turned"}


def line(round_, accuracy, validation, **more):
    silos = {
        n: {"accuracy": a, "count": 5.0, "entropy": a / 2, "perplexity": 2.0, "words": 3, "uncertain": False}
        | ({"validation": {"accuracy": v}} if v is not None else {})
        for (n, a), v in zip(accuracy.items(), validation)
    }
    fields = {"words_total": 3, "bytes_up": 10, "bytes_down": 20, "seconds": 1.0, "kmeans_seconds": 0.5}
    return {"round": round_, "silos": silos, **fields, **more}


def test_the_summary_is_the_mean_of_the_last_five_the_last_and_the_best_by_validation():
    accuracy = [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    validation = [0.1, 0.5, 0.8, 0.8, 0.3, 0.3, 0.3]
    records = [line(i + 1, {"ada": a, "bob": a + 0.1}, (v, v)) for i, (a, v) in enumerate(zip(accuracy, validation))]
    found = summarise(records, {"ada": "x", "bob": "y"})
    assert found["last"]["mA"] == pytest.approx(0.65)
    assert found["mean of last 5"]["mA"] == pytest.approx(0.45)
    assert found["mean of last 5"]["mE"] == pytest.approx(0.225)
    assert found["mean of last 5"]["mP"] == pytest.approx(2)
    assert found["mean of last 5"]["domains"]["y"]["accuracy"] == pytest.approx(0.5)
    assert found["best by validation"]["round"] == [3]  # the first of two equals; never by the test part
    assert found["best by validation"]["mA"] == pytest.approx(0.25)
    assert found["validation_accuracy"] == pytest.approx((0.8 + 0.8 + 0.3 * 3) / 5)
    assert found["bytes_up"] == 70
    assert found["kmeans_seconds"] == 3.5


def test_a_round_nobody_measured_is_not_the_best():
    records = [line(1, {"ada": 0.1}, (None,)), line(2, {"ada": 0.2}, (0.7,)), line(3, {"ada": 0.3}, (0.6,))]
    found = summarise(records, {"ada": "x"})
    assert found["best by validation"]["round"] == [2]
    assert found["validation_accuracy"] == pytest.approx(0.65)


def test_extensions_are_listed_with_who_and_how_many_words():
    records = [line(1, {"ada": 0.1, "bob": 0.2}, (0.1, 0.2), judged=True)]
    records[0]["silos"]["ada"] |= {"uncertain": True, "new_words": 6}
    records[0]["silos"]["bob"] |= {"new_words": 0}
    found = summarise(records, {"ada": "x", "bob": "x"})["extensions"]
    assert found == [{"round": 1, "uncertain": ["ada"], "new_words": {"ada": 6}}]


def test_lines_are_appended_and_a_torn_one_is_dropped(tmp_path):
    path = tmp_path / "records.jsonl"
    assert read(path) == []
    append(path, [{"round": 1}, {"round": 2}])
    append(path, [{"round": 3}])
    text = path.read_text()
    for end in range(len(text)):
        path.write_text(text[:end])
        assert [r["round"] for r in read(path)] == list(range(1, text[:end].count("\n") + 1))


def test_local_measurements_are_of_the_model_before_averaging():
    """With one local epoch more, the local model moves away from the integrated one; its entropy is its own."""
    method = UEFL(**{**ROUNDS, "local": replace(LOCAL, epochs=4)}, codebook=EAGER)
    engine = clients(method)
    server, records = play(method, engine, 2)
    assert records[0]["silos"]["ada"]["local_entropy"] != records[0]["silos"]["ada"]["entropy"]
    engine = clients(method)
    start = method.start(engine)
    reply = next(iter(engine.fit(method, method.say(engine, start)._replace(round=1))))
    _, answers = method.measured(clients(method), start.but(state=reply.tensors, round=1))
    again = answers["ada"]["test"]
    expected = float(again["entropy"] / again["count"])
    assert records[0]["silos"]["ada"]["local_entropy"] == pytest.approx(expected, rel=1e-6)
    assert server.round == 2
