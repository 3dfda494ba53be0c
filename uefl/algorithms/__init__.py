"""Methods: what is learned. Algorithms never import engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uefl.core.registry import Entry, Registry

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg

METHODS: Registry[type[FedAvg]] = Registry(
    "method",
    {
        "uefl": Entry("uefl.algorithms.uefl:UEFL", "FedAvg with a codebook that grows: uncertain silos get codewords"),
        "fedavg": Entry("uefl.algorithms.fedavg:FedAvg", "Local training, then the average θ ← Σ n_k/n θ_k"),
        "vq-fedavg": Entry("uefl.algorithms.uefl:VQFedAvg", "FedAvg with a codebook of fixed size"),
        "fedprox": Entry("uefl.algorithms.fedprox:FedProx", "FedAvg with a proximal term μ/2 ‖θ − θ_global‖²"),
        "scaffold": Entry("uefl.algorithms.scaffold:Scaffold", "FedAvg with control variates against client drift"),
        "fedbn": Entry("uefl.algorithms.fedbn:FedBN", "FedAvg with batch norm that stays at the silo"),
        "fedper": Entry("uefl.algorithms.fedper:FedPer", "FedAvg with a classifier that stays at the silo"),
        "fine-tuning": Entry("uefl.algorithms.fine_tuning:FineTuning", "FedAvg, then local training of its model"),
        "ditto": Entry(
            "uefl.algorithms.ditto:Ditto", "FedAvg, and own weights of each silo that stay near the shared ones"
        ),
        "ifca": Entry("uefl.algorithms.ifca:IFCA", "Several models; each silo trains the one with the lowest loss"),
        "fedsr": Entry("uefl.algorithms.fedsr:FedSR", "FedAvg on a Gaussian code of bounded norm and a class prior"),
        "fediir": Entry("uefl.algorithms.fediir:FedIIR", "FedAvg with classifier gradients that agree across silos"),
        "fedcr": Entry(
            "uefl.algorithms.fedcr:FedCR", "FedAvg on a Gaussian code with personal heads and a joint prior"
        ),
        "vhl": Entry("uefl.algorithms.vhl:VHL", "FedAvg with virtual classes of noise images"),
        "fedbr": Entry("uefl.algorithms.fedbr:FedBR", "FedAvg with pseudo-images against local bias"),
        "distrans": Entry("uefl.algorithms.distrans:DisTrans", "FedAvg with an input offset per silo, double view"),
        "pmfl": Entry("uefl.algorithms.pmfl:PMFL", "Half of every tensor is meta-learned, half stays at the silo"),
        "fccl": Entry("uefl.algorithms.fccl:FCCL", "Silos align their logits on public images; no weight is sent"),
        "local-only": Entry("uefl.algorithms.references:LocalOnly", "Each silo trains alone; the lower reference"),
        "centralized": Entry("uefl.algorithms.references:Centralized", "All data in one place; the upper reference"),
    },
    group="uefl.methods",
)
