"""The models of all silos of a run: shared weights, codewords, who may use which, and what belongs to one silo.

It is the content of `model.safetensors`, and all that predictions need. A silo's copy holds that silo alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from uefl.algorithms import METHODS
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.own_parts import add_missing_gates
from uefl.algorithms.round_record import SHARED_MODEL
from uefl.core.checksum import compute_checksum
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import ServerState, Tensors, gather_accessible_rows
from uefl.data.input_format import InputFormat
from uefl.data.partitioners.leave_one_domain_out import HELD_OUT_SUFFIX
from uefl.engines.serial import copy_into_network
from uefl.experiment.checkpoint import NamedTensors, load_tensors, save_tensors
from uefl.experiment.run_folder import RunFolder, check_results_format
from uefl.experiment.settings import from_dict, to_dict
from uefl.experiment.trained_model import TrainedModel
from uefl.models.model_config import ModelConfig
from uefl.models.network import Net, initialize_network

if TYPE_CHECKING:
    from uefl.experiment.held_out import HeldOut

REFERENCE_METRICS = ("num_examples", "entropy", "entropy_variance", "quantization_error")  # on validation examples


@dataclass(frozen=True)
class SiloFacts:
    """What is known about one silo; in a deployment, only the silo itself knows its labels and thresholds."""

    num_examples: int = 0  # training examples
    reference: dict[str, float] = field(default_factory=dict)  # REFERENCE_METRICS, by which inputs are compared
    label_counts: tuple[int, ...] = ()  # training examples per class; empty: not known here
    temperature: float | None = None  # set by a calibration
    thresholds: dict[str, float] | None = None  # set by a calibration: of prediction sets and of abstaining
    shared_reference: dict[str, float] = field(default_factory=dict)  # with the shared model; empty: none of its own
    has_joined: bool = False  # after the run: it uses what all silos share where it has no tensor of its own


@dataclass(frozen=True)
class Description:
    """All values beside tensors that a prediction needs, as they are stored in the model file."""

    method_name: str  # in the registry; empty: a method of the user's own
    method: dict[str, Any]
    model: dict[str, Any]  # settings of the network; empty: an encoder of the user's own
    network: dict[str, Any]  # settings of the network around the user's own encoder
    input_format: InputFormat
    class_names: tuple[str, ...]
    silo_names: tuple[str, ...]  # the order of the rows of the ledger
    silos: dict[str, SiloFacts]
    seed: int = 0
    round: int = 0
    precision: str = "float32"
    owner: str = ""  # of a silo's copy
    origin: dict[str, Any] = field(default_factory=dict)  # settings, versions and data of the run, for the reader


@dataclass(frozen=True)
class SiloModels:
    """Tensors and description of the models of all silos, or of one in a silo's copy."""

    description: Description
    model_state: Tensors
    access: Tensor  # [K, V] bool, which codewords each silo may use
    personal_tensors: dict[str, Tensors]  # by silo; empty for methods without, and where they stay at the silos
    encoder: nn.Module | None = None  # of the user's own
    own_method: FedAvg | None = None  # of the user's own, if it is not in the registry
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)  # by silo, what a calibration needs; beside the model

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the model file in one step."""
        tensors = NamedTensors(self.model_state, client_states=self.personal_tensors).to_flat()
        values = asdict(self.description) | {"input_format": self.description.input_format.to_dict()}
        save_tensors(path, {RunFolder.ACCESS: self.access, **tensors}, {**values.pop("origin"), "description": values})

    @classmethod
    def read(cls, path: Path, encoder: nn.Module | None = None, method: FedAvg | None = None) -> SiloModels:
        """Read a model file; a damaged one is an `InputError`."""
        try:
            flat, metadata = load_tensors(path)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
            reason = str(e).removeprefix(f"{path} is damaged (").removesuffix(")")
            raise InputError(f"{path} is not a model file, or it is damaged ({reason})") from None
        check_results_format(metadata, path)
        if "description" not in metadata:
            raise InputError(f"{path} lacks what predictions need: an earlier version wrote it; train again")
        values = metadata.pop("description")
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        values["input_format"] = InputFormat.from_dict(values["input_format"])
        values["silos"] = {name: _read_facts(facts) for name, facts in values["silos"].items()}
        tensors = NamedTensors.from_flat(flat)
        description = Description(**values, origin=metadata)
        return cls(description, tensors.model_state, flat[RunFolder.ACCESS], tensors.client_states, encoder, method)

    def select_silo(self, silo_name: str) -> SiloModels:
        """Return a silo's copy: its codewords, its personal tensors and its facts, and nothing of other silos."""
        row, facts = self._get_access_row(silo_name), self.description.silos.get(silo_name, SiloFacts())
        origin = dict(self.description.origin)
        if "domains" in origin:
            origin["domains"] = {silo_name: origin["domains"][silo_name]}
        description = replace(
            self.description, silo_names=(silo_name,), silos={silo_name: facts}, owner=silo_name, origin=origin
        )
        return replace(
            self,
            description=description,
            model_state=gather_accessible_rows(self.model_state, row),
            access=torch.ones(1, int(row.sum()), dtype=torch.bool),
            personal_tensors={n: t for n, t in self.personal_tensors.items() if n == silo_name},
            held_out={n: own for n, own in self.held_out.items() if n == silo_name},
        )

    def without_own_models(self) -> SiloModels:
        """Return what the same run has without models of silos' own, with which silos join and none is needed."""
        return self._reduce_to(self.method.without_own_models())

    def select_shared(self) -> SiloModels:
        """Return what predictions without a silo use: the shared model, as the rounds left it."""
        return self._reduce_to(self.method.make_shared_method())

    def _reduce_to(self, method: FedAvg) -> SiloModels:
        """Return the models of a method that leaves out parts of silos' own."""
        if method == self.method:
            return self
        names = set(method.personal_tensor_names(self.template))
        silos = self.description.silos
        return replace(
            self,
            description=replace(
                self.description,
                method=self.description.method and to_dict(method),
                round=self.shared_round,
                silos={n: replace(f, reference=f.shared_reference or f.reference) for n, f in silos.items()},
            ),
            personal_tensors={
                silo: {n: t for n, t in tensors.items() if n in names or silos[silo].has_joined}
                for silo, tensors in self.personal_tensors.items()
            },
            own_method=self.own_method and method,
        )

    # --- models ---------------------------------------------------------------------------------------------------

    @property
    def method(self) -> FedAvg:
        """The method, with its settings."""
        if self.own_method is not None:
            return self.own_method
        if not self.description.method_name:
            raise InputError("this model has a method of your own; give it to `load` as method=…")
        return from_dict(METHODS[self.description.method_name], self.description.method)

    @property
    def shared_round(self) -> int:
        """The last round that trained what all silos share; later ones train models of groups."""
        return min(self.description.round, self.method.shared_rounds)

    @cached_property
    def template(self) -> nn.Module:
        """The method's network, with initial weights."""
        description = self.description
        shape, num_classes = description.input_format.shape, len(description.class_names)
        build: Callable[[], nn.Module]
        if description.model:
            config = from_dict(ModelConfig, {**description.model, "pretrained_weights": "", "frozen_batch_norm": False})
            input_format = description.input_format
            constants = {"pixel_mean": input_format.mean, "pixel_std": input_format.std} if input_format.mean else {}
            build = partial(config.build_network, shape, num_classes, **constants)
        elif self.encoder is not None:
            dtype = torch.int64 if description.input_format.is_integer else torch.float32
            encoder = copy.deepcopy(self.encoder)
            build = partial(Net, encoder, num_classes, shape, input_dtype=dtype, **description.network)
        else:
            raise InputError("this model has an encoder of your own; give it to `load` as encoder=…")
        return initialize_network(description.seed, build, self.method.adapt_network)

    @property
    def has_own_parts(self) -> bool:
        """Whether the models of silos differ: by their codewords, personal tensors or label priors."""
        has_own_tensors = bool(self.personal_names or self.personal_tensors) or self.method.uses_label_prior
        return has_own_tensors or not bool((self.access == self.access[:1]).all())

    @property
    def is_calibrated(self) -> bool:
        """Whether the model of some silo gives prediction sets."""
        return any(facts.thresholds is not None for facts in self.description.silos.values())

    @property
    def personal_names(self) -> list[str]:
        """Names of the tensors that each silo has for itself."""
        return list(self.method.personal_tensor_names(self.template))

    def build(self, silo_name: str = "", device: str = "cpu") -> TrainedModel:
        """Return the model of a silo; without a name, that of the silo's copy, or the one that all silos share."""
        silo_name = silo_name or self.description.owner
        if not silo_name and (shared := self.select_shared()) is not self:
            return shared.build("", device)
        row = self._get_access_row(silo_name) if silo_name else self._get_shared_row()
        if row.numel() and not row.any():
            raise InputError(f"no codeword is shared by all silos; choose a silo: {self._list_silos()}")
        tensors = {**gather_accessible_rows(self.model_state, row), **self._get_personal_tensors(silo_name)}
        net = copy.deepcopy(self.template)
        add_missing_gates(net, tensors.keys())
        try:
            copy_into_network(net, tensors)
            unused = set(self.method.client_state_names(net)) - set(self.personal_names)
            if missing := set(net.state_dict()) - tensors.keys() - unused:
                raise ValueError(f"{min(missing)} is not in the file")
        except (AttributeError, ValueError) as e:
            raise InputError(f"the encoder or method does not fit this model: {e}") from None
        facts = self.description.silos.get(silo_name, SiloFacts())
        label_counts = facts.label_counts
        if silo_name and self.method.uses_label_prior and not label_counts:
            raise InputError(f"the labels of silo {silo_name} stayed at the silo; use the copy that the silo wrote")
        return TrainedModel(
            self.method.select_prediction_network(net),
            self.description.input_format,
            _name_outputs(self.description.class_names, net),
            self.method,
            silo_name=silo_name,
            seed=self.description.seed,
            round=self.shared_round if facts.has_joined else self.description.round,
            precision=self.description.precision,
            device=device,
            label_counts=label_counts,
            models=self,
            temperature=facts.temperature,
            thresholds=facts.thresholds,
        )

    def check_silo(self, silo_name: str) -> None:
        """Raise an error that names the silos unless one has this name and a model."""
        if any(silo_name in (name, name.removesuffix(HELD_OUT_SUFFIX)) for name in self._list_left_out()):
            shared = "" if self.select_shared().personal_names else ", or no silo for what all silos share"
            raise InputError(
                f"silo '{silo_name}' was left out of training, so it has no model of its own; use `--silo auto` for "
                f"the silo that fits the inputs best{shared}"
            )
        if silo_name not in self.description.silo_names:
            raise unknown_value_error("silo", silo_name, self.list_trained())

    def list_trained(self) -> list[str]:
        """Return the silos that have a model: those with training data."""
        left_out = self._list_left_out()
        return [name for name in self.description.silo_names if name not in left_out]

    def _list_left_out(self) -> list[str]:
        """Return the silos without training data; with target_access=all, they have a model nevertheless (D15)."""
        codebook = self.method.codebook
        if self.description.owner or (codebook is not None and codebook.target_access == "all"):
            return []
        untrained = [name for name, facts in self.description.silos.items() if not facts.num_examples]
        return [name for name in untrained if name.endswith(HELD_OUT_SUFFIX)]  # `centralized` pools the data of others

    def _get_access_row(self, silo_name: str) -> Tensor:
        self.check_silo(silo_name)
        row = self.access[self.description.silo_names.index(silo_name)]
        codebook, facts = self.method.codebook, self.description.silos.get(silo_name, SiloFacts())
        has_all = codebook is not None and codebook.target_access == "all" and not facts.num_examples
        return torch.ones_like(row) if has_all and not self.description.owner else row  # D15

    def _get_shared_row(self) -> Tensor:
        if names := self.personal_names:
            method_name = self.description.method_name or "this method"
            raise InputError(
                f"{method_name} has no model that all silos share: every silo has its own {names[0]}; "
                f"choose a silo: {self._list_silos()}"
            )
        return self.access.all(0)

    def _get_personal_tensors(self, silo_name: str) -> Tensors:
        names = self.personal_names
        tensors = self.personal_tensors.get(silo_name, {})
        facts = self.description.silos.get(silo_name, SiloFacts())
        shared = self.model_state if facts.has_joined else {}
        if missing := [name for name in names if name not in tensors and name not in shared]:
            raise InputError(f"{missing[0]} of silo {silo_name} stayed at the silo; use the copy that the silo wrote")
        return tensors  # a silo that joined later may have more tensors of its own than the method gives

    def _list_silos(self) -> str:
        return ", ".join(self.list_trained())


def describe_method(method: FedAvg) -> tuple[str, dict[str, Any]]:
    """Return the name of a method in the registry, or an empty one, and its settings."""
    try:
        return METHODS.find_name(type(method)), to_dict(method)
    except StopIteration:
        return "", {}


def collect_facts(
    silo_names: Sequence[str],
    num_examples: Mapping[str, int],
    label_counts: Mapping[str, Sequence[int]],
    last_record: Mapping[str, Any],
) -> dict[str, SiloFacts]:
    """Return the facts of every silo after the last round."""
    entries = {name: last_record["silos"].get(name, {}) for name in silo_names}
    return {
        name: SiloFacts(
            num_examples[name],
            select_reference(entries[name]),
            tuple(label_counts.get(name, ())),
            shared_reference=select_reference(entries[name].get(SHARED_MODEL, {})),
        )
        for name in silo_names
    }


def select_reference(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of validation examples by which inputs and newcomers are compared with a silo."""
    validation = evaluation.get("validation", {})
    return {n: validation[n] for n in REFERENCE_METRICS if n in validation}


def gather_personal_tensors(method: FedAvg, clients: Any, server: ServerState) -> dict[str, Tensors]:
    """Return by silo the tensors of its own that predictions use."""
    return {
        name: tensors
        for broadcast in method.make_broadcasts(clients, server)
        for name, tensors in clients.get_personal_tensors(method, broadcast).items()
        if name in broadcast.participants
    }


def compute_model_checksum(models: SiloModels) -> int:
    """Return a number by which files beside a model recognize it."""
    personal = {f"{silo}/{name}": t for silo, tensors in models.personal_tensors.items() for name, t in tensors.items()}
    return compute_checksum("", {**models.model_state, **personal})


def count_labels(y: Tensor, num_classes: int) -> list[int]:
    """Return the number of examples per class."""
    counts: list[int] = torch.bincount(y.cpu(), minlength=num_classes).tolist()
    return counts


def _read_facts(values: Mapping[str, Any]) -> SiloFacts:
    return SiloFacts(**{**values, "label_counts": tuple(values["label_counts"])})


def _name_outputs(class_names: Sequence[str], net: nn.Module) -> tuple[str, ...]:
    """Return the names of the network's outputs: VHL also has one virtual class per class, which is no answer."""
    num_outputs = int(getattr(net, "num_classes", len(class_names)))
    return (*class_names, *(f"virtual {name}" for name in class_names[: num_outputs - len(class_names)]))
