"""Which silos are reported as more uncertain than the others, whatever decides who gets codewords.

The permutation test compares silos with the shared codewords alone, so that codewords of its own do not hide a silo
whose data the shared model does not know. The threshold γ remains as the least difference that counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from uefl.algorithms.access_evaluation import evaluate_with_access
from uefl.algorithms.codeword_access import INITIAL_SIZE
from uefl.core import noise_addresses as addresses
from uefl.core.entropy_comparison import NUM_PERMUTATIONS, compare_entropies
from uefl.core.federation import Clients, ServerState, Tensors
from uefl.core.metrics import ENTROPY_COUNTS, compute_metrics
from uefl.core.noise import derive_key

if TYPE_CHECKING:
    from uefl.algorithms.extensible_codebook import ExtensibleCodebook
    from uefl.algorithms.fedavg import FedAvg

UncertaintyTest = Literal["none", "standard_errors", "permutation"]
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
    """Test which silos are uncertain, given the metric sums of their validation examples."""
    test, metrics = codebook.uncertainty_test, {name: compute_metrics(sums) for name, sums in validation.items()}
    entries: dict[str, Any] = {"test": test, "extend": codebook.extend}
    statistics: dict[str, dict[str, float]] = {}
    if test == "permutation":
        server, silos = _evaluate_shared_codewords(method, clients, server, validation)
        level = codebook.uncertainty_level / max(method.iterations - 1, 1)  # Bonferroni over the planned decisions
        num_permutations = max(NUM_PERMUTATIONS, math.ceil(_PERMUTATIONS_PER_LEVEL / level) - 1)
        noise_key = derive_key(clients.seed, server.round, addresses.SILO_PERMUTATIONS)
        metrics = {name: compute_metrics(sums) for name, sums in silos.items()}
        histograms = {n: silos[n][ENTROPY_COUNTS] for n, m in metrics.items() if math.isfinite(m["entropy"])}
        comparisons = compare_entropies(histograms, noise_key, num_permutations)
        statistics = {name: comparison._asdict() for name, comparison in comparisons.items()}
        entries |= {"level": codebook.uncertainty_level, "level_per_decision": level}
    elif test == "standard_errors":
        entries["min_standard_errors"] = codebook.min_standard_errors
    uncertain = codebook.find_uncertain_silos(
        metrics, min_standard_errors=codebook.min_standard_errors if test == "standard_errors" else 0.0
    )
    if test == "permutation":
        uncertain = tuple(n for n in uncertain if n in statistics and statistics[n]["p_value"] <= level)
    entries["threshold"] = codebook.compute_threshold(metrics)
    entries["silos"] = {n: {"entropy": m["entropy"], **statistics.get(n, {})} for n, m in metrics.items()}
    return server, UncertaintyReport(uncertain, entries)


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
