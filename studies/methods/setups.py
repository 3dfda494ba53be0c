"""The setups: data, network, schedule and methods of each table. A run is one method, one learning rate, one seed.

Within a setup everything but the method is the same: network, local optimizer, learning rate, rounds. The learning rate
is the one of `learning_rates` at which FedAvg with seed 0 has the best validation accuracy; no method is tuned. Weights
of penalties are the authors'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.local import LocalTraining
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.experiment.experiment import Experiment, Precision
from uefl.experiment.recipes import add_public_images
from uefl.experiment.records import DEFAULT_AGGREGATION
from uefl.models.model_config import ModelConfig

SEEDS = (0, 1, 2)
LAST_ROUNDS = {"evaluate_local": False, "evaluate_every": 1000, "evaluate_last": 5}  # the tables read nothing else
FEDAVG = "FedAvg"  # a row of every setup: the baseline of the others, and the learning rate is selected with it


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a table: a method, and the settings that differ from its defaults."""

    method: str  # name in METHODS
    method_fields: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)  # only where the row is defined by it
    paper_result: str = ""  # the paper's value, and its table
    relative_cost: float = 1.0  # approximate duration relative to FedAvg on nine silos; long runs start first


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One table."""

    title: str
    data: DataConfig
    model: ModelConfig
    local: LocalTraining
    rounds: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    methods: Mapping[str, Variant]
    summary_level: str = DEFAULT_AGGREGATION  # the rounds that are reported

    def make_experiment(self, method: str, lr: float, seed: int, precision: Precision = "auto") -> Experiment:
        """Make the experiment of one row, learning rate and seed."""
        row = self.methods[method]
        local = replace(self.local, lr=lr, **row.local)
        return Experiment(
            method=METHODS[row.method](**{**self.rounds, "local": local, **row.method_fields}),
            data=self.data,
            model=replace(self.model, **row.model),
            seed=seed,
            precision=precision,
        )


def make_leave_one_out_setup(target: int) -> Setup:
    """Use FedIIR's network, optimizer and learning rates with fewer images and rounds; FedSR's code is 64 wide."""
    paper = {0: ("82.7", "84.2", "83.8"), 75: ("89.9", "90.0", "90.8")}[target]
    other_penalties = {
        f"FedIIR, λ = {x:g}": Variant(method="fediir", method_fields={"penalty_weight": x}, relative_cost=6)
        for x in (0.001, 0.1)
    }
    return Setup(
        title=f"Rotated MNIST, {target}° left out",
        data=replace(
            get_default_config("mnist", "leave-one-domain-out"), train_per_silo=2000, target=f"rotate:{target}"
        ),
        model=ModelConfig(encoder="group-norm-conv", hidden_size=64, feature_norm="none"),
        local=LocalTraining(optimizer="sgd", momentum=0.9, batch_size=64, epochs=1, eval_batch_size=512),
        rounds={"rounds": 40, "iterations": 1, **LAST_ROUNDS},
        learning_rates=(0.003, 0.01, 0.03),
        methods={
            FEDAVG: Variant(method="fedavg", paper_result=f"{paper[0]} (T2)"),
            "FedSR": Variant(method="fedsr", paper_result=f"{paper[1]} (T2)", relative_cost=3),
            "FedIIR": Variant(method="fediir", paper_result=f"{paper[2]} (T2)", relative_cost=6),
            **(other_penalties if target == 75 else {}),  # where FedIIR is below FedAvg
        },
    )


HUNDRED_CLIENTS = Setup(  # FedCR's partitioner, network, batch size and clients per round
    title="100 clients, Fashion-MNIST, Dirichlet 0.3",
    data=get_default_config("fmnist", "dirichlet-fedcr"),
    model=ModelConfig(encoder="lenet-fmnist", hidden_size=256, feature_norm="none"),
    local=LocalTraining(optimizer="sgd", momentum=0.0, batch_size=48, epochs=2, eval_batch_size=512),
    rounds={"rounds": 60, "iterations": 1, "clients_per_round": 10, **LAST_ROUNDS},
    learning_rates=(0.02, 0.05, 0.1),
    summary_level="last",  # FedCR's last round trains heads alone, and only that round is comparable
    methods={
        FEDAVG: Variant(method="fedavg", paper_result="88.15 (T4)"),
        "FedCR": Variant(method="fedcr", paper_result="93.78 (T4)", relative_cost=3),
    },
)

LABEL_SKEW = Setup(  # VHL's partitioner, batch size and optimizer; a small network without norms, not its ResNet18
    title="10 clients, Fashion-MNIST, Dirichlet 0.1",
    data=replace(get_default_config("fmnist", "dirichlet-vhl"), train_per_silo=2000, test_per_silo=500),
    model=ModelConfig(encoder="lenet-cifar", width=256, hidden_size=128, feature_norm="none"),
    local=LocalTraining(
        optimizer="sgd", momentum=0.9, weight_decay=1e-4, batch_size=128, epochs=1, eval_batch_size=512
    ),
    rounds={"rounds": 60, "iterations": 1, **LAST_ROUNDS},
    learning_rates=(0.01, 0.03, 0.1),
    methods={
        FEDAVG: Variant(method="fedavg", paper_result="87.45 (T12)"),
        "VHL": Variant(method="vhl", paper_result="91.52 (T12)", relative_cost=8),
        "FedBR, means of images": Variant(method="fedbr", relative_cost=11),
        "FedBR, mixture": Variant(method="fedbr", method_fields={"pseudo_data": "mixture"}, relative_cost=12),
        "FedBR, mixture, a tenth of its weights": Variant(
            method="fedbr",
            method_fields={"pseudo_data": "mixture", "mu": 0.05, "lam": 0.1, "gamma_max": 0.1},
            relative_cost=12,
        ),
    },
)

CODEBOOK = ExtensibleCodebook()
# L_code is a mean over all elements, so each of 256 codewords gets a 256th of the gradient. Adam rescales it; with SGD
# codewords would hardly move while features do. With a weight of 100 a codeword follows its features within a round.
SGD_CODEBOOK = replace(CODEBOOK, codebook_loss_weight=100.0)
NINE_SILOS: dict[str, Any] = {  # the paper's nine silos, a narrower network
    "data": get_default_config("mnist"),
    "model": ModelConfig(width=16, hidden_size=128),
    "rounds": {"rounds": 14, "extra_rounds": 8, "iterations": 3, **LAST_ROUNDS},
}

NEURAL_COLLAPSE: dict[str, Any] = {
    "method": "fedavg",
    "method_fields": {"evaluate_train": True, "evaluate_every": 1},  # the round with zero training error is reported
    "model": {"dropout": 0.0},
    "local": {"epochs": 8, "schedule": "cosine"},  # a constant learning rate never reached zero training error
}

ROTATED = Setup(
    **NINE_SILOS,
    title="Nine silos, MNIST, rotated by 0°, −50° and 120°",
    local=LocalTraining(optimizer="adam", batch_size=256, epochs=2, eval_batch_size=512),
    learning_rates=(3e-4, 1e-3, 3e-3),
    methods={
        FEDAVG: Variant(method="fedavg"),
        "FedAvg, no layer norm": Variant(
            method="fedavg", model={"feature_norm": "none"}, paper_result="78.0, mE 0.273 (T1)"
        ),
        "FedProx": Variant(method="fedprox"),
        "FedBN": Variant(method="fedbn"),
        "FedSR": Variant(method="fedsr"),
        "DisTrans": Variant(method="distrans", paper_result="81.5 (T1)"),
        "DisTrans, mean offset": Variant(method="distrans", method_fields={"offsets": "average"}),
        "PMFL": Variant(method="pmfl"),
        "PMFL, average of rows": Variant(method="pmfl", method_fields={"server_update": "average"}),
        "VQ-FedAvg": Variant(method="vq-fedavg"),
        "VQ-FedAvg, one codebook per domain": Variant(
            method="vq-fedavg",
            method_fields={"codebook": replace(CODEBOOK, extend="none", initial_codebook="per_domain")},
        ),
        "UEFL": Variant(method="uefl", paper_result="92.0, mE 0.149 (T1)"),
        "FedProx with codebook": Variant(method="fedprox", method_fields={"codebook": CODEBOOK}),
        "FedBN with codebook": Variant(method="fedbn", method_fields={"codebook": CODEBOOK}),
        "FedSR with codebook": Variant(method="fedsr", method_fields={"codebook": CODEBOOK}),
        "Deep ensemble of 5": Variant(method="fedavg", model={"ensemble_size": 5}, relative_cost=15),
        "Neural collapse": Variant(**NEURAL_COLLAPSE, paper_result="95.84 (T10)", relative_cost=4),
        # Enough rounds for all seeds to pass zero training error; the only row with other rounds.
        "Neural collapse, 60 rounds": Variant(
            **NEURAL_COLLAPSE | {"method_fields": {**NEURAL_COLLAPSE["method_fields"], "rounds": 44}}, relative_cost=7
        ),
        "Local-only": Variant(method="local-only"),
        "Centralized": Variant(method="centralized", relative_cost=5),
    },
)

ROTATED_SGD = Setup(  # control variates correct gradients, and a step of Adam is not a gradient
    **NINE_SILOS,
    title="The same nine silos, local training with SGD",
    local=LocalTraining(optimizer="sgd", momentum=0.9, batch_size=256, epochs=2, eval_batch_size=512),
    learning_rates=(0.01, 0.03, 0.1),
    methods={
        FEDAVG: Variant(method="fedavg"),
        "SCAFFOLD": Variant(method="scaffold"),
        "UEFL": Variant(method="uefl", method_fields={"codebook": SGD_CODEBOOK}),
        "SCAFFOLD with codebook": Variant(method="scaffold", method_fields={"codebook": SGD_CODEBOOK}),
    },
)

ROTATED_PUBLIC = replace(  # the silos' images are those of `rotated`
    ROTATED,
    title="The same nine silos, with 1000 public images",
    data=add_public_images(ROTATED.data),
    methods={
        FEDAVG: Variant(method="fedavg"),
        "Local-only": Variant(method="local-only"),
        "FCCL": Variant(method="fccl", relative_cost=2),
    },
)

ROTATED_PERSONAL = replace(
    ROTATED,
    title="The same nine silos, with models of their own",
    summary_level="last",  # fine-tuning follows the last round
    methods={
        FEDAVG: Variant(method="fedavg"),
        "FedPer": Variant(method="fedper"),
        "FedPer, last layer": Variant(method="fedper", method_fields={"personal_layers": "last"}),
        "Fine-tuning": Variant(method="fine-tuning"),
        "Ditto": Variant(method="ditto", relative_cost=3),
        "IFCA, 3 models": Variant(method="ifca", method_fields={"num_models": 3}, relative_cost=4),
        "UEFL": Variant(method="uefl"),
        "FedPer with codebook": Variant(method="fedper", method_fields={"codebook": CODEBOOK}),
        "Fine-tuning with codebook": Variant(method="fine-tuning", method_fields={"codebook": CODEBOOK}),
    },
)

SETUPS: dict[str, Setup] = {
    "leave-out-0": make_leave_one_out_setup(0),
    "leave-out-75": make_leave_one_out_setup(75),
    "hundred-clients": HUNDRED_CLIENTS,
    "label-skew": LABEL_SKEW,
    "rotated": ROTATED,
    "rotated-sgd": ROTATED_SGD,
    "rotated-public": ROTATED_PUBLIC,
    "rotated-personal": ROTATED_PERSONAL,
}


def shrink_experiment(experiment: Experiment) -> Experiment:
    """Reduce images, silos and rounds to a smoke test on a CPU; its results mean nothing."""
    data, num_silos = experiment.data, {"domains": (1, 1, 1), "dirichlet-fedcr": (20,)}
    small = replace(
        data,
        train_per_silo=160,
        num_silos=num_silos.get(data.partitioner, data.num_silos),
        test_per_silo=40 if data.test_per_silo else 0,
    )
    rounds: dict[str, Any] = {"rounds": 4, "extra_rounds": 2, "iterations": min(experiment.method.iterations, 2)}
    return replace(experiment, data=small, method=replace(experiment.method, **rounds))
