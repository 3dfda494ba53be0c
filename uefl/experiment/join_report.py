"""What `uefl join` prints: how uncertain the newcomer is, what is its own, and a table of before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from uefl.algorithms.fedavg import BATCH_NORM_STATISTICS
from uefl.algorithms.own_parts import GATE_SUFFIX
from uefl.core.federation import is_codeword_tensor
from uefl.experiment.join_choice import MIN_CHOICE_EXAMPLES
from uefl.experiment.joining import Evaluation, JoinResult
from uefl.experiment.records import Record
from uefl.experiment.silo_models import SiloModels

ROWS = (("accuracy", "accuracy", 3), ("nll", "NLL", 3), ("entropy", "entropy, nats", 3))


def is_uncertain(models: SiloModels, silo_name: str, shared: Evaluation) -> bool:
    """Return whether the run's threshold finds the newcomer uncertain, by its validation examples."""
    codebook, metrics = models.method.codebook, shared.get("validation")
    if codebook is None or metrics is None:
        return False
    return silo_name in codebook.find_uncertain_silos({**_list_references(models), silo_name: metrics})


def describe_uncertainty(models: SiloModels, silo_name: str, shared: Evaluation) -> str:
    """Describe in words how uncertain the newcomer is with what all silos share, beside the silos of the run."""
    metrics, codebook, others = shared.get("validation"), models.method.codebook, _list_references(models)
    if metrics is None:
        return f"{silo_name} has no validation examples, so its uncertainty cannot be compared with the other silos"
    entropy, count = metrics["entropy"], metrics["num_examples"]
    examples = f"{count:g} validation example{'' if count == 1 else 's'}"
    few = ", too few to judge by" if count < MIN_CHOICE_EXAMPLES else ""
    found = f"{silo_name}: predictive entropy {entropy:.2f} nats with the shared model, on {examples}{few}"
    if not others:
        return f"{found}; the run has no entropies of its silos to compare it with"
    entropies = {name: m["entropy"] for name, m in others.items()}
    least, most = min(entropies, key=lambda n: entropies[n]), max(entropies, key=lambda n: entropies[n])
    ranges = f"the silos of the run have {entropies[least]:.2f} ({least}) to {entropies[most]:.2f} ({most})"
    threshold = codebook.compute_threshold(others) if codebook else None
    if codebook is None or threshold is None:
        return f"{found}; {ranges}"
    errors = _count_standard_errors(metrics, others[least])
    verdict = "above it" if few else "uncertain"
    verdict = f"is {verdict}" if is_uncertain(models, silo_name, shared) else f"is not {verdict}"
    needed = f" (at least {codebook.min_standard_errors:g} are needed)" if codebook.min_standard_errors else ""
    return (
        f"{found}; {ranges}. Threshold {threshold:.2f} (1 + γ = {1 + codebook.gamma:g} times the "
        f"{'least' if codebook.threshold_reference == 'min' else 'mean'}): {silo_name} {verdict}; its entropy differs "
        f"from the least by {errors:.1f} standard errors{needed}"
    )


def describe_last_decision(records: list[Record], uncertainty_test: str) -> str:
    """Describe what the run itself last decided; its permutation test needs the examples of all silos."""
    decisions = [record for record in records if record.get("has_decision")]
    if not decisions:
        return ""
    names = [name for name, silo in decisions[-1]["silos"].items() if silo["is_uncertain"]]
    found = f"after round {decisions[-1]['round']} the run reported {', '.join(names) if names else 'no silo'}"
    note = "; its permutation test is not repeated here, since it needs the counts of all silos"
    return f"{found} as uncertain{note if uncertainty_test == 'permutation' else ''}"


def describe_own_parts(models: SiloModels, result: JoinResult) -> str:
    """Name in words what belongs to the silo that joined."""
    names = [n for n in result.own_names if not is_codeword_tensor(n)]
    gates = [n for n in names if n.endswith(GATE_SUFFIX)]
    statistics = [n for n in names if n.endswith(BATCH_NORM_STATISTICS)]
    heads = [n for n in names if n.startswith("classifier.") or ".classifier." in n]
    rest = sorted(set(names) - set(gates) - set(statistics) - set(heads))
    parts = [
        *([f"{result.num_codewords} codewords by K-means on its features"] if result.num_codewords else []),
        *(["a gate"] if gates else []),
        *(["batch-norm statistics"] if statistics else []),
        *(["a classifier"] if heads else []),
        *([f"{len(rest)} further tensors, such as {rest[0]}"] if rest else []),
        *(["a label prior"] if models.method.uses_label_prior else []),
    ]
    return f"own parts of {result.silo_name}: {', '.join(parts) or 'none'}"


def describe_missing_codewords(models: SiloModels, result: JoinResult, num_examples: int) -> str:
    """Say why a silo has no codewords of its own although it asked for them."""
    codebook = models.method.codebook
    if codebook is None or result.num_codewords or not any(map(is_codeword_tensor, result.own_names)):
        return ""
    return (
        f"{result.silo_name} gets no codewords of its own and uses the shared ones: a codeword needs "
        f"min_examples={codebook.min_examples} training examples (or groups), and the silo has {num_examples} examples"
    )


def describe_choice(result: JoinResult) -> str:
    """Say what was chosen to be trained, at which learning rate, and by which figures."""
    trial = result.trial
    chosen = f"{trial.plan.describe()} at learning rate {trial.lr:g}" if trial.lr else "no training"
    if not result.nll:
        return f"{chosen}: there are too few examples to choose" if trial.lr else chosen
    source = "of validation examples" if result.num_folds == 1 else f"over {result.num_folds} folds of its examples"
    return f"chosen: {chosen}, by the NLL {source} ({_list_scores(result)})"


def _list_scores(result: JoinResult) -> str:
    """List the best NLL per plan, or that per learning rate where there is one plan."""
    plans = dict.fromkeys(trial.plan for trial in result.nll)
    if len(plans) == 1:
        return ", ".join(f"{trial.lr:g}: {nll:.3f}" for trial, nll in result.nll.items())
    untrained = {trial: nll for trial, nll in result.nll.items() if trial.lr == 0 and trial.plan.keeps_shared_values}
    listed = [f"no training {min(untrained.values()):.3f}"] if untrained else []
    for plan in plans:
        if of_plan := [nll for trial, nll in result.nll.items() if trial.plan == plan and trial.lr]:
            listed.append(f"{plan.describe()} {min(of_plan):.3f}")
    return ", ".join(listed)


def describe_missing_calibration(models: SiloModels, silo_name: str, others: str) -> str:
    """Say which models of the new run lack a calibration although the run before has one."""
    if not models.is_calibrated:
        return ""
    if others == "fixed":
        return f"{silo_name} is not calibrated yet; the calibration of the other silos still holds"
    return "the new models are not calibrated yet; the calibration of the run before does not hold for them"


def make_join_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """Make a table of the newcomer's test examples, one column per evaluation."""
    table = Table(title="Test examples of the new silo", title_justify="left")
    table.add_column("")
    for name in evaluations:
        table.add_column(name, justify="right", no_wrap=True)
    for key, label, digits in ROWS:
        table.add_row(label, *(f"{evaluation[key]:.{digits}f}" for evaluation in evaluations.values()))
    return table


def _list_references(models: SiloModels) -> dict[str, dict[str, Any]]:
    """Return the validation metrics of the run's silos with its last shared model, where they are known."""
    silos = models.without_own_models().description.silos
    return {n: facts.reference for n, facts in silos.items() if math.isfinite(facts.reference.get("entropy", math.nan))}


def _count_standard_errors(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    variances = (m["entropy_variance"] / max(m["num_examples"], 1) for m in (one, other))
    return (one["entropy"] - other["entropy"]) / max(math.sqrt(sum(variances)), 1e-12)
