"""Every method trains and evaluates with every encoder."""

from __future__ import annotations

import pytest
import torch
from harness import BASELINES, build_model, make_method, make_pattern_silos

from uefl.core.federation import Batch
from uefl.engines.serial import SerialEngine
from uefl.models import ENCODERS
from uefl.models.model_config import ModelConfig

LARGE_ENCODERS = ("vgg11", "vgg16", "vgg16-bn", "resnet18", "resnet18-cifar")
GRAY_ENCODERS = ("lenet-fmnist", "group-norm-conv", "dirt")
ENCODER_PARAMS = [pytest.param(e, marks=pytest.mark.real) if e in LARGE_ENCODERS else e for e in ENCODERS]


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("encoder", ENCODER_PARAMS)
def test_training_step_has_finite_gradients_and_evaluation_counts_examples(name, encoder):
    shape = (1, 32, 32) if encoder in GRAY_ENCODERS else (3, 32, 32)
    method, config = make_method(name), ModelConfig(encoder=encoder, hidden_size=8)
    clients = SerialEngine(make_pattern_silos((3,), shape), build_model(method, config, shape))
    broadcast = method.make_broadcast(clients, method.initialize_server(clients))
    model = clients._receive_broadcast(method, broadcast, "silo 0")
    batch = Batch(*clients.silos["silo 0"].train)
    clients.net.train()
    for update in method.make_updates(broadcast._replace(round=1)):
        params = [p for n, p in model.params.items() if update.is_trainable(n)]
        gradients = torch.autograd.grad(update.loss(model, batch), params, allow_unused=True)
        assert any(g is not None and g.abs().sum() > 0 for g in gradients)
        assert all(g.isfinite().all() for g in gradients if g is not None)
    clients.net.eval()
    with torch.no_grad():
        assert method.evaluate(model, batch)["num_examples"] == 3
