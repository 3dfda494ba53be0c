"""SCAFFOLD: control variates of the server and of the silos."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    BATCH_NORM_MODEL,
    MLP_MODEL,
    build_model,
    make_method,
    make_pattern_silos,
    max_difference,
    run_method,
)
from torch.func import functional_call

from uefl.algorithms.scaffold import CONTROL_PREFIX, Scaffold, effective_steps
from uefl.core.errors import InputError
from uefl.core.local import LocalTraining

SGD = LocalTraining(optimizer="sgd", lr=0.02, momentum=0.0, batch_size=12, epochs=1)


def test_one_silo_is_fedavg_and_its_control_equals_the_servers():
    silos = make_pattern_silos()[:1]
    scaffold = run_method(make_method("scaffold", local=SGD), silos, dtype=torch.float64)
    fedavg = run_method(make_method("fedavg", local=SGD), silos, dtype=torch.float64)
    # c = c_k, so the correction is zero
    assert max_difference(scaffold.server.model_state, fedavg.server.model_state) < 1e-12
    client_state = scaffold.clients.client_states["silo 0"]
    controls = {n: c for n, c in scaffold.server.method_state.items() if n.startswith(CONTROL_PREFIX)}
    assert controls
    assert max_difference(controls, {n: client_state[n] for n in controls}) < 1e-12


@pytest.mark.parametrize("clients_per_round", [0, 1])
def test_control_of_the_server_is_the_mean_over_silos(clients_per_round):
    run = run_method(make_method("scaffold", clients_per_round=clients_per_round), dtype=torch.float64)
    for name, control in run.server.method_state.items():
        if name.startswith(CONTROL_PREFIX):
            # A silo that never trained has control 0.
            mean = sum(client_state[name] for client_state in run.clients.client_states.values()) / 3
            assert torch.allclose(control, mean, atol=1e-12)


@pytest.mark.parametrize(("momentum", "schedule"), [(0.0, "constant"), (0.9, "constant"), (0.0, "cosine")])
def test_control_of_a_silo_is_its_mean_gradient_of_the_round(momentum, schedule):
    """If the gradient is constant, c_k is exactly that gradient, with and without momentum, at every learning rate."""
    local = LocalTraining(optimizer="sgd", lr=0.1, momentum=momentum, batch_size=12, epochs=2, schedule=schedule)

    class ConstantGradient(Scaffold):
        def loss(self, model, batch):
            del batch
            return sum((3.0 * p).sum() for p in model.params.values())

    method = ConstantGradient(rounds=2, iterations=1, mc_samples=2, local=local)
    for client_state in run_method(method, model=MLP_MODEL, dtype=torch.float64).clients.client_states.values():
        for name, control in client_state.items():
            if name.startswith(CONTROL_PREFIX):
                assert torch.allclose(control, torch.full_like(control, 3.0), atol=1e-9)


def test_effective_steps_tend_to_steps_divided_by_one_minus_momentum():
    assert effective_steps(7, 0.0) == 7
    assert effective_steps(1, 0.9) == pytest.approx(1)
    assert effective_steps(10**6, 0.9) == pytest.approx(10**7, rel=1e-4)


def test_adam_is_an_error_of_one_line():
    with pytest.raises(InputError, match="needs optimizer=sgd, not adam") as error:
        Scaffold(local=LocalTraining())
    assert "\n" not in str(error.value)


def test_batch_norm_statistics_and_codewords_have_no_control():
    run = run_method(make_method("scaffold", codebook=True), model=BATCH_NORM_MODEL)
    names = [n for n in run.server.method_state if n.startswith(CONTROL_PREFIX)]
    assert names
    assert not any("running" in n or "codewords" in n for n in names)


def test_equal_silos_need_no_correction():
    silo = make_pattern_silos()[0]
    silos = [replace(silo, name=name) for name in ("a", "b")]
    local = replace(SGD, batch_size=len(silo.train.y))  # one batch with all examples
    model = replace(MLP_MODEL, dropout=0.0)
    scaffold, fedavg = (
        run_method(make_method(name, local=local), silos, model=model).server.model_state
        for name in ("scaffold", "fedavg")
    )
    assert max_difference(scaffold, fedavg) < 1e-5


def test_reply_with_invalid_extras_does_not_change_the_controls():
    method = make_method("scaffold")
    run = run_method(method, rounds=1)
    reply = run.clients.replies[0]
    name = next(iter(reply.extras))
    for extras in ({}, {name: reply.extras[name]}, {**reply.extras, name: torch.zeros(1, 2, 3)}):
        after = method.update_method_state(run.server, [reply._replace(extras=extras)])
        assert max_difference(after.method_state, run.server.method_state) == 0


def run_scaffold_by_hand(net, silos, *, rounds, steps, lr):
    """Run SCAFFOLD, option II, with full batches; return the weights and the controls of the server."""
    weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    c = {n: torch.zeros_like(p) for n, p in weights.items()}
    controls, total = [dict(c) for _ in silos], sum(len(silo.train.y) for silo in silos)
    for _ in range(rounds):
        trained, changes = [], []
        for k, silo in enumerate(silos):
            y = {n: p.clone().requires_grad_() for n, p in weights.items()}
            for _ in range(steps):
                loss = F.cross_entropy(functional_call(net, y, silo.train.x.double()).logits[0], silo.train.y)
                gradients = dict(zip(y, torch.autograd.grad(loss, list(y.values()))))
                y = {n: (y[n] - lr * (gradients[n] + c[n] - controls[k][n])).detach().requires_grad_() for n in y}
            new = {n: controls[k][n] - c[n] + (weights[n] - y[n].detach()) / (steps * lr) for n in y}
            changes.append({n: new[n] - controls[k][n] for n in y})
            controls[k] = new
            trained.append((len(silo.train.y) / total, y))
        weights = {n: sum(share * y[n].detach() for share, y in trained) for n in weights}
        c = {n: c[n] + sum(change[n] for change in changes) / len(silos) for n in c}
    return weights, c


def test_three_rounds_equal_the_algorithm_written_out():
    silos, model = make_pattern_silos(), replace(MLP_MODEL, dropout=0.0)
    local = LocalTraining(optimizer="sgd", lr=0.1, momentum=0.0, batch_size=64, epochs=2)
    method = make_method("scaffold", local=local, rounds=3, iterations=1)
    server = run_method(method, silos, model=model, dtype=torch.float64).server
    net = build_model(method, model).double().train()
    weights, controls = run_scaffold_by_hand(net, silos, rounds=3, steps=2, lr=0.1)
    assert max_difference(server.model_state, weights) < 1e-12
    assert max_difference(method.make_extras(server), {CONTROL_PREFIX + n: c for n, c in controls.items()}) < 1e-12
    fedavg = run_method(replace(make_method("fedavg", rounds=3, iterations=1), local=local), silos, model=model)
    assert max_difference(fedavg.server.model_state, weights) > 1e-3  # the correction matters here
