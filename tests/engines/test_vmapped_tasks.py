"""Losses and client tasks are pure functions: they give the same results for one client and under `vmap`."""

from __future__ import annotations

import pytest
import torch
from harness import (
    BASELINES,
    MLP_MODEL,
    RecordingEngine,
    build_model,
    make_method,
    make_pattern_examples,
    make_pattern_silos,
)
from torch.func import grad, vmap

from uefl.core.federation import Batch, ClientModel
from uefl.engines.stacked.vmap_overrides import is_differentiated

NUM_CLIENTS = 3


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_under_vmap_equal_those_of_each_client(name):
    method = make_method(name)
    clients = RecordingEngine(make_pattern_silos(), build_model(method, MLP_MODEL), dtype=torch.float64)
    server = method.initialize_server(clients)
    broadcast = method.make_broadcast(clients, server)
    net = clients.net.train()
    extras = {n: t.double() if t.is_floating_point() else t for n, t in broadcast.extras.items()}
    client_state = method.initial_client_state(net, 1)
    params = [{n: p.detach() + 0.01 * k for n, p in net.named_parameters()} for k in range(NUM_CLIENTS)]
    examples = [make_pattern_examples(12, k) for k in range(NUM_CLIENTS)]

    def make_model(params):
        received = broadcast.model_state
        return ClientModel(
            net, params, extras=extras, received_state=received, client_state=client_state, is_bound=False
        )

    def compute_gradients(update, params, x, y):
        def compute_loss(trained):
            return update.loss(make_model({**params, **trained}), Batch(x, y))

        gradients = grad(compute_loss)({n: p for n, p in params.items() if update.is_trainable(n)})
        return method.adjust_gradients(make_model(params), gradients)

    x, y = torch.stack([e.x.double() for e in examples]), torch.stack([e.y for e in examples])
    stacked_params = {n: torch.stack([p[n] for p in params]) for n in params[0]}
    for update in method.make_updates(broadcast._replace(round=1)):
        stacked = vmap(lambda p, x, y, u=update: compute_gradients(u, p, x, y))(stacked_params, x, y)
        for k in range(NUM_CLIENTS):
            single = compute_gradients(update, params[k], x[k], y[k])
            assert set(single) == set(stacked)
            assert all(torch.allclose(stacked[n][k], single[n], atol=1e-9) for n in single)


@pytest.mark.parametrize(
    ("name", "function"), [("fediir", "sum_classifier_gradients"), ("fedcr", "sum_class_statistics")]
)
def test_sums_under_vmap_equal_those_of_each_client(name, function):
    method = make_method(name)
    clients = RecordingEngine(make_pattern_silos(), build_model(method, MLP_MODEL), dtype=torch.float64)
    broadcast = method.make_broadcast(clients, method.initialize_server(clients))
    params = dict(clients.net.eval().named_parameters())
    x, y = torch.stack([make_pattern_examples(9, k).x.double() for k in range(NUM_CLIENTS)]), torch.arange(9) % 3

    def compute_sums(x):
        model = ClientModel(clients.net, params, extras=broadcast.extras, is_bound=False)
        return getattr(method, function)(model, Batch(x, y))

    stacked = vmap(compute_sums)(x)
    for k in range(NUM_CLIENTS):
        assert all(torch.allclose(stacked[n][k], t, atol=1e-9) for n, t in compute_sums(x[k]).items())


def test_kernels_know_when_a_client_differentiates_its_own_loss():
    seen = []

    def square(x):
        seen.append(is_differentiated(x, 3, None))
        return (x * x).sum()

    vmap(square)(torch.ones(2, 3))
    vmap(grad(square))(torch.ones(2, 3))
    assert seen == [False, True]
