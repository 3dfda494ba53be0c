"""What a silo measures: the model as it arrived, in evaluation mode, and its own model after training."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import LOCAL, SHORT_RUN, make_clients, make_network

from uefl.algorithms.fedavg import FedAvg
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine

METHOD = FedAvg(**{**SHORT_RUN, "local": replace(LOCAL, epochs=3, lr=1e-2)})


def compute_nll(model_state, examples):
    """Return the sum of −log p(y) of a network in evaluation mode, without dropout."""
    net = make_network(METHOD, dropout=0.0).double().eval()
    net.load_state_dict(model_state)
    with torch.no_grad():
        return F.cross_entropy(net(examples.x).logits[0], examples.y, reduction="sum").item()


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
def test_received_and_trained_models_are_evaluated_in_evaluation_mode(engine):
    clients = make_clients(METHOD, engine=engine, dtype=torch.float64, dropout=0.0)
    server = METHOD.initialize_server(clients)
    for reply in clients.fit(METHOD, METHOD.make_broadcast(clients, server)._replace(round=1)):
        silo = clients.silos[reply.silo_name]
        for split in ("validation", "test"):
            received = reply.evaluations.received[split]
            assert float(received["nll"]) == pytest.approx(compute_nll(server.model_state, silo.examples(split)))
        trained = compute_nll(reply.tensors, silo.test)
        assert float(reply.evaluations.local["test"]["nll"]) == pytest.approx(trained)
        assert abs(trained - compute_nll(server.model_state, silo.test)) > 0.01
