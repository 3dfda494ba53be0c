"""Every method trains and measures with every encoder."""

from __future__ import annotations

import pytest
import torch
from federations import OTHERS, Listening, method, network, silos

from uefl.experiment import Architecture
from uefl.federation import Batch
from uefl.models.encoders import ENCODERS

LARGE = ("vgg11", "vgg16", "vgg16-bn", "resnet18", "resnet18-cifar")
SIZED = [pytest.param(e, marks=pytest.mark.real) if e in LARGE else e for e in ENCODERS]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("encoder", SIZED)
def test_a_step_and_a_measurement(name, encoder):
    shape = (1, 32, 32) if encoder in ("lenet-fmnist", "gn-conv", "dirt") else (3, 32, 32)
    of, model = method(name), Architecture(encoder=encoder, hidden=8)
    clients = Listening(silos((3,), shape), network(of, model, shape))
    say = of.say(clients, of.start(clients))
    bound = clients._receive(of, say, "silo 0")
    part = clients.silos["silo 0"].train
    clients.net.train()
    for update in of.updates(say._replace(round=1)):
        moving = [p for n, p in bound.params.items() if update.learns(n)]
        found = torch.autograd.grad(update.loss(bound, Batch(*part)), moving, allow_unused=True)
        assert any(g is not None and g.abs().sum() > 0 for g in found)
        assert all(g.isfinite().all() for g in found if g is not None)
    clients.net.eval()
    with torch.no_grad():
        assert of.measure(bound, Batch(*part))["count"] == 3
