from dataclasses import replace

import pytest
import torch
from federations import PLAIN, distance, images, method, network, run
from torch import nn

from uefl.algorithms.distrans import OFFSET, TwoViews
from uefl.codebook import tokens


class Twice(nn.Module):
    """Features beside themselves."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        z = tokens(self.encoder(x))
        return torch.cat([z, z], -1)


def test_both_views_together_are_the_image():
    views = TwoViews(nn.Identity(), (1, 8, 8), 0.25).double()
    x = images(4, 0).x.double().round()  # small whole numbers and a quarter: no rounding
    with torch.no_grad():
        views.offset.copy_(torch.arange(64).reshape(1, 8, 8))
        left, right = views.views(x)
    assert torch.equal((left + right) / 2, x)
    assert not torch.equal(left, right)


def test_without_blending_both_views_are_one():
    left, right = TwoViews(nn.Identity(), (1, 8, 8), 0.0).views(images(4, 0).x)
    assert torch.equal(left, right)


def test_without_blending_it_is_fedavg_on_doubled_features():
    of = method("distrans", blend=0.0)
    net = network(of, PLAIN)
    doubled = network(method("fedavg"), PLAIN).but(encoder=Twice(network(of, PLAIN).encoder.encoder))
    doubled.classifier.load_state_dict(net.classifier.state_dict())
    a = run(of, net=net, dtype=torch.float64).server.state
    b = run(method("fedavg"), net=doubled, dtype=torch.float64).server.state
    assert distance(a, b) < 1e-9


def test_every_silo_begins_with_an_offset_of_its_own():
    of = method("distrans", offset_rate=0.0)
    kept = run(of, rounds=1).clients.memory
    offsets = [mine[OFFSET] for mine in kept.values()]
    assert all(not torch.equal(offsets[0], other) for other in offsets[1:])
    assert all(abs(float(o.mean())) < 0.5 and float(o.std()) == pytest.approx(1, abs=0.2) for o in offsets)
    assert torch.equal(offsets[0], run(of).clients.memory["silo 0"][OFFSET])  # rate 0: it does not move


def test_the_offset_has_a_rate_of_its_own():
    sgd = replace(method("scaffold").local, momentum=0.0, epochs=1, batch=64)  # one step
    start, moved = {}, {}
    for rate in (0.0, 0.5, 1.0):
        of = method("distrans", offset_rate=rate, local=sgd)
        moved[rate] = run(of, rounds=1, model=PLAIN, dtype=torch.float64).clients.memory["silo 0"][OFFSET]
        start = moved[0.0]
    assert torch.allclose(2 * (moved[0.5] - start), moved[1.0] - start, atol=1e-12)
    assert (moved[1.0] - start).abs().max() > 0


def test_mean_offsets_are_averaged_like_weights():
    done = run(method("distrans", offsets="mean"))
    assert OFFSET in done.server.state
    assert not any(OFFSET in mine for mine in done.clients.memory.values())
