from dataclasses import replace

import pytest
import torch
from federations import NORMED, PLAIN, distance, method, run, silos

from uefl.algorithms import Scaffold
from uefl.algorithms.scaffold import CONTROL, effective
from uefl.errors import InputError
from uefl.local import Local

SGD = Local(optimizer="sgd", rate=0.02, momentum=0.0, batch=12, epochs=1)


def test_one_client_is_fedavg_and_its_control_is_the_servers():
    only = silos()[:1]
    a = run(method("scaffold", local=SGD), only, dtype=torch.float64)
    b = run(method("fedavg", local=SGD), only, dtype=torch.float64)
    assert distance(a.server.state, b.server.state) < 1e-12  # c = c_k, so the correction vanishes
    mine = a.clients.memory["silo 0"]
    controls = {n: c for n, c in a.server.memory.items() if n.startswith(CONTROL)}
    assert controls
    assert distance(controls, {n: mine[n] for n in controls}) < 1e-12


@pytest.mark.parametrize("participation", [0, 1])
def test_the_servers_control_is_the_mean_of_the_silos(participation):
    done = run(method("scaffold", participation=participation), dtype=torch.float64)
    for name, c in done.server.memory.items():
        if name.startswith(CONTROL):
            mean = sum(mine[name] for mine in done.clients.memory.values()) / 3  # who never trained has 0
            assert torch.allclose(c, mean, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_control_is_the_mean_gradient_of_the_round(momentum):
    """Down a slope that does not change, c_k is exactly that slope, with and without momentum."""
    local = Local(optimizer="sgd", rate=0.1, momentum=momentum, batch=12, epochs=2)

    class Slope(Scaffold):
        def loss(self, model, batch):
            del batch
            return sum((3.0 * p).sum() for p in model.params.values())

    of = Slope(rounds=1, iterations=1, passes=2, local=local)
    for mine in run(of, model=PLAIN, dtype=torch.float64).clients.memory.values():
        for name, c in mine.items():
            if name.startswith(CONTROL):
                assert torch.allclose(c, torch.full_like(c, 3.0), atol=1e-9)


def test_steps_with_momentum_tend_to_the_textbook_length():
    assert effective(7, 0.0) == 7
    assert effective(1, 0.9) == pytest.approx(1)
    assert effective(10**6, 0.9) == pytest.approx(10**7, rel=1e-4)


def test_adam_is_refused_in_one_line():
    with pytest.raises(InputError, match="needs optimizer=sgd, not adam"):
        Scaffold(local=Local())


def test_statistics_and_words_have_no_control():
    done = run(method("scaffold", codebook=True), model=NORMED)
    named = [n for n in done.server.memory if n.startswith(CONTROL)]
    assert named
    assert not any("running" in n or "words" in n for n in named)


def test_silos_that_are_alike_need_no_correction():
    first = silos()[0]
    twins = [type(first)(name, first.train, first.validation, first.test) for name in ("a", "b")]
    one = Local(optimizer="sgd", rate=0.02, momentum=0.0, batch=len(first.train.y), epochs=1)  # one whole batch
    model = replace(PLAIN, dropout=0.0)
    a, b = run(method("scaffold", local=one), twins, model=model), run(method("fedavg", local=one), twins, model=model)
    assert distance(a.server.state, b.server.state) < 1e-5


def test_a_silo_that_sends_something_else_beside_its_weights_is_not_heard():
    of = method("scaffold")
    done = run(of, rounds=1)
    right = done.clients.replies[0]
    name = next(iter(right.extra))
    for wrong in ({}, {name: right.extra[name]}, {**right.extra, name: torch.zeros(1, 2, 3)}):
        after = of.integrate(done.server, [right._replace(extra=wrong)])
        assert distance(after.memory, done.server.memory) == 0
