"""Client tasks are pure: the same text runs for one client, or for several stacked in one tensor."""

from __future__ import annotations

import pytest
import torch
from federations import OTHERS, PLAIN, Listening, images, method, network, silos
from torch.func import grad, vmap

from uefl.federation import Batch, Model

K = 3


@pytest.mark.parametrize("name", OTHERS)
def test_a_training_step_of_stacked_clients_is_that_of_each(name):
    of = method(name)
    clients = Listening(silos(), network(of, PLAIN), dtype=torch.float64)
    server = of.start(clients)
    say = of.say(clients, server)
    net, sent = clients.net.train(), {n: t.double() if t.is_floating_point() else t for n, t in say.sent.items()}
    first = of.first(net, 1)
    each = [{n: p.detach() + 0.01 * k for n, p in net.named_parameters()} for k in range(K)]
    data = [images(12, k) for k in range(K)]

    def gradients(update, params, x, y):
        def loss(moving):
            model = Model(net, {**params, **moving}, sent=sent, received=say.state, kept=first, bound=False)
            return update.loss(model, Batch(x, y))

        moving = {n: p for n, p in params.items() if update.learns(n)}
        found = grad(loss)(moving)
        model = Model(net, params, sent=sent, received=say.state, kept=first, bound=False)
        return of.adjust(model, found)

    x, y = torch.stack([d.x.double() for d in data]), torch.stack([d.y for d in data])
    stacked = {n: torch.stack([mine[n] for mine in each]) for n in each[0]}
    for update in of.updates(say._replace(round=1)):
        together = vmap(lambda p, a, b, u=update: gradients(u, p, a, b))(stacked, x, y)
        for k in range(K):
            alone = gradients(update, each[k], x[k], y[k])
            assert set(alone) == set(together)
            assert all(torch.allclose(together[n][k], alone[n], atol=1e-9) for n in alone)


@pytest.mark.parametrize("name", ["fediir", "fedcr"])
def test_an_answer_of_stacked_clients_is_that_of_each(name):
    of = method(name)
    clients = Listening(silos(), network(of, PLAIN), dtype=torch.float64)
    say = of.say(clients, of.start(clients))
    task = {"fediir": "head_gradient", "fedcr": "statistics"}[name]
    params, x = dict(clients.net.eval().named_parameters()), torch.stack([images(9, k).x.double() for k in range(K)])
    y = torch.arange(9) % 3

    def answer(x):
        return getattr(of, task)(Model(clients.net, params, sent=say.sent, bound=False), Batch(x, y))

    together = vmap(answer)(x)
    for k in range(K):
        assert all(torch.allclose(together[n][k], t, atol=1e-9) for n, t in answer(x[k]).items())
