"""DisTrans: two views of every image, made with an offset that each silo learns."""

from dataclasses import replace

import pytest
import torch
from harness import MLP_MODEL, build_model, make_method, make_pattern_examples, max_difference, run_method
from torch import nn

from uefl.algorithms.distrans import OFFSET_NAME, TwoViews
from uefl.core.codebook import to_tokens


class DoubledFeatures(nn.Module):
    """An encoder that returns its features twice."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        z = to_tokens(self.encoder(x))
        return torch.cat([z, z], -1)


def test_mean_of_both_views_is_the_image():
    encoder = TwoViews(nn.Identity(), (1, 8, 8), 0.25).double()
    x = make_pattern_examples(4, 0).x.double().round()  # small integers and a quarter: no rounding errors
    with torch.no_grad():
        encoder.offset.copy_(torch.arange(64).reshape(1, 8, 8))
        one, other = encoder.make_views(x)
    assert torch.equal((one + other) / 2, x)
    assert not torch.equal(one, other)


def test_blend_zero_makes_both_views_equal():
    one, other = TwoViews(nn.Identity(), (1, 8, 8), 0.0).make_views(make_pattern_examples(4, 0).x)
    assert torch.equal(one, other)


def test_blend_zero_is_fedavg_on_doubled_features():
    distrans, fedavg = make_method("distrans", blend=0.0), make_method("fedavg")
    net = build_model(distrans, MLP_MODEL)
    encoder = DoubledFeatures(build_model(distrans, MLP_MODEL).encoder.encoder)
    doubled = build_model(fedavg, MLP_MODEL).rebuild(encoder=encoder)
    doubled.classifier.load_state_dict(net.classifier.state_dict())
    one = run_method(distrans, net=net, dtype=torch.float64).server.model_state
    other = run_method(fedavg, net=doubled, dtype=torch.float64).server.model_state
    assert max_difference(one, other) < 1e-9


def test_every_silo_starts_with_another_random_offset():
    method = make_method("distrans", offset_lr_multiplier=0.0)
    client_states = run_method(method, rounds=1).clients.client_states
    offsets = [client_state[OFFSET_NAME] for client_state in client_states.values()]
    assert all(not torch.equal(offsets[0], other) for other in offsets[1:])
    # 64 uniform pixels: the mean has a standard error of 0.125, the deviation one of 0.056; both bounds are about four.
    assert all(abs(float(o.mean())) < 0.5 and float(o.std()) == pytest.approx(1, abs=0.2) for o in offsets)
    # With learning rate 0 it does not change.
    assert torch.equal(offsets[0], run_method(method).clients.client_states["silo 0"][OFFSET_NAME])


def test_learning_rate_of_the_offset_is_a_multiple_of_the_models():
    sgd = replace(make_method("scaffold").local, momentum=0.0, epochs=1, batch_size=64)  # one step
    offsets = {}
    for multiplier in (0.0, 0.5, 1.0):
        method = make_method("distrans", offset_lr_multiplier=multiplier, local=sgd)
        clients = run_method(method, rounds=1, model=MLP_MODEL, dtype=torch.float64).clients
        offsets[multiplier] = clients.client_states["silo 0"][OFFSET_NAME]
    initial = offsets[0.0]
    assert torch.allclose(2 * (offsets[0.5] - initial), offsets[1.0] - initial, atol=1e-12)
    assert (offsets[1.0] - initial).abs().max() > 0


def test_averaged_offsets_are_part_of_the_model():
    run = run_method(make_method("distrans", offsets="average"))
    assert OFFSET_NAME in run.server.model_state
    assert not any(OFFSET_NAME in client_state for client_state in run.clients.client_states.values())
