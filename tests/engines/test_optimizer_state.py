"""Optimizer state that stays at a silo: it belongs to the codewords of the silo, and ends when they change."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import CODEWORDS, LOCAL, SHORT_RUN, SMALL_CODEBOOK, make_clients, make_striped_silos, max_difference

from uefl.algorithms.uefl import VQFedAvg
from uefl.core.federation import Broadcast
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine

ENGINES = pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
ONE_STEP = replace(LOCAL, optimizer="sgd", lr=0.1, momentum=0.9, batch_size=64, reset_optimizer=False)
METHOD = VQFedAvg(**{**SHORT_RUN, "local": ONE_STEP}, codebook=replace(SMALL_CODEBOOK, extend="none"))


def fit_twice(engine, first_row, second_row):
    """Train one step of one silo with some of eight codewords, then another with others; return both replies.

    Both steps start from the same model, so that the second differs from the first only by the optimizer's state.
    """
    clients = make_clients(METHOD, make_striped_silos()[:1], engine=engine, dtype=torch.float64, dropout=0.0)
    codewords = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    model_state, replies = {**clients.initial_model_state(), CODEWORDS: codewords}, []
    for round_number, row in enumerate((first_row, second_row), 1):
        access = torch.tensor([row], dtype=torch.bool)
        broadcast = Broadcast(round_number, model_state, ("ada",), access, participants=("ada",), lr=0.1)
        (reply,) = clients.fit(METHOD, broadcast)
        replies.append(reply.tensors)
    return clients, model_state, replies


def compute_gradients(clients, model_state, row):
    """Return the gradients of one full batch by the formula of the loss."""
    net = clients.net.train()
    net.codebook.codewords = torch.nn.Parameter(model_state[CODEWORDS][torch.tensor(row, dtype=torch.bool)].clone())
    net.load_state_dict({n: t for n, t in model_state.items() if n != CODEWORDS}, strict=False)
    x, y = clients.silos["ada"].train
    z = F.layer_norm(net.encoder(x).flatten(2).transpose(1, 2), (8,))
    c = net.codebook.codewords[torch.cdist(z.reshape(-1, 4), net.codebook.codewords).argmin(1)].reshape(z.shape)
    loss = F.cross_entropy(net.classifier((z + (c - z).detach()).flatten(1)), y)
    loss = loss + 0.25 * (c.detach() - z).square().mean() + (c - z.detach()).square().mean()
    params = dict(net.named_parameters())
    return dict(zip(params, torch.autograd.grad(loss, list(params.values()))))


@ENGINES
def test_codewords_that_replace_others_start_without_velocity(engine):
    """As many codewords as before, but other ones: the velocity of the old ones must not move the new ones."""
    row, other_row = [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 1, 1]
    clients, model_state, (_, trained) = fit_twice(engine, row, other_row)
    gradients = [compute_gradients(clients, model_state, r) for r in (row, other_row)]
    received = model_state[CODEWORDS][torch.tensor(other_row, dtype=torch.bool)]
    assert torch.allclose(trained[CODEWORDS], received - 0.1 * gradients[1][CODEWORDS], atol=1e-12)
    weight = "classifier.1.weight"  # all other weights keep their velocity
    velocity = 0.9 * gradients[0][weight] + gradients[1][weight]
    assert torch.allclose(trained[weight], model_state[weight] - 0.1 * velocity, atol=1e-12)
    assert gradients[0][CODEWORDS].abs().max() > 1e-3


@ENGINES
def test_codewords_that_stay_keep_their_velocity(engine):
    row = [1, 1, 1, 1, 1, 1, 0, 0]
    clients, model_state, (first, second) = fit_twice(engine, row, row)
    gradient = compute_gradients(clients, model_state, row)[CODEWORDS]
    received = model_state[CODEWORDS][torch.tensor(row, dtype=torch.bool)]
    assert torch.allclose(first[CODEWORDS], received - 0.1 * gradient, atol=1e-12)
    assert torch.allclose(second[CODEWORDS], received - 0.1 * 1.9 * gradient, atol=1e-12)
    assert max_difference(first, second) > 1e-4
