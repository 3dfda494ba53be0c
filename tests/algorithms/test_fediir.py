"""FedIIR: a penalty on the distance between the classifier gradients of silos."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    BATCH_NORM_MODEL,
    MLP_MODEL,
    bind_model,
    build_model,
    have_equal_bits,
    make_batch,
    make_method,
    make_pattern_silos,
    max_difference,
    run_method,
)

from uefl.algorithms.fediir import CLASSIFIER_PREFIX, GRADIENT_PREFIX, classifier_gradient_and_loss
from uefl.core.federation import concatenate_examples


@pytest.mark.parametrize("model", [MLP_MODEL, BATCH_NORM_MODEL], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("clients_per_round", [0, 2])
def test_penalty_weight_zero_is_fedavg_bit_for_bit(model, clients_per_round):
    fediir = make_method("fediir", penalty_weight=0.0, clients_per_round=clients_per_round)
    fedavg = make_method("fedavg", clients_per_round=clients_per_round)
    one, other = (run_method(method, model=model) for method in (fediir, fedavg))
    assert have_equal_bits(one.server.model_state, other.server.model_state)


def test_running_mean_starts_at_a_twentieth_of_the_mean_gradient():
    method = make_method("fediir")
    method_state = run_method(method, rounds=1, model=MLP_MODEL, dtype=torch.float64).server.method_state
    net = build_model(method, MLP_MODEL).double().eval()
    x, y = concatenate_examples([silo.train for silo in make_pattern_silos()])
    loss = F.cross_entropy(net(x.double()).logits[0], y)
    head = {n: p for n, p in net.named_parameters() if n.startswith(CLASSIFIER_PREFIX)}
    for name, gradient in zip(head, torch.autograd.grad(loss, list(head.values()))):
        assert torch.allclose(method_state[GRADIENT_PREFIX + name], 0.05 * gradient, atol=1e-12)


def compute_mean_gradient(net):
    """Return the gradient of the classifier over the training examples of all silos."""
    x, y = concatenate_examples([silo.train for silo in make_pattern_silos()])
    head = {GRADIENT_PREFIX + n: p for n, p in net.named_parameters() if n.startswith(CLASSIFIER_PREFIX)}
    loss = F.cross_entropy(net(x.double()).logits[0], y)
    return dict(zip(head, torch.autograd.grad(loss, list(head.values()))))


def test_running_mean_decays_and_follows_the_gradient_of_each_rounds_model():
    method, model = make_method("fediir", decay=0.75), replace(MLP_MODEL, dropout=0.0)
    net = build_model(method, model).double().eval()
    first = {n: 0.25 * g for n, g in compute_mean_gradient(net).items()}
    after_one, after_two = (run_method(method, rounds=r, model=model, dtype=torch.float64).server for r in (1, 2))
    net.load_state_dict(after_one.model_state)
    expected = {n: 0.75 * first[n] + 0.25 * g for n, g in compute_mean_gradient(net).items()}
    assert max_difference(method.make_extras(after_one), first) < 1e-12
    assert max_difference(method.make_extras(after_two), expected) < 1e-12
    assert max_difference(first, expected) > 1e-3


def test_penalty_is_the_squared_distance_of_gradients():
    method, batch = make_method("fediir", penalty_weight=0.5), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    names = [n for n, _ in net.named_parameters() if n.startswith(CLASSIFIER_PREFIX)]
    model = bind_model(net, extras={GRADIENT_PREFIX + n: torch.full_like(net.get_parameter(n), 0.01) for n in names})
    task_loss = F.cross_entropy(net(batch.x).logits[0], batch.y)
    gradients = torch.autograd.grad(task_loss, [net.get_parameter(n) for n in names])
    expected = task_loss + 0.5 * sum((g - 0.01).square().sum() for g in gradients)
    assert torch.allclose(method.loss(model, batch), expected, atol=1e-12)


def test_penalty_has_a_gradient_for_the_encoder():
    method, batch = make_method("fediir", penalty_weight=1.0), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    weight = net.encoder.layers[1].weight

    def compute_penalty():
        gradients, _ = classifier_gradient_and_loss(bind_model(net), batch)
        return sum(g.square().sum() for g in gradients.values())

    (gradient,) = torch.autograd.grad(compute_penalty(), weight)
    with torch.no_grad():
        weight[0, 0] += 1e-5
        above = compute_penalty()
        weight[0, 0] -= 2e-5
        below = compute_penalty()
    assert float(gradient[0, 0]) == pytest.approx(float(above - below) / 2e-5, rel=1e-3, abs=1e-9)


def test_encoder_is_trained_by_the_penalty_too():
    method, batch = make_method("fediir", penalty_weight=0.5), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    head = {n: p for n, p in net.named_parameters() if n.startswith(CLASSIFIER_PREFIX)}
    model = bind_model(net, extras={GRADIENT_PREFIX + n: torch.full_like(p, 0.01) for n, p in head.items()})
    weight = net.encoder.layers[1].weight
    task_loss = F.cross_entropy(net(batch.x).logits[0], batch.y)
    gradients = torch.autograd.grad(task_loss, list(head.values()), create_graph=True)
    expected = task_loss + 0.5 * sum((g - 0.01).square().sum() for g in gradients)
    (gradient,) = torch.autograd.grad(method.loss(model, batch), weight)
    assert torch.allclose(gradient, torch.autograd.grad(expected, weight, retain_graph=True)[0], atol=1e-12)
    assert not torch.allclose(gradient, torch.autograd.grad(task_loss, weight)[0], atol=1e-4)


def test_both_messages_of_a_round_are_counted():
    fediir, fedavg = (run_method(make_method(name)).records[0] for name in ("fediir", "fedavg"))
    assert fediir["bytes_up"] > fedavg["bytes_up"]
    assert fediir["bytes_down"] > 2 * fedavg["bytes_down"]
