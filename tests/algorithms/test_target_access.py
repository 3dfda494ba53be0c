"""Codewords of a silo without training data: three choices are evaluated, and a setting decides which counts (D15)."""

from dataclasses import replace

import pytest
from harness import CODEWORDS, SHORT_RUN, SMALL_CODEBOOK, make_clients, make_striped_silos, run_rounds

from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Examples


def run_with_target(**changes):
    """Run UEFL with the last silo as a target without training data; return the clients, the server and the records."""
    *others, last = make_striped_silos()
    no_examples = Examples(last.train.x[:0], last.train.y[:0])
    method = UEFL(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, **changes))
    clients = make_clients(method, [*others, replace(last, train=no_examples, validation=no_examples)])
    return (method, clients, *run_rounds(method, clients))


@pytest.mark.parametrize("target_access", ["shared", "all", "least_uncertain"])
def test_metrics_of_a_target_are_those_of_the_chosen_access(target_access):
    _, _, server, records = run_with_target(target_access=target_access)
    assert server.access[-1].tolist() == [True] * 6 + [False] * (server.access.shape[1] - 6)  # none of its own
    target = records[-1]["silos"]["dan"]
    assert set(target["target_metrics"]) == {"shared", "all", "least_uncertain"}
    assert target["target_metrics"][target_access].items() <= target.items()
    entropies = {name: metrics["entropy"] for name, metrics in target["target_metrics"].items()}
    assert entropies["all"] != entropies["shared"]
    assert not any("target_metrics" in records[-1]["silos"][name] for name in ("ada", "bob", "cyd"))


def test_least_uncertain_access_is_the_row_of_a_trained_silo_with_the_least_entropy():
    method, clients, server, records = run_with_target()
    entropies = []
    for row in server.access[:3]:
        access = server.access.clone()
        access[-1] = row
        broadcast = method.make_broadcast(clients, server)._replace(access=access, participants=("dan",))
        (reply,) = clients.query(method, "evaluate", broadcast, ("test",))
        entropies.append(float(reply.answers["test"]["entropy"] / reply.answers["test"]["num_examples"]))
    metrics = records[-1]["silos"]["dan"]["target_metrics"]["least_uncertain"]
    assert metrics["entropy"] == pytest.approx(min(entropies))
    assert len(set(entropies)) > 1


def test_choices_are_not_evaluated_while_all_silos_use_the_same_codewords():
    _, _, server, records = run_with_target(extend=False)
    assert server.model_state[CODEWORDS].shape == (6, 4)
    assert not any("target_metrics" in silo for record in records for silo in record["silos"].values())
