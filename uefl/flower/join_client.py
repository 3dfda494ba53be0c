"""A silo joins a finished run over Flower: it trains its own parts at its site, and sends measurements alone."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from uefl import __version__
from uefl.core.errors import InputError
from uefl.core.federation import is_codeword_tensor
from uefl.data.input_format import describe_source
from uefl.experiment.experiment import RESULTS_VERSION
from uefl.experiment.joining import Evaluation, JoinResult, JoinSettings, join_silo
from uefl.experiment.run_folder import RESULTS_VERSION_KEY
from uefl.experiment.settings import from_dict
from uefl.experiment.silo_models import Description, SiloModels
from uefl.flower.client_state import ClientStateStore
from uefl.flower.node_data import NodeData, fit_to_federation
from uefl.flower.wire import pack_content

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from uefl.flower.client import Request

JOIN_TASK = "join"  # the task of a message
OTHER_SIZES = "middle_sizes"  # training examples of up to three other silos, for the size of the codebook
VALIDATION = "validation"


def handle_join(request: Request, node_data: NodeData) -> RecordDict:
    """Join a finished run with the silo's own data, store the silo's model here, and reply with its metrics.

    Neither codewords nor other tensors nor label counts leave the silo.
    """
    started, payload = time.perf_counter(), request.payload
    settings = from_dict(JoinSettings, payload["join"])
    if settings.others != "fixed":
        raise InputError(f"others={settings.others} needs the data of all silos in one place; over Flower, use fixed")
    silo = fit_to_federation(node_data, payload)
    sizes = [int(size) for size in payload[OTHER_SIZES]]
    result = join_silo(_make_shared_models(request), silo, settings, device=request.device, other_sizes=sizes)
    store = ClientStateStore(request.state_folder, str(payload["run_id"]), silo.name)
    store.write_model(result.models.select_silo(silo.name))
    return pack_content(
        {
            "silo": silo.name,
            "domain": silo.domain,
            "num_examples": len(silo.train.y),
            "seconds": time.perf_counter() - started,
            "num_codewords": result.num_codewords,
            "lr": result.lr,
            "head": result.trial.plan.head,
            "gate": result.trial.plan.gate,
            "own_tensors": list(result.own_names),
            "evaluations": list_measurements(result),
        }
    )


def _make_shared_models(request: Request) -> SiloModels:
    """Return the received model as that of a run whose other silos this silo does not know."""
    payload, experiment = request.payload, request.experiment.resolve_precision(request.device)
    config = experiment.to_config()
    description = Description(
        method_name=config["name"],
        method=config["method"],
        model=config["model"],
        network={},
        input_format=describe_source(experiment.data, tuple(payload["image_shape"]), str(payload.get("table", ""))),
        class_names=tuple(payload["classes"]),
        silo_names=(),
        silos={},
        seed=experiment.seed,
        round=int(payload["round"]),
        precision=experiment.precision,
        origin={"uefl": __version__, RESULTS_VERSION_KEY: RESULTS_VERSION},
    )
    num_codewords = next((len(t) for n, t in request.model_state.items() if is_codeword_tensor(n)), 0)
    access = torch.ones(0, num_codewords, dtype=torch.bool)  # every codeword that arrived is shared by all silos
    return SiloModels(description, request.model_state, access, {})


def list_measurements(result: JoinResult) -> dict[str, dict[str, float]]:
    """Return the metrics that leave the silo: of its test and validation examples, before and after."""
    evaluations: dict[str, Evaluation] = {"shared": result.shared, "untrained": result.before, "trained": result.after}
    splits: dict[str, Any] = {
        f"{name} {VALIDATION}": evaluation[VALIDATION]
        for name, evaluation in evaluations.items()
        if VALIDATION in evaluation
    }
    return {
        name: {n: v for n, v in metrics.items() if isinstance(v, float) and math.isfinite(v)}
        for name, metrics in {**evaluations, **splits}.items()
    }
