"""FedBN: batch norm stays at the silo."""

import torch
from harness import build_model, make_method, run_method
from torch import nn

from uefl.models.model_config import ModelConfig


def test_silos_of_different_brightness_have_different_batch_norm():
    client_states = run_method(make_method("fedbn")).clients.client_states
    layer = "encoder.blocks.0.0.norm1."
    for tensor_name in ("weight", "bias", "running_mean", "running_var"):
        dark, bright = (client_states[f"silo {i}"][layer + tensor_name] for i in (0, 2))
        assert not torch.equal(dark, bright)


def test_batch_norm_layers_are_found_by_type():
    method = make_method("fedbn")
    net = build_model(method, ModelConfig(encoder="resnet18-cifar", hidden_size=8), (3, 32, 32))
    names = method.client_state_names(net)
    assert any("downsample" in n or "shortcut" in n for n in names)
    layers = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(names) == 5 * len(layers)


def test_nothing_stays_at_the_silo_without_batch_norm():
    method = make_method("fedbn")
    net = build_model(method, ModelConfig(encoder="group-norm-conv", hidden_size=8), (1, 8, 8))
    assert not method.client_state_names(net)
