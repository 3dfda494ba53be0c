"""The extensible codebook: evaluate, decide, extend, at the end of an iteration of Algorithm 1.

It is a part, not a method: UEFL is FedAvg's round with this part, and other rounds take it as `codebook=` too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from uefl.algorithms.alike_silos import Halves, group_by_halves, group_by_spacing
from uefl.algorithms.centroids import (
    WHOLE,
    Centroids,
    cluster_features,
    compute_centroids,
    encode_features,
    find_centroid_error,
    has_valid_centroids,
    merge_centroids,
)
from uefl.algorithms.codebook_hooks import CodebookHooks
from uefl.algorithms.codeword_access import (
    add_codewords,
    get_extension_size,
    revoke_codewords,
    store_extension_size,
    store_initial_size,
)
from uefl.algorithms.codeword_validation import mark_unvalidated, revoke_useless_codewords
from uefl.algorithms.round_record import record_decision, record_kmeans_time, record_query_cost
from uefl.algorithms.target_access import TargetAccess, evaluate_targets
from uefl.algorithms.uncertainty_report import UncertaintyTest, compute_squared_error, report_uncertain_silos
from uefl.core import noise_addresses as addresses
from uefl.core.codebook import CodewordGradient, Gate, multiply_loss
from uefl.core.codebook_size import CodebookSize, choose_codebook_size
from uefl.core.errors import InputError
from uefl.core.federation import Clients, ClientTask, Evaluations, ServerState, Silo, TaskParts, is_codeword_tensor
from uefl.core.field_rules import check_ranges, setting
from uefl.core.metrics import Metrics, compute_metrics
from uefl.core.noise import derive_key, normal, permutation

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg
    from uefl.core.codebook import QuantizedFeatures
    from uefl.models.network import Prediction

Extend = Literal["none", "uncertain", "all", "random", "validated"]


@dataclass(frozen=True, kw_only=True)
class ExtensibleCodebook(CodebookHooks):
    """Codewords that all silos share, and codewords that only uncertain silos may use."""

    num_codewords: int = setting(
        256,
        "Codewords v of the initial codebook and of every extension; 0 chooses v by the number of features (D33).",
        at_least=0,
        at_most=65536,
        zero="a choice by the number of features",
    )
    segments: int = setting(
        4,
        "Segments s into which a feature is split; all use the same codewords; 0 chooses s by the encoder's output "
        "(D33).",
        at_least=0,
        zero="a choice by the encoder's output",
    )
    codebook_init: Literal["kmeans", "gaussian"] = setting(
        "kmeans", "Initial codewords: centroids of features after the warm-up, or Gaussian noise (D12)."
    )
    warmup_rounds: int = setting(2, "Rounds without quantization before codebook_init=kmeans.", at_least=0)
    commitment_weight: float = setting(0.25, "Weight of ‖sg(c) − z‖² in L_code, the encoder's term (D5).", at_least=0)
    codebook_loss_weight: float = setting(
        1.0, "Weight β of ‖c − sg(z)‖² in L_code, the codewords' term (D5).", at_least=0
    )
    reduction: Literal["mean", "sum"] = setting("mean", "Reduction of ‖·‖² over the channels of a feature (D18).")
    codeword_gradient: CodewordGradient = setting(
        "code", "Losses that train codewords: L_code alone, or the task's loss too (D28)."
    )
    gate: Gate = setting(
        "none",
        "Share g of the codeword in the classifier's input, beside 1 − g of the feature: none (g = 1), fixed, or "
        "learned per channel (D29).",
    )
    gate_value: float = setting(
        0.75, "Share g of a fixed gate, or the initial share of a learned one.", above=0, at_most=1
    )
    extend: Extend = setting(
        "uncertain",
        "Silos that get new codewords: none; uncertain: those above the threshold, as in the paper, which chose no "
        "better than chance on the data measured; all; random: as many, drawn by the seed; validated: as uncertain, "
        "but codewords are revoked where the negative log-likelihood of validation examples is lower without them "
        "(D31).",
    )
    new_codeword_init: Literal["kmeans", "gaussian"] = setting(
        "kmeans", "New codewords: centroids of the silo's features, or Gaussian noise (Table 15)."
    )
    min_examples: int = setting(
        10,
        "Minimum number of examples, or of groups such as patients, behind every K-means centroid that leaves a silo; "
        "centroids with fewer are merged (D30).",
        at_least=1,
    )
    gamma: float = setting(
        0.1, "Threshold γ: a silo is uncertain if e_k > (1 + γ) times the reference.", at_least=0, finite=False
    )
    threshold_reference: Literal["min", "mean"] = setting("min", "Reference entropy over silos for the threshold (D4).")
    min_standard_errors: float = setting(
        2.0,
        "Standard errors by which e_k must exceed the reference; 0 applies γ alone (D22).",
        at_least=0,
        finite=False,
    )
    uncertainty_test: UncertaintyTest = setting(
        "permutation",
        "Test that a silo must pass, beside γ, to be reported as uncertain: none, standard_errors (by "
        "min_standard_errors), or permutation. It does not decide which silos get codewords (D32).",
    )
    uncertainty_level: float = setting(
        0.05, "Level of the permutation test, for all silos and decisions of a run together.", above=0, below=1
    )
    extension_scope: Literal["silo", "group", "alike"] = setting(
        "silo",
        "New codewords per uncertain silo, together for all uncertain silos (group), or together for those whose "
        "centroids are alike (D7).",
    )
    alike_rule: Literal["halves", "spacing"] = setting(
        "halves",
        "Silos are alike if their centroids are as close as those of two halves of a silo, or (spacing) closer than "
        "those of one silo are to each other (D35).",
        in_run_id="when changed",
    )
    extension_growth: Literal["constant", "double"] = setting(
        "constant", "Codewords per extension: v, or as many as the silo with most codewords has (D8)."
    )
    retention: Literal["all", "newest"] = setting(
        "all", "Codewords a silo may use after a further extension: all, or the initial and the newest (D10)."
    )
    target_access: TargetAccess = setting(
        "shared",
        "Codewords that a silo without training data may use: shared ones, all, or those of the silo with which its "
        "validation images are least uncertain (D15).",
    )
    initial_codebook: Literal["shared", "per_domain"] = setting(
        "shared", "Initial codebook: one for all silos, or one per true domain (an oracle)."
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.gate == "learned" and self.gate_value == 1:
            raise InputError("gate_value=1 must be less than 1 with gate=learned: a gate at 1 has no gradient")
        if self.extend not in get_args(Extend):  # such as true or false, which were its values once
            raise InputError(f"extend={str(self.extend).lower()}; allowed: {', '.join(get_args(Extend))}")

    def check_rounds(self, method: FedAvg) -> None:
        if self.codebook_init == "kmeans" and self.warmup_rounds >= method.rounds:
            raise InputError(f"warmup_rounds={self.warmup_rounds} must be less than rounds={method.rounds}")

    def check_silos(self, silos: Sequence[Silo]) -> None:
        for silo in silos if self.target_access == "least_uncertain" else ():
            if not len(silo.train.y) and not len(silo.validation.y):
                raise InputError(
                    f"target_access=least_uncertain needs validation images at {silo.name}, which has neither training "
                    "nor validation images; set validation_fraction above 0, or target_access=shared or all"
                )

    def choose_size(self, net: nn.Module, num_examples: Collection[int]) -> CodebookSize:
        member: Any = next(iter(net.members)) if hasattr(net, "members") else net  # type: ignore[arg-type]
        return choose_codebook_size(
            member.in_features // member.num_features,
            member.num_features,
            num_examples,
            num_codewords=self.num_codewords,
            segments=self.segments,
        )

    def adapt_network(self, net: nn.Module) -> nn.Module:
        # The number of codewords does not matter yet: it follows from the silos' sizes, and rows are added later.
        built: nn.Module = net.add_codebook(  # type: ignore[operator]
            self.choose_size(net, ()).segments,
            self.num_codewords,
            reduction=self.reduction,
            codeword_gradient=self.codeword_gradient,
            gate=self.gate,
            gate_value=self.gate_value,
        )
        return built

    def loss(self, prediction: Prediction | QuantizedFeatures) -> Tensor:
        """Return L_code = commitment_weight · ‖sg(c) − z‖² + codebook_loss_weight · ‖c − sg(z)‖² (Eq. 5)."""
        codebook_loss = multiply_loss(self.codebook_loss_weight, prediction.codebook_loss)
        return torch.add(codebook_loss, prediction.commitment_loss, alpha=self.commitment_weight)

    @property
    def code_loss_weight(self) -> float:
        """L_code divided by the mean squared distance, which is the value of both its terms."""
        return self.commitment_weight + self.codebook_loss_weight

    # --- the initial codebook -------------------------------------------------------------------------------------

    def initialize_codebook(self, method: FedAvg, clients: Clients, server: ServerState) -> ServerState:
        """Draw Gaussian codewords, or start without codewords until the warm-up is over."""
        names = [n for n in server.model_state if is_codeword_tensor(n)]
        like = torch.stack([server.model_state[n] for n in names])  # [M, v, D]
        v = self.choose_size(clients.net, clients.num_examples.values()).num_codewords
        like = like.new_empty(len(like), v, like.shape[2])
        server = server.replace(model_state={**server.model_state, **{n: server.model_state[n][:0] for n in names}})
        if not self.num_codewords:  # numbers of examples may change during a run over a network
            server = store_extension_size(server, v)
        if self.codebook_init == "kmeans" and self.warmup_rounds:
            return server
        if self.codebook_init == "kmeans":
            return self.fit_initial_codebook(method, clients, server).replace(open_record={})
        for i, silo_names in enumerate(self.group_silos(clients, server.silo_names)):
            noise = normal(derive_key(clients.seed, i, addresses.INITIAL_CODEWORDS), like.shape)
            server = add_codewords(server, silo_names, noise.to(like))
        return store_initial_size(server)

    def group_silos(self, clients: Clients, silo_names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the groups of silos that share an initial codebook: all silos, or those of one true domain."""
        if self.initial_codebook == "shared":
            return [tuple(silo_names)]
        domains = clients.domains
        return [tuple(s for s in silo_names if domains[s] == d) for d in sorted(set(domains.values()))]

    def fit_initial_codebook(self, method: FedAvg, clients: Clients, server: ServerState) -> ServerState:
        """Fit initial codewords by federated K-means: silos send centroids, the server merges them (D12)."""
        started = time.perf_counter()
        v = self.get_num_codewords(server)
        server, centroids = self.query_centroids(method, clients, server, server.silo_names, v)
        for silo_names in self.group_silos(clients, server.silo_names):
            pieces = [centroids[s] for s in silo_names if s in centroids]
            if pieces:
                merged = merge_centroids(pieces, v, clients.seed)
                server = add_codewords(server, silo_names, merged)
        seconds = time.perf_counter() - started
        return record_kmeans_time(store_initial_size(server), seconds, initial_codewords=server.access.shape[1])

    # --- the end of an iteration ----------------------------------------------------------------------------------

    def after_round(self, method: FedAvg, clients: Clients, server: ServerState) -> ServerState:
        """Fit the initial codebook after the warm-up; report and extend at the end of an iteration (D9).

        Silos are reported at every planned decision, also if none gets codewords any more. The last shared round is no
        decision, since the codewords stay from there on, but validates them once more.
        """
        ends_warmup = server.round == self.warmup_rounds and self.codebook_init == "kmeans"
        ends_iteration = server.round == method.rounds + server.iteration * method.extra_rounds
        if (ends_iteration or server.round == method.shared_rounds) and self.extend == "validated":
            server = revoke_useless_codewords(method, clients, server)
        has_decision = ends_iteration and server.round < method.shared_rounds
        if not ends_warmup and not has_decision:
            return server
        # Evaluate uncertainty for each client with the integrated model                               (Algorithm 1)
        server, evaluations = method.evaluate_clients(clients, server)
        if ends_warmup:
            return method.complete_open_record(self.fit_initial_codebook(method, clients, server), evaluations)
        # e_k > (1 + γ) min_j e_j
        validation = {n: e.received["validation"] for n, e in evaluations.items() if "validation" in e.received}
        uncertain_silos = self.find_uncertain_silos({n: compute_metrics(sums) for n, sums in validation.items()})
        server, report = report_uncertain_silos(self, method, clients, server, validation)
        # K-means initialize another v codewords and add them to codebook; v_k ← v_k + v
        receivers = self.select_receivers(clients, server, uncertain_silos)
        extended = self.extend_codebook(method, clients, server, receivers) if receivers else server
        if self.extend == "validated":
            extended = mark_unvalidated(extended, before=server)
        # Reduce the number of communication rounds; repeat until no silo is uncertain
        extended = extended.replace(iteration=server.iteration + 1, is_codebook_final=not receivers)
        return method.complete_open_record(record_decision(extended, report, before=server), evaluations)

    def select_receivers(
        self, clients: Clients, server: ServerState, uncertain_silos: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the silos that get new codewords (D31); none after a decision that gave none."""
        if self.extend == "none" or server.is_codebook_final:
            return ()
        trainable = tuple(name for name in server.silo_names if clients.num_examples[name])
        if self.extend == "all":
            return trainable
        if self.extend == "random":  # as many as by uncertainty, so that only the choice differs
            order = permutation(derive_key(clients.seed, server.round, addresses.RANDOM_RECEIVERS), len(trainable))
            return tuple(sorted(trainable[i] for i in order[: len(uncertain_silos)].tolist()))
        return uncertain_silos

    def compute_threshold(self, metrics: Mapping[str, Metrics]) -> float | None:
        """Return (1 + γ) times the reference entropy, or None if there is no finite value."""
        metrics = select_finite_entropies(metrics)
        threshold = (1 + self.gamma) * self.compute_reference(metrics)[0] if metrics else math.inf
        return threshold if math.isfinite(threshold) else None

    def compute_reference(self, metrics: Mapping[str, Metrics]) -> tuple[float, float]:
        """Return the reference entropy over silos and its squared standard error (D4)."""
        entropies = [m["entropy"] for m in metrics.values()]
        squared_errors = [compute_squared_error(m) for m in metrics.values()]
        if self.threshold_reference == "mean":
            return sum(entropies) / len(entropies), sum(squared_errors) / len(entropies) ** 2
        least = entropies.index(min(entropies))
        return entropies[least], squared_errors[least]

    def find_uncertain_silos(
        self, metrics: Mapping[str, Metrics], min_standard_errors: float | None = None
    ) -> tuple[str, ...]:
        """Return silos whose entropy e_k exceeds the threshold of Eq. 7, and by more than noise (D4, D22)."""
        min_standard_errors = self.min_standard_errors if min_standard_errors is None else min_standard_errors
        metrics, threshold = select_finite_entropies(metrics), self.compute_threshold(metrics)
        if threshold is None:
            return ()
        reference, squared_error = self.compute_reference(metrics)

        def is_uncertain(name: str) -> bool:
            entropy = metrics[name]["entropy"]
            error = math.sqrt(compute_squared_error(metrics[name]) + squared_error)
            exceeds_noise = entropy - reference > min_standard_errors * error
            return entropy > threshold and exceeds_noise

        return tuple(sorted(filter(is_uncertain, metrics)))

    def extend_codebook(
        self, method: FedAvg, clients: Clients, server: ServerState, silo_names: tuple[str, ...]
    ) -> ServerState:
        """Add codewords for these silos; all present codewords stay as they are."""
        started = time.perf_counter()
        v = self.get_num_codewords(server)
        if self.extension_growth == "double":
            access_rows = server.access[[server.silo_names.index(name) for name in silo_names]]
            v = int(access_rows.sum(1).max())
        server, centroids = self.query_centroids(method, clients, server, silo_names, v)
        server, groups = self.group_receivers(method, clients, server, centroids)
        if self.new_codeword_init == "gaussian":
            centroids = {n: self.draw_codewords(clients.seed, n, server.round, c) for n, c in centroids.items()}
        if self.retention == "newest":
            server = revoke_codewords(server, tuple(centroids))
        for group in groups:
            pieces = [centroids[name] for name in group]
            is_merged = len(group) > 1 or self.extension_scope == "group"
            codewords = merge_centroids(pieces, v, clients.seed) if is_merged else pieces[0].centroids
            server = add_codewords(server, group, codewords)
        return record_kmeans_time(server, time.perf_counter() - started)

    def get_num_codewords(self, server: ServerState) -> int:
        """Return the number v of codewords of the initial codebook and of every extension."""
        return self.num_codewords or get_extension_size(server)

    def group_receivers(
        self, method: FedAvg, clients: Clients, server: ServerState, centroids: Mapping[str, Centroids]
    ) -> tuple[ServerState, list[tuple[str, ...]]]:
        """Return the groups of silos that share new codewords (D7)."""
        if self.extension_scope == "alike":
            if self.alike_rule == "spacing":
                return server, group_by_spacing(centroids)
            return self.find_alike_silos(method, clients, server, tuple(centroids))
        if self.extension_scope == "group":
            return server, [tuple(centroids)] if centroids else []
        return server, [(name,) for name in centroids]

    def find_alike_silos(
        self, method: FedAvg, clients: Clients, server: ServerState, silo_names: tuple[str, ...]
    ) -> tuple[ServerState, list[tuple[str, ...]]]:
        """Ask silos for centroids and return groups of alike ones; a silo without a valid answer is alone."""
        if self.alike_rule == "spacing":
            v = self.get_num_codewords(server)
            server, centroids = self.query_centroids(method, clients, server, silo_names, v)
            groups = group_by_spacing(centroids)
        else:
            server, halves = self.query_halves(method, clients, server, silo_names)
            groups = group_by_halves(halves)
        grouped = {name for group in groups for name in group}
        return server, [*groups, *((name,) for name in silo_names if name not in grouped)]

    @staticmethod
    def draw_codewords(seed: int, silo_name: str, round_number: int, like: Centroids) -> Centroids:
        """Return Gaussian codewords in place of a silo's centroids."""
        noise_key = derive_key(seed, silo_name, round_number, addresses.NEW_CODEWORDS)
        return like._replace(centroids=normal(noise_key, like.centroids.shape).to(like.centroids))

    def query_halves(
        self, method: FedAvg, clients: Clients, server: ServerState, silo_names: tuple[str, ...]
    ) -> tuple[ServerState, dict[str, Halves]]:
        """Ask silos for centroids of each half of their training examples; leave out those without an answer."""
        v = self.get_num_codewords(server)
        server, first = self.query_centroids(method, clients, server, silo_names, v, half=0)
        server, second = self.query_centroids(method, clients, server, silo_names, v, half=1)
        return server, {name: Halves(first[name], second[name]) for name in first if name in second}

    def query_centroids(
        self,
        method: FedAvg,
        clients: Clients,
        server: ServerState,
        silo_names: tuple[str, ...],
        v: int,
        half: int = WHOLE,
    ) -> tuple[ServerState, dict[str, Centroids]]:
        """Ask silos for at most v centroids of their own training features; leave out invalid answers."""
        broadcast = method.make_broadcast(clients, server)
        broadcast = broadcast._replace(
            participants=tuple(name for name in silo_names if clients.num_examples[name]),
            extras={**broadcast.extras, "num_codewords": torch.tensor(v), "half": torch.tensor(half)},
        )
        like = torch.stack([t[:0] for n, t in server.model_state.items() if is_codeword_tensor(n)])  # [M, 0, D]
        replies = list(clients.query(method, "compute_centroids", broadcast, ("train",)))
        answers = {r.silo_name: r.answers.get("train", {}) for r in replies if not r.rejected}
        centroids = {n: Centroids(**answer) for n, answer in answers.items() if has_valid_centroids(answer, like, v)}
        return record_query_cost(server, replies, 0.0), centroids  # the time is recorded as K-means time

    # --- silos and their tasks ------------------------------------------------------------------------------------

    def evaluate_targets(
        self, method: FedAvg, clients: Clients, server: ServerState, evaluations: dict[str, Evaluations]
    ) -> dict[str, Evaluations]:
        return evaluate_targets(method, clients, server, evaluations, self.target_access)

    def client_tasks(self, method: FedAvg) -> Mapping[str, ClientTask]:
        batch_size = method.local.eval_batch_size
        task = ClientTask(
            partial(compute_centroids, batch_size=batch_size, min_examples=self.min_examples),
            needs_full_split=True,
            find_error=partial(find_centroid_error, num_blank_images=self.min_examples),
            num_blank_images=self.min_examples,
            parts=TaskParts(
                partial(encode_features, batch_size=batch_size),
                partial(cluster_features, min_examples=self.min_examples),
            ),
            selecting_extras=("half",),
        )
        return {"compute_centroids": task}


def select_finite_entropies(metrics: Mapping[str, Metrics]) -> dict[str, Metrics]:
    """Return the silos with an entropy e_k: a missing one is neither the minimum nor uncertain."""
    return {name: m for name, m in metrics.items() if math.isfinite(m["entropy"])}
