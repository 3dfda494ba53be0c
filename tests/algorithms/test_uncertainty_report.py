"""The uncertainty test decides which silos are reported as uncertain, and not which silos get codewords."""

from dataclasses import replace

import pytest
import torch
from harness import CODEWORDS, LOCAL, SHORT_RUN, SMALL_CODEBOOK, make_clients, make_network, run_rounds
from torch import nn

from uefl.algorithms.uefl import UEFL
from uefl.algorithms.uncertainty_report import NOT_COMPARABLE, has_own_tensors, report_uncertain_silos
from uefl.core import noise_addresses as addresses
from uefl.core.entropy_comparison import compare_entropies, count_entropies
from uefl.core.metrics import ENTROPY_COUNTS, compute_metrics
from uefl.core.noise import derive_key


def make_uefl(**codebook):
    local = replace(LOCAL, epochs=2, lr=1e-2)
    return UEFL(**{**SHORT_RUN, "iterations": 3, "local": local}, codebook=replace(SMALL_CODEBOOK, **codebook))


def run_to_decision(method, decision):
    """Return the server before a decision, and the clients."""
    clients = make_clients(method)
    server, _ = run_rounds(method, clients, 3 + 2 * decision - 1)
    return clients, method.run_round(clients, server)


def query_validation(method, clients, server, access):
    broadcast = method.make_broadcast(clients, server)._replace(access=access)
    return {r.silo_name: r.answers["validation"] for r in clients.query(method, "evaluate", broadcast, ("validation",))}


@pytest.mark.parametrize("decision", [0, 1])
def test_the_permutation_test_compares_silos_with_the_initial_codewords(decision):
    method = make_uefl(uncertainty_test="permutation")
    clients, server = run_to_decision(method, decision)
    assert (server.access.shape[1] > 6) == (decision == 1)
    shared = server.access.clone()
    shared[:, 6:] = False
    expected = query_validation(method, clients, server, shared)
    _, report = report_uncertain_silos(
        method.codebook, method, clients, server, query_validation(method, clients, server, server.access)
    )
    entries = report.entries
    noise_key = derive_key(0, server.round, addresses.SILO_PERMUTATIONS)
    comparisons = compare_entropies({n: sums[ENTROPY_COUNTS] for n, sums in expected.items()}, noise_key, 999)
    metrics = {n: compute_metrics(sums) for n, sums in expected.items()}
    entropies = {n: m["entropy"] for n, m in metrics.items()}
    errors = {n: (m["entropy_variance"] / m["num_examples"]) ** 0.5 for n, m in metrics.items()}
    for name, comparison in comparisons.items():
        e_k = {"entropy": entropies[name], "standard_error": pytest.approx(errors[name])}
        assert entries["silos"][name] == {**e_k, **comparison._asdict()}
    assert set(entries["silos"]) == set(comparisons)
    assert entries["threshold"] == pytest.approx(min(entropies.values()))  # γ = 0
    assert (entries["level"], entries["level_per_decision"]) == (0.05, 0.025)
    found = {n for n, c in comparisons.items() if c.p_value <= 0.025 and entropies[n] > min(entropies.values())}
    assert set(report.uncertain_silos) == found


def make_sums(method, entropies, spread=0.2, n=60):
    """Return validation sums of silos, as an evaluation gives them, for entropies around given values."""
    clients = make_clients(method)
    server, _ = run_rounds(method, clients, 2)
    template = query_validation(method, clients, server, server.access)
    generator = torch.Generator().manual_seed(0)
    sums = {}
    for name, value in entropies.items():
        e = (value * (1 + spread * torch.randn(n, generator=generator, dtype=torch.float64))).clamp(1e-3, 1.09)
        new = {"entropy": e.sum(), "entropy_squared": e.square().sum(), ENTROPY_COUNTS: count_entropies(e, 3)}
        sums[name] = {**template[name], "num_examples": torch.tensor(float(n)), **new}
    return clients, server, sums


def test_a_silo_above_the_threshold_by_chance_is_reported_without_a_test_only():
    entropies = {"ada": 0.30, "bob": 0.31, "cyd": 0.32, "dan": 0.60}
    found = {}
    for test in ("none", "standard_errors", "permutation"):
        method = make_uefl(uncertainty_test=test, gamma=0.0, min_standard_errors=3.0)
        clients, server, sums = make_sums(method, entropies, spread=0.3)
        _, report = report_uncertain_silos(method.codebook, method, clients, server, sums)
        found[test] = report.uncertain_silos
        assert report.entries["test"] == test
    assert len(found["none"]) == 3
    assert found["standard_errors"] == found["permutation"] == ("dan",)


def test_a_difference_below_gamma_is_not_reported_however_certain():
    entropies = {"ada": 0.300, "bob": 0.300, "cyd": 0.300, "dan": 0.330}
    for gamma, expected in ((0.05, ("dan",)), (0.2, ())):
        method = make_uefl(uncertainty_test="permutation", gamma=gamma)
        clients, server, sums = make_sums(method, entropies, spread=0.02)
        _, report = report_uncertain_silos(method.codebook, method, clients, server, sums)
        assert report.entries["silos"]["dan"]["p_value"] <= 0.001
        assert report.uncertain_silos == expected


def test_the_test_does_not_decide_which_silos_get_codewords():
    """Thirteen images per silo: the permutation test finds none, and the threshold extends three."""
    results = {}
    for test in ("none", "permutation"):
        method = UEFL(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, uncertainty_test=test))
        results[test] = run_rounds(method, make_clients(method))
    (one, with_all), (other, with_few) = results.values()
    assert torch.equal(one.model_state[CODEWORDS], other.model_state[CODEWORDS])
    assert torch.equal(one.access, other.access)
    reported = [sum(silo["is_uncertain"] for silo in records[2]["silos"].values()) for records in (with_all, with_few)]
    assert reported[0] == 3 > reported[1]
    assert {"entropy", "standard_error", "statistic", "p_value"} == set(with_few[2]["decision"]["silos"]["ada"])


@pytest.mark.parametrize(("batch_norm", "is_tested"), [("average", True), ("local", False), ("personal", False)])
@pytest.mark.parametrize("fine_tuning_epochs", [0, 2])
def test_silos_with_batch_norm_of_their_own_are_not_compared(batch_norm, is_tested, fine_tuning_epochs):
    """Models that differ have other entropies even on the same data; models of fine-tuning are made later."""
    method = make_uefl(uncertainty_test="permutation")
    method = replace(method, iterations=2, batch_norm=batch_norm, fine_tuning_epochs=fine_tuning_epochs)
    _, records = run_rounds(method, make_clients(method))
    (record,) = (r for r in records if r.get("has_decision"))
    assert record["decision"]["test"] == ("permutation" if is_tested else NOT_COMPARABLE)
    assert all(("p_value" in silo) == is_tested for silo in record["decision"]["silos"].values())
    assert any("new_codewords" in silo for silo in record["silos"].values())
    if not is_tested:
        assert not any(silo["is_uncertain"] for silo in record["silos"].values())


def test_silos_with_batch_norm_of_their_own_are_compared_where_the_network_has_none():
    method = replace(make_uefl(uncertainty_test="permutation"), batch_norm="personal")
    assert has_own_tensors(method, make_network(method))
    assert not has_own_tensors(method, make_network(method, encoder_factory=nn.Flatten))


def test_a_silo_that_does_not_answer_with_shared_codewords_is_left_out():
    method = make_uefl(uncertainty_test="permutation")
    clients, server = run_to_decision(method, 1)
    validation = query_validation(method, clients, server, server.access)
    owner = next(n for n, row in zip(server.silo_names, server.access) if row[6:].any())
    query = clients.query

    def query_without_owner(*arguments):
        return (r._replace(rejected="late") if r.silo_name == owner else r for r in query(*arguments))

    clients.query = query_without_owner
    _, report = report_uncertain_silos(method.codebook, method, clients, server, validation)
    assert set(report.entries["silos"]) == set(server.silo_names) - {owner}
    assert owner not in report.uncertain_silos
