"""Train a method from Python on your own silos and encoder; nothing is written to disk unless the result is saved."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from uefl import __version__
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_enough_silos
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.example_checks import check_silos
from uefl.core.federation import ServerState, Silo, is_integer
from uefl.data.input_format import describe_tensors
from uefl.engines import ENGINES, IN_PROCESS_ENGINES
from uefl.engines.choosing import check_device, choose_engine
from uefl.engines.serial import SerialEngine
from uefl.experiment.calibration import CalibrationSettings, calibrate_models
from uefl.experiment.experiment import RESULTS_VERSION
from uefl.experiment.files import write_text
from uefl.experiment.held_out import collect_held_out
from uefl.experiment.idle_settings import describe_idle_settings
from uefl.experiment.records import DEFAULT_AGGREGATION, Record, summarize_records
from uefl.experiment.rounds import iterate_rounds
from uefl.experiment.run_folder import RESULTS_VERSION_KEY, RunFolder
from uefl.experiment.silo_models import (
    Description,
    SiloModels,
    collect_facts,
    count_labels,
    describe_method,
    gather_personal_tensors,
)
from uefl.experiment.trained_model import TrainedModel, save_models
from uefl.models.model_config import ModelConfig
from uefl.models.network import Net, initialize_network

if TYPE_CHECKING:
    from pandas import DataFrame

    from uefl.experiment.joining import JoinResult

MakeClients = Callable[[Sequence[Silo], nn.Module], Any]


@dataclass(frozen=True)
class TrainingResult:
    """A record of every round, their summary, the final server, the clients and the models of all silos."""

    records: list[Record]
    summary: dict[str, Any]
    server: ServerState
    clients: SerialEngine
    models: SiloModels

    @property
    def accuracy(self) -> float:
        """mA, the mean accuracy over silos, averaged over the last five rounds."""
        return float(self.summary[DEFAULT_AGGREGATION]["mA"])

    @property
    def entropy(self) -> float:
        """mE, the mean predictive entropy over silos, averaged over the last five rounds."""
        return float(self.summary[DEFAULT_AGGREGATION]["mE"])

    def model(self, silo: str = "") -> TrainedModel:
        """Return the model of a silo; without a name, the one that all silos share."""
        return self.models.build(silo)

    def join(self, silo: Silo, **settings: Any) -> JoinResult:
        """Let a further silo join without changing anything that others use; the settings are those of `uefl.join`."""
        from uefl.experiment.joining import join

        return join(self.models, silo, **settings)

    def save(self, folder: str | Path, silo: str = "") -> Path:
        """Write the models of all silos, records and summary to a folder; with a silo, only that silo's copy.

        Existing files are never overwritten. `uefl.load` reads the model again and needs the encoder for it.
        """
        if silo:
            return save_models(self.models.select_silo(silo), Path(folder))
        path = save_models(self.models, Path(folder))
        files = RunFolder(Path(folder))
        write_text(files.records_path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in self.records))
        files.write_summary(self.summary)
        return path

    def calibrate(self, *, coverage: float = 0.9, risk: float = 0.05, pooling: int = 0) -> TrainingResult:
        """Return this result with models that also give prediction sets and abstain, silo by silo.

        Silos need a calibration part: `Silo.from_tensors(…, calibration_fraction=0.2)`.
        """
        settings = CalibrationSettings(coverage=coverage, risk=risk, pooling=pooling)
        return replace(self, models=calibrate_models(self.models, settings))

    def frame(self) -> DataFrame:
        """Return the metrics of every round and silo as a table of pandas: one row per round and silo."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("result.frame() needs pandas; install it with `pip install pandas`") from None
        rows = [
            {"round": record["round"], "silo": name, **{n: v for n, v in silo.items() if not isinstance(v, dict)}}
            for record in self.records
            for name, silo in record["silos"].items()
        ]
        return DataFrame(rows)


def train(
    method: FedAvg,
    silos: Sequence[Silo],
    encoder: nn.Module,
    *,
    num_classes: int,
    hidden_size: int = 512,
    dropout: float = 0.1,
    augment: str = "",
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    num_workers: int = 0,
    on_record: Callable[[Record], None] = lambda _: None,
) -> TrainingResult:
    """Train a method on silos with any encoder; `on_record` is called with the record of every round.

    `num_workers` is for `engine="processes"`; 0 takes one per core.
    """
    if engine not in ("auto", *IN_PROCESS_ENGINES):
        raise unknown_value_error("engine", engine, ("auto", *IN_PROCESS_ENGINES))
    check_device(device)

    def make_clients(silos: Sequence[Silo], net: nn.Module) -> SerialEngine:
        name = choose_engine(
            *(engine, device, net, silos, method.local, method.total_rounds),
            clients_per_round=method.clients_per_round,
            num_workers=num_workers,
        )
        settings = {"num_workers": num_workers} if name == "processes" else {}
        clients: SerialEngine = ENGINES[name](
            silos, net, seed=seed, device=device, on_warning=warnings.warn, **settings
        )
        return clients

    return train_clients(
        *(make_clients, method, silos, encoder),
        num_classes=num_classes,
        hidden_size=hidden_size,
        dropout=dropout,
        augment=augment,
        seed=seed,
        device=device,
        on_record=on_record,
    )


def train_clients(
    make_clients: MakeClients,
    method: FedAvg,
    silos: Sequence[Silo],
    encoder: nn.Module,
    *,
    num_classes: int,
    hidden_size: int,
    dropout: float,
    augment: str = "",
    seed: int,
    device: str,
    on_record: Callable[[Record], None] = lambda _: None,
) -> TrainingResult:
    """Train as `train` does, with clients that a function makes of silos and a network, such as those of a stack."""
    _check_types(method, encoder)
    ModelConfig(hidden_size=hidden_size, dropout=dropout, augment=augment)  # checks the ranges
    silos = check_silos(silos, num_classes)
    x = silos[0].train.x
    input_shape, input_dtype = tuple(x.shape[1:]), x.dtype if is_integer(x) else torch.float32
    network: dict[str, Any] = {"hidden_size": hidden_size, "dropout": dropout, "augment": augment}
    build = partial(Net, encoder, num_classes, input_shape, **network, input_dtype=input_dtype)
    try:
        net = initialize_network(seed, build, method.adapt_network)
    except RuntimeError as e:  # of the user's own encoder
        raise InputError(f"encoder cannot take examples of shape {list(input_shape)}: {str(e).splitlines()[0]}") from e
    silos = list(method.prepare_silos(require_enough_silos(silos, method.clients_per_round)))
    for message in describe_idle_settings(method, net, silos):
        warnings.warn(message, stacklevel=3)
    clients = make_clients(silos, net)
    records: list[Record] = []
    try:
        for server in iterate_rounds(method, clients):
            records += server.completed_records
            for record in server.completed_records:
                on_record(record)
    finally:
        clients.release()
    server = server.replace(completed_records=())
    summary = summarize_records(records, {silo.name: silo.domain for silo in silos})
    method_name, method_settings = describe_method(method)
    label_counts = {silo.name: count_labels(silo.own_labels, num_classes) for silo in silos}
    description = Description(
        method_name=method_name,
        method=method_settings,
        model={},
        network=network,
        input_format=describe_tensors(silos[0].train.x),
        class_names=tuple(map(str, range(num_classes))),
        silo_names=server.silo_names,
        silos=collect_facts(server.silo_names, clients.num_examples, label_counts, records[-1]),
        seed=seed,
        round=server.round,
        origin={"uefl": __version__, RESULTS_VERSION_KEY: RESULTS_VERSION},
    )
    personal_tensors = gather_personal_tensors(method, clients, server)
    models = SiloModels(description, server.model_state, server.access, personal_tensors, encoder, method)
    models = replace(models, held_out=collect_held_out(models, silos, device))
    return TrainingResult(records, summary, server, clients, models)


def _check_types(method: object, encoder: object) -> None:
    if not isinstance(method, FedAvg):
        given = method.__name__ if isinstance(method, type) else type(method).__name__
        raise InputError(f"method must be a method with its settings, such as UEFL(rounds=10), not {given}")
    if not isinstance(encoder, nn.Module):
        raise InputError(f"encoder must be a torch.nn.Module, not {type(encoder).__name__}")
