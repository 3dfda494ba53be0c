"""FedCR: personal heads on a Gaussian code, and class priors from the product of all silos' codes."""

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
    run_method,
)
from torch.distributions import Normal, kl_divergence

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedcr import HEAD_PREFIX, PRIOR_DEVIATION, PRIOR_MEAN, multiply_gaussians
from uefl.core.federation import Examples


def test_product_of_two_unit_gaussians_and_the_standard_normal_has_precision_3():
    product = multiply_gaussians(torch.tensor([[2.0]]), torch.tensor([[1.0 + 4.0]]))
    assert float(product.deviation**-2) == pytest.approx(3)
    assert float(product.mean) == pytest.approx(5 / 3)


def test_loss_contains_the_divergence_of_the_prior_from_the_code():
    method, batch = make_method("fedcr", beta=0.1, train_draws=1), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    extras = {PRIOR_MEAN: torch.randn(3, 8).double(), PRIOR_DEVIATION: torch.rand(3, 8).double() + 0.1}
    q = net.classifier.posterior(net.extract_features(batch.x))
    prior = Normal(extras[PRIOR_MEAN][batch.y], extras[PRIOR_DEVIATION][batch.y])
    divergence = kl_divergence(prior, Normal(q.mean, q.deviation)).sum(-1).mean()
    expected = F.cross_entropy(net.classifier.head(q.mean), batch.y) + 0.1 * divergence
    assert torch.allclose(method.loss(bind_model(net, extras=extras), batch), expected, atol=1e-12)


def test_beta_zero_and_one_draw_is_fedavg_with_personal_heads():
    """FedPer: the same network, FedAvg's loss, local heads; all rounds but the last one, which trains only heads."""
    fedcr = make_method("fedcr", beta=0.0, train_draws=1, rounds=3)

    class FedPer(FedAvg):
        def client_state_names(self, net):
            return fedcr.client_state_names(net)

    fedper = FedPer(rounds=3, extra_rounds=1, iterations=2, mc_samples=3, local=fedcr.local)
    one, other = run_method(fedcr, rounds=3), run_method(fedper, net=build_model(fedcr), rounds=3)
    assert set(one.server.model_state) == set(other.server.model_state)
    for name, tensor in other.server.model_state.items():
        assert torch.allclose(one.server.model_state[name], tensor, atol=1e-6)


def test_silo_sends_the_product_of_its_codes_per_class():
    method = make_method("fedcr")
    net = build_model(method, MLP_MODEL).double().eval()
    examples = Examples(make_batch().x, torch.arange(12) % 2)  # none of class 2
    model = bind_model(net, extras={PRIOR_MEAN: torch.zeros(3, 8).double(), PRIOR_DEVIATION: torch.ones(3, 8).double()})
    with torch.no_grad():
        extras, _ = method.finish_training(model, examples, num_steps=1, lr=0.1)
        q = net.classifier.posterior(net.extract_features(examples.x))
    for c in (0, 1):
        rows = examples.y == c
        assert torch.allclose(extras["precision"][c], q.deviation[rows].pow(-2).sum(0))
        assert torch.allclose(extras["shift"][c], (q.mean[rows] / q.deviation[rows] ** 2).sum(0))
    assert extras["precision"][2].abs().sum() == 0


def test_prior_of_a_class_without_examples_stays():
    def drop_last_class(examples):
        return Examples(examples.x[examples.y < 2], examples.y[examples.y < 2])

    silos = [replace(silo, train=drop_last_class(silo.train)) for silo in make_pattern_silos()]
    method_state = run_method(make_method("fedcr"), silos).server.method_state
    assert torch.equal(method_state[PRIOR_MEAN][2], torch.zeros(8))
    assert torch.equal(method_state[PRIOR_DEVIATION][2], torch.ones(8))
    assert (method_state[PRIOR_DEVIATION][:2] < 1).all()


def test_last_round_trains_all_heads_and_leaves_the_body_unchanged():
    method = make_method("fedcr", clients_per_round=1)
    before = run_method(method, model=BATCH_NORM_MODEL, rounds=method.total_rounds - 1)
    after = run_method(method, model=BATCH_NORM_MODEL)
    assert all(torch.equal(before.server.model_state[n], t) for n, t in after.server.model_state.items())
    assert after.records[-1]["participants"] == ["silo 0", "silo 1", "silo 2"]
    head = f"{HEAD_PREFIX}1.weight"
    assert len({float(client_state[head].sum()) for client_state in after.clients.client_states.values()}) == 3


def test_gradients_are_clipped_at_norm_10():
    method, model = make_method("fedcr"), bind_model(build_model(make_method("fedcr"), MLP_MODEL))
    small, large = {"a": torch.ones(4), "b": torch.ones(5)}, {"a": torch.full((4,), 50.0), "b": torch.full((5,), 50.0)}
    assert all(torch.equal(method.adjust_gradients(model, small)[n], small[n]) for n in small)
    assert torch.cat(list(method.adjust_gradients(model, large).values())).norm() == pytest.approx(10, rel=1e-4)


def test_updated_prior_is_the_product_of_experts_and_an_unseen_class_keeps_its_prior():
    """Two silos with classes 0 and 1, and a share b of the new prior: (1 − b) old + b new."""
    method = make_method("fedcr", prior_update_rate=0.75)
    generator = torch.Generator().manual_seed(0)
    old = {PRIOR_MEAN: torch.randn(3, 8, generator=generator), PRIOR_DEVIATION: torch.rand(3, 8, generator=generator)}
    run = run_method(method, rounds=1)
    sent = []
    for _ in range(2):
        deviation, mean = 0.1 + torch.rand(3, 8, generator=generator), torch.randn(3, 8, generator=generator)
        precision = deviation.pow(-2)
        precision[2] = 0
        sent.append({"precision": precision, "shift": precision * mean})
    replies = [run.clients.replies[0]._replace(extras=extras) for extras in sent]
    new = method.update_method_state(run.server.replace(method_state=old), replies).method_state
    total = 1 + sent[0]["precision"] + sent[1]["precision"]
    mean, deviation = (sent[0]["shift"] + sent[1]["shift"]) / total, total.pow(-0.5)
    assert torch.allclose(new[PRIOR_MEAN][:2], (0.25 * old[PRIOR_MEAN] + 0.75 * mean)[:2])
    assert torch.allclose(new[PRIOR_DEVIATION][:2], (0.25 * old[PRIOR_DEVIATION] + 0.75 * deviation)[:2])
    assert all(torch.equal(new[name][2], old[name][2]) for name in old)


def test_last_round_trains_no_weight_of_the_body_at_a_silo():
    run = run_method(make_method("fedcr"), model=MLP_MODEL)
    body = {n: t for n, t in run.server.model_state.items() if not n.startswith(HEAD_PREFIX)}
    last_replies = run.clients.replies[-3:]
    assert all(have_equal_bits(reply.tensors, body) for reply in last_replies)
    first_replies = run.clients.replies[:3]
    assert not any(have_equal_bits(reply.tensors, body) for reply in first_replies)
