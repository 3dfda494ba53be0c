"""The set-ups: data, network, schedule and the methods that belong there. A run is one method, one rate, one seed.

Within a set-up everything but the method is the same: network, local optimiser, rate, rounds. The rate is the one of
`rates` at which FedAvg, seed 0, has the best validation accuracy; no method is tuned. Weights of penalties are the
authors'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from uefl.algorithms import (
    UEFL,
    VHL,
    Alone,
    Book,
    DisTrans,
    FedAvg,
    FedBN,
    FedBR,
    FedCR,
    FedIIR,
    FedProx,
    FedSR,
    Pooled,
    Scaffold,
    VQFedAvg,
)
from uefl.data import Data, defaults
from uefl.experiment import Architecture, Experiment
from uefl.local import Local
from uefl.report import LEVEL

SEEDS = (0, 1, 2)
FEDAVG = "FedAvg"  # in every set-up: what the others are compared with, and what the rate is chosen by


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a table: a method, and how its settings differ from its own defaults."""

    kind: type[FedAvg]
    fields: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)  # only where the method is nothing else but this
    paper: str = ""  # the paper's figure, and its table
    slow: float = 1.0  # about how much longer than FedAvg: long runs start first


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """One table."""

    title: str
    data: Data
    model: Architecture
    local: Local
    rounds: Mapping[str, int]
    rates: tuple[float, ...]
    methods: Mapping[str, Variant]
    level: str = LEVEL  # which rounds count

    def experiment(self, method: str, rate: float, seed: int) -> Experiment:
        """One run."""
        row = self.methods[method]
        local = replace(self.local, rate=rate, **row.local)
        return Experiment(
            method=row.kind(**{**self.rounds, "local": local, **row.fields}),
            data=self.data,
            model=replace(self.model, **row.model),
            seed=seed,
        )


def held_out(target: int) -> SetUp:
    """FedIIR's network, optimiser and rates, with fewer images and rounds; FedSR's code is 64 wide, as in DIRT."""
    paper = {0: ("82.7", "84.2", "83.8"), 75: ("89.9", "90.0", "90.8")}[target]
    tried = {f"FedIIR, λ = {x:g}": Variant(kind=FedIIR, fields={"penalty": x}, slow=2.5) for x in (0.001, 0.1)}
    return SetUp(
        title=f"Rotated MNIST, {target}° held out",
        data=replace(defaults("mnist", "held-out"), train=2000, target=f"rotate:{target}"),
        model=Architecture(encoder="gn-conv", hidden=64, normalise="none"),
        local=Local(optimizer="sgd", momentum=0.9, batch=64, epochs=1, evaluation_batch=512),
        rounds={"rounds": 40, "iterations": 1},
        rates=(0.003, 0.01, 0.03),
        methods={
            FEDAVG: Variant(kind=FedAvg, paper=f"{paper[0]} (T2)"),
            "FedSR": Variant(kind=FedSR, paper=f"{paper[1]} (T2)"),
            "FedIIR": Variant(kind=FedIIR, paper=f"{paper[2]} (T2)", slow=2.5),
            **(tried if target == 75 else {}),  # where it is below FedAvg
        },
    )


MANY = SetUp(  # FedCR's cut, network, batch and participation
    title="100 clients, Fashion-MNIST, Dirichlet 0.3",
    data=defaults("fmnist", "fedcr"),
    model=Architecture(encoder="lenet-fmnist", hidden=256, normalise="none"),
    local=Local(optimizer="sgd", momentum=0.0, batch=48, epochs=2, evaluation_batch=512),
    rounds={"rounds": 60, "iterations": 1, "participation": 10},
    rates=(0.02, 0.05, 0.1),
    level="last",  # FedCR's last round is for heads alone, and only it is comparable
    methods={
        FEDAVG: Variant(kind=FedAvg, paper="88.15 (T4)"),
        "FedCR": Variant(kind=FedCR, paper="93.78 (T4)", slow=1.5),
    },
)

SKEWED = SetUp(  # VHL's cut, batch and optimiser; a small network without norms in place of its ResNet18
    title="10 clients, Fashion-MNIST, Dirichlet 0.1",
    data=replace(defaults("fmnist", "vhl"), train=2000, test=500),
    model=Architecture(encoder="lenet-cifar", width=256, hidden=128, normalise="none"),
    local=Local(optimizer="sgd", momentum=0.9, weight_decay=1e-4, batch=128, epochs=1, evaluation_batch=512),
    rounds={"rounds": 60, "iterations": 1},
    rates=(0.01, 0.03, 0.1),
    methods={
        FEDAVG: Variant(kind=FedAvg, paper="87.45 (T12)"),
        "VHL": Variant(kind=VHL, paper="91.52 (T12)", slow=1.5),
        "FedBR, means of images": Variant(kind=FedBR, slow=3),
        "FedBR, mixture": Variant(kind=FedBR, fields={"pseudo": "mixture"}, slow=3),
        "FedBR, mixture, a tenth of its weights": Variant(
            kind=FedBR, fields={"pseudo": "mixture", "mu": 0.05, "lam": 0.1, "gamma_max": 0.1}, slow=3
        ),
    },
)

BOOK = Book()
# L_code is a mean over all elements, so of 256 words each sees a 256th of a gradient. Adam does not mind; by SGD words
# would stand still while features move on. 100 lets a word follow its features within a round.
SGD_BOOK = replace(BOOK, codeword=100.0)
NINE: dict[str, Any] = {  # the paper's nine silos, a narrower network
    "data": defaults("mnist"),
    "model": Architecture(width=16, hidden=128),
    "rounds": {"rounds": 14, "extra_rounds": 8, "iterations": 3, "watch_local": False},
}

COLLAPSE: dict[str, Any] = {
    "kind": FedAvg,
    "fields": {"watch_train": True},
    "model": {"dropout": 0.0},
    "local": {"epochs": 8, "schedule": "cosine"},  # a constant rate never came to zero training error
}

ROTATED = SetUp(
    **NINE,
    title="Nine silos, MNIST, rotated by 0°, −50° and 120°",
    local=Local(optimizer="adam", batch=256, epochs=2, evaluation_batch=512),
    rates=(3e-4, 1e-3, 3e-3),
    methods={
        FEDAVG: Variant(kind=FedAvg),
        "FedAvg, no layer norm": Variant(kind=FedAvg, model={"normalise": "none"}, paper="78.0, mE 0.273 (T1)"),
        "FedProx": Variant(kind=FedProx),
        "FedBN": Variant(kind=FedBN),
        "FedSR": Variant(kind=FedSR),
        "DisTrans": Variant(kind=DisTrans, paper="81.5 (T1)"),
        "DisTrans, mean offset": Variant(kind=DisTrans, fields={"offsets": "mean"}),
        "VQ-FedAvg": Variant(kind=VQFedAvg),
        "VQ-FedAvg, a book a domain": Variant(
            kind=VQFedAvg, fields={"codebook": replace(BOOK, extend=False, books="domain")}
        ),
        "UEFL": Variant(kind=UEFL, paper="92.0, mE 0.149 (T1)"),
        "FedProx with codebook": Variant(kind=FedProx, fields={"codebook": BOOK}),
        "FedBN with codebook": Variant(kind=FedBN, fields={"codebook": BOOK}),
        "FedSR with codebook": Variant(kind=FedSR, fields={"codebook": BOOK}),
        "Deep ensemble of 5": Variant(kind=FedAvg, model={"members": 5}, slow=4),
        "Neural collapse": Variant(**COLLAPSE, paper="95.84 (T10)", slow=4),
        # As long as it takes all seeds to go past zero training error: alone in its table in that.
        "Neural collapse, 60 rounds": Variant(**COLLAPSE | {"fields": {"watch_train": True, "rounds": 44}}, slow=8),
        "Alone": Variant(kind=Alone),
        "Pooled": Variant(kind=Pooled),
    },
)

ROTATED_SGD = SetUp(  # control variates are gradients, which Adam's steps are not
    **NINE,
    title="The same nine silos, local training by SGD",
    local=Local(optimizer="sgd", momentum=0.9, batch=256, epochs=2, evaluation_batch=512),
    rates=(0.01, 0.03, 0.1),
    methods={
        FEDAVG: Variant(kind=FedAvg),
        "SCAFFOLD": Variant(kind=Scaffold),
        "UEFL": Variant(kind=UEFL, fields={"codebook": SGD_BOOK}),
        "SCAFFOLD with codebook": Variant(kind=Scaffold, fields={"codebook": SGD_BOOK}),
    },
)

SET_UPS: dict[str, SetUp] = {
    "heldout-0": held_out(0),
    "heldout-75": held_out(75),
    "many": MANY,
    "skewed": SKEWED,
    "rotated": ROTATED,
    "rotated-sgd": ROTATED_SGD,
}


def trial(experiment: Experiment) -> Experiment:
    """The same with few images, silos and rounds, to see on a CPU that it runs; its figures say nothing."""
    data, silos = experiment.data, {"domains": (1, 1, 1), "fedcr": (20,)}
    small = replace(data, train=160, silos=silos.get(data.cut, data.silos), test=40 if data.test else 0)
    rounds: dict[str, Any] = {"rounds": 4, "extra_rounds": 2, "iterations": min(experiment.method.iterations, 2)}
    return replace(experiment, data=small, method=replace(experiment.method, **rounds))
