"""The paper's configurations, one per data set and partitioner of its tables: `--preset paper`.

Each row lists the settings of one experiment by their path. `docs/presets.md` gives for each value its place in the
paper, or "ours" where the paper is silent; a test compares that page with these rows. T numbers are the tables of the
paper in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from uefl.core.errors import InputError

Row = Mapping[str, Any]  # values of settings by path, as in {"method.local.lr": 1e-4}
T = TypeVar("T")


class RowKey(NamedTuple):
    """A data set and a partitioner; a number of silos where two tables share both."""

    dataset: str
    partitioner: str
    num_silos: str = ""

    def __str__(self) -> str:
        return f"{self.dataset}/{self.partitioner}" + (f"/{self.num_silos}" if self.num_silos else "")


COMMON: Row = {
    "model.feature_norm": "none",
    "model.dropout": 0.1,
    "model.dropout_at": "hidden",
    "model.ensemble_size": 1,
    "data.validation_fraction": 0.1,
    "method.mc_samples": 20,
    "method.local.schedule": "constant",
    "method.local.reset_optimizer": True,
    "method.aggregation_weights": "num_examples",
    "method.rounds": 40,
    "method.extra_rounds": 20,
    "method.iterations": 5,
    "method.clients_per_round": 0,
    "method.codebook.segments": 1,
    "method.codebook.codebook_init": "gaussian",
    "method.codebook.new_codeword_init": "kmeans",
    "method.codebook.min_examples": 1,
    "method.codebook.commitment_weight": 1.0,
    "method.codebook.codebook_loss_weight": 0.25,
    "method.codebook.reduction": "mean",
    "method.codebook.initial_codebook": "shared",
    "method.codebook.codeword_gradient": "code",
    "method.codebook.gate": "none",
    "method.codebook.threshold_reference": "min",
    "method.codebook.min_standard_errors": 0.0,
    "method.codebook.extension_growth": "constant",
    "method.codebook.extension_scope": "silo",
    "method.codebook.retention": "all",
    "method.codebook.target_access": "shared",
}


def set_codebook(num_codewords: int, gamma: float) -> Row:
    return {"method.codebook.num_codewords": num_codewords, "method.codebook.gamma": gamma}


def set_adam(lr: float, batch_size: int, epochs: int) -> Row:
    return set_local(optimizer="adam", lr=lr, batch_size=batch_size, epochs=epochs)


def set_sgd(
    lr: float, batch_size: int, epochs: int, *, momentum: float = 0.9, weight_decay: float = 0.0, clip: float = 0.0
) -> Row:
    return set_local(
        optimizer="sgd",
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
        momentum=momentum,
        weight_decay=weight_decay,
        max_grad_norm=clip,
    )


def set_local(**values: Any) -> Row:
    return {f"method.local.{name}": value for name, value in values.items()}


def set_encoder(encoder: str, hidden_size: int, *, weights: str = "", **values: Any) -> Row:
    settings = {"encoder": encoder, "hidden_size": hidden_size, "pretrained_weights": weights, **values}
    return {f"model.{name}": value for name, value in settings.items()}


def set_data(**values: Any) -> Row:
    return {f"data.{name}": value for name, value in values.items()}


# --- T1 and T5: nine silos in three rotated domains -------------------------------------------------------------------

NINE_SILOS = set_data(
    shifts=("rotate:0", "rotate:-50", "rotate:120"), num_silos=(3, 3, 3), train_per_silo=2000, test_per_silo=500
)
GRAY: Row = {**NINE_SILOS, **set_encoder("residual", 512, width=128, depth=3), **set_adam(1e-4, 256, 5)}
COLOR: Row = {**NINE_SILOS, **set_encoder("vgg16-bn", 512, weights="imagenet"), **set_adam(1e-4, 64, 5)}

# --- T2 and T3: one domain left out -----------------------------------------------------------------------------------

ALL_IMAGES: Row = {"train_per_silo": 0, "test_per_silo": 0}
ANGLES = (0, 15, 30, 45, 60, 75)
ROTATED_MNIST: Row = {
    **set_data(
        image_size=64,
        **ALL_IMAGES,
        num_silos=(),
        shifts=tuple(f"rotate:{angle}" for angle in ANGLES),
        target="rotate:0",
    ),
    **set_encoder("resnet18", 512, weights="imagenet", frozen_batch_norm=True),
    **set_sgd(0.01, 64, 1),
    **set_codebook(32, 0.3),
}
PAIRED_MNIST: Row = {  # the same images in every domain, turned as the originals were
    **ROTATED_MNIST,
    **set_data(shifts=tuple(f"rotate-nearest:{angle}" for angle in ANGLES), target="rotate-nearest:0"),
}
PACS: Row = {
    **set_data(image_size=224, **ALL_IMAGES, num_silos=(), shifts=(), target="sketch"),
    **set_encoder("resnet18", 512, weights="imagenet", frozen_batch_norm=True),
    "model.augment": "resized-crop:0.7+flip+jitter:0.3+gray:0.1",
    **set_sgd(0.0025, 32, 1),
    **set_codebook(64, 0.1),
}
FIFTY_SILOS: Row = {**ROTATED_MNIST, **set_data(num_silos=(50,)), "method.clients_per_round": 5}

# --- T4: a hundred clients, FedCR's set-up ----------------------------------------------------------------------------

HUNDRED_CLIENTS: Row = {
    **set_data(
        **ALL_IMAGES,
        shifts=("none",),
        num_silos=(100,),
        pool_splits=True,
        test_fraction=0.3,
        test_label_distribution="silo",
    ),
    "method.clients_per_round": 10,
    "method.rounds": 420,  # with four iterations of 20 rounds more: FedCR's 500
    **set_sgd(0.01, 48, 10, momentum=0.0, clip=10.0),
}
HUNDRED_PARTITIONERS: Mapping[str, Row] = {
    "dirichlet-fedcr": set_data(alpha=0.3),
    "pathological": set_data(classes_per_silo=5),
}
LENET_CIFAR: Row = {**set_encoder("lenet-cifar", 256), "model.augment": "crop:4+flip"}
HUNDRED_ROWS: Mapping[str, Row] = {
    "emnist-letters": {**set_data(num_classes=10), **set_encoder("mlp", 256), **set_codebook(64, 0.1)},
    "fmnist": {**set_encoder("lenet-fmnist", 256), **set_codebook(64, 0.1)},
    "cifar10": {**LENET_CIFAR, **set_codebook(64, 0.2)},
    "cifar100": {**LENET_CIFAR, **set_codebook(64, 0.1)},
}

# --- T12: label skew --------------------------------------------------------------------------------------------------

TEN_CLIENTS: Row = {
    **set_data(**ALL_IMAGES, shifts=("none",), num_silos=(10,), alpha=0.1),
    "method.rounds": 920,  # with four iterations of 20 rounds more: the 1000 of VHL and FedBR
}
LIKE_VHL: Row = {**TEN_CLIENTS, "method.clients_per_round": 5, **set_sgd(0.01, 128, 1, weight_decay=1e-4)}
LIKE_FEDBR: Row = {**TEN_CLIENTS, "method.clients_per_round": 0, **set_sgd(0.01, 32, 1)}
VHL_NETWORK = set_encoder("resnet18-cifar", 512, average_pool=True)
FMNIST_SKEW: Row = {**VHL_NETWORK, **set_codebook(64, 0.1)}
CIFAR10_SKEW: Row = {**VHL_NETWORK, "model.augment": "crop:4+flip", **set_codebook(64, 0.2)}
FEDBR_CIFAR10: Row = {**set_encoder("vgg11", 512, average_pool=True), **set_codebook(64, 0.2)}

ROWS: Mapping[RowKey, Row] = {
    RowKey("mnist", "domains"): {**GRAY, **set_codebook(32, 0.3)},
    RowKey("fmnist", "domains"): {**GRAY, **set_codebook(64, 0.1)},
    RowKey("gtsrb", "domains"): {**COLOR, **set_codebook(64, 0.1)},
    RowKey("cifar10", "domains"): {**COLOR, **set_codebook(64, 0.2)},
    RowKey("cifar100", "domains"): {**COLOR, **set_data(train_per_silo=4000), **set_codebook(64, 0.1)},
    RowKey("mnist", "leave-one-domain-out"): ROTATED_MNIST,
    RowKey("mnist", "leave-one-domain-out-paired"): PAIRED_MNIST,
    RowKey("mnist", "leave-one-domain-out", "50"): FIFTY_SILOS,
    RowKey("pacs", "leave-one-domain-out"): PACS,
    **{
        RowKey(dataset, partitioner): {**HUNDRED_CLIENTS, **labels, **row}
        for partitioner, labels in HUNDRED_PARTITIONERS.items()
        for dataset, row in HUNDRED_ROWS.items()
    },
    RowKey("fmnist", "dirichlet"): {**LIKE_VHL, **FMNIST_SKEW},
    RowKey("fmnist", "dirichlet-vhl"): {**LIKE_VHL, **FMNIST_SKEW},
    RowKey("fmnist", "dirichlet-fedbr"): {**LIKE_FEDBR, **FMNIST_SKEW},
    RowKey("cifar10", "dirichlet"): {**LIKE_VHL, **CIFAR10_SKEW},
    RowKey("cifar10", "dirichlet-vhl"): {**LIKE_VHL, **CIFAR10_SKEW},
    RowKey("cifar10", "dirichlet-fedbr"): {**LIKE_FEDBR, **FEDBR_CIFAR10},
}


# Settings of single baselines in their authors' commands, by method, data set (empty: all) and partitioners.
BASELINES: Mapping[tuple[str, str, tuple[str, ...]], Row] = {
    ("fediir", "pacs", ("leave-one-domain-out",)): {"method.penalty_weight": 1e-3},
    ("fedsr", "", tuple(HUNDRED_PARTITIONERS)): {"method.local.lr": 0.005, "method.l2r": 1e-3, "method.cmi": 1e-3},
    ("fedcr", "", tuple(HUNDRED_PARTITIONERS)): {"method.local.lr": 0.05},
    ("fedcr", "cifar100", tuple(HUNDRED_PARTITIONERS)): {
        "method.beta": 1e-4,
        "method.code_size": 512,
        "method.train_draws": 18,
        "method.eval_draws": 18,
    },
}


def find_row(dataset: str, partitioner: str, num_silos: str = "", method_name: str = "") -> Row:
    """Return the settings of the paper's row for a data set, a partitioner and, if a table has it, so many silos."""
    row = ROWS.get(RowKey(dataset, partitioner, num_silos), ROWS.get(RowKey(dataset, partitioner)))
    if row is None:
        known = ", ".join(dict.fromkeys(f"{key.dataset}/{key.partitioner}" for key in ROWS))
        raise InputError(f"the paper has no experiment on {dataset}/{partitioner} (--preset paper); it has: {known}")
    settings = {**COMMON, **row}
    for (method, only_dataset, partitioners), values in BASELINES.items():
        if method == method_name and only_dataset in ("", dataset) and partitioner in partitioners:
            settings |= values
    return settings


def replace_settings(settings: T, values: Row) -> T:
    """Return nested settings with values changed by path; a path through None, as a missing codebook, is skipped."""
    own = {path: value for path, value in values.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, dot, rest = path.partition(".")
        if dot:
            nested.setdefault(name, {})[rest] = value
    for name, inner in nested.items():
        part = getattr(settings, name)
        own[name] = replace_settings(part, inner) if is_dataclass(part) else part
    return replace(settings, **own)  # type: ignore[type-var]
