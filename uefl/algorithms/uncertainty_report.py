"""Report the silos that are more uncertain than the least uncertain one, independent of which silos get codewords.

The permutation test compares silos with the shared codewords alone: with codewords of its own, a silo whose data differ
would have a low entropy. A reported silo must exceed the threshold γ too. Silos that predict with tensors of their own,
such as their batch norm, are not compared: their models differ, even if their data do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from uefl.algorithms.access_evaluation import evaluate_with_access
from uefl.algorithms.codeword_access import INITIAL_SIZE
from uefl.core import noise_addresses as addresses
from uefl.core.entropy_comparison import NUM_PERMUTATIONS, compare_entropies
from uefl.core.federation import Clients, ServerState, Tensors
from uefl.core.metrics import ENTROPY_COUNTS, Metrics, compute_metrics
from uefl.core.noise import derive_key

if TYPE_CHECKING:
    from uefl.algorithms.extensible_codebook import ExtensibleCodebook
    from uefl.algorithms.fedavg import FedAvg

UncertaintyTest = Literal["none", "standard_errors", "permutation"]
NOT_COMPARABLE = "not_comparable"  # the test of a record where the permutation test would compare models, not data
_PERMUTATIONS_PER_LEVEL = 20  # so that a p-value at the level is a share of at least this many permutations


class UncertaintyReport(NamedTuple):
    """The silos that are reported as uncertain, and what the report is based on, as records contain it."""

    uncertain_silos: tuple[str, ...]
    entries: dict[str, Any]


def report_uncertain_silos(
    codebook: ExtensibleCodebook,
    method: FedAvg,
    clients: Clients,
    server: ServerState,
    validation: Mapping[str, Tensors],
) -> tuple[ServerState, UncertaintyReport]:
    """Report which silos are uncertain, given the metric sums of their validation examples."""
    if codebook.uncertainty_test != "permutation":
        return server, _report_by_threshold(codebook, validation)
    if has_own_tensors(method, clients.net):
        return server, _make_report(codebook, measure_silos(validation), (), {"test": NOT_COMPARABLE}, {})
    server, shared = _evaluate_shared_codewords(method, clients, server, validation)
    noise_key = derive_key(clients.seed, server.round, addresses.SILO_PERMUTATIONS)
    return server, report_by_permutation(codebook, shared, noise_key, num_decisions=count_decisions(method))


def has_own_tensors(method: FedAvg, net: nn.Module) -> bool:
    """Return whether silos predict with tensors of their own before the last round."""
    return bool(method.make_shared_method().personal_tensor_names(net))


def count_decisions(method: FedAvg) -> int:
    """Return how many decisions a run has at most, but at least 1."""
    return max(len(list_decision_rounds(method)), 1)


def list_decision_rounds(method: FedAvg) -> list[int]:
    """List the rounds after which a run may decide: the ends of iterations before the last shared round."""
    ends = (method.rounds + i * method.extra_rounds for i in range(method.iterations))
    return [end for end in ends if end < method.shared_rounds]


def report_by_permutation(
    codebook: ExtensibleCodebook, validation: Mapping[str, Tensors], noise_key: int, num_decisions: int
) -> UncertaintyReport:
    """Report the silos that the permutation test finds, among those above the threshold."""
    metrics = measure_silos(validation)
    level = codebook.uncertainty_level / num_decisions  # Bonferroni over the planned decisions of a run
    num_permutations = max(NUM_PERMUTATIONS, math.ceil(_PERMUTATIONS_PER_LEVEL / level) - 1)
    histograms = {n: validation[n][ENTROPY_COUNTS] for n, m in metrics.items() if math.isfinite(m["entropy"])}
    comparisons = compare_entropies(histograms, noise_key, num_permutations)
    above_threshold = codebook.find_uncertain_silos(metrics, min_standard_errors=0.0)
    uncertain = tuple(name for name in above_threshold if name in comparisons and comparisons[name].p_value <= level)
    entries = {"level": codebook.uncertainty_level, "level_per_decision": level}
    return _make_report(codebook, metrics, uncertain, entries, {n: c._asdict() for n, c in comparisons.items()})


def measure_silos(validation: Mapping[str, Tensors]) -> dict[str, Metrics]:
    """Return the metrics of every silo, given their sums."""
    return {name: compute_metrics(sums) for name, sums in validation.items()}


def compute_squared_error(metrics: Metrics) -> float:
    """Return the squared standard error of a silo's mean entropy e_k."""
    return metrics["entropy_variance"] / max(metrics["num_examples"], 1)


def _report_by_threshold(codebook: ExtensibleCodebook, validation: Mapping[str, Tensors]) -> UncertaintyReport:
    """Report the silos above the threshold, and by how many standard errors if these are tested."""
    metrics = measure_silos(validation)
    num_errors = codebook.min_standard_errors if codebook.uncertainty_test == "standard_errors" else 0.0
    uncertain = codebook.find_uncertain_silos(metrics, min_standard_errors=num_errors)
    return _make_report(codebook, metrics, uncertain, {"min_standard_errors": num_errors}, {})


def _make_report(
    codebook: ExtensibleCodebook,
    metrics: Mapping[str, Metrics],
    uncertain_silos: tuple[str, ...],
    entries: Mapping[str, Any],
    statistics: Mapping[str, Mapping[str, float]],
) -> UncertaintyReport:
    settings = {"test": codebook.uncertainty_test, "extend": codebook.extend}
    silos = {
        name: {
            "entropy": m["entropy"],
            "standard_error": math.sqrt(compute_squared_error(m)),
            **statistics.get(name, {}),
        }
        for name, m in metrics.items()
    }
    threshold = codebook.compute_threshold(metrics)
    return UncertaintyReport(uncertain_silos, {**settings, **entries, "threshold": threshold, "silos": silos})


def _evaluate_shared_codewords(
    method: FedAvg, clients: Clients, server: ServerState, validation: Mapping[str, Tensors]
) -> tuple[ServerState, dict[str, Tensors]]:
    """Return the sums of all silos with the initial codewords alone; silos that have no others were evaluated."""
    is_initial = torch.arange(server.access.shape[1]) < int(server.method_state[INITIAL_SIZE])
    access = server.access & is_initial
    has_own = dict(zip(server.silo_names, (server.access & ~is_initial).any(1).tolist()))
    shared = {name: sums for name, sums in validation.items() if not has_own[name]}
    owners = [name for name in validation if has_own[name]]
    if not owners:
        return server, shared
    server, answers = evaluate_with_access(method, clients, server, owners, access)
    return server, shared | answers
