"""FedSR: a Gaussian code of bounded norm near a class prior that stays at the silo."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    MLP_MODEL,
    bind_model,
    build_model,
    have_equal_bits,
    make_batch,
    make_method,
    max_difference,
    run_method,
)
from torch import distributions, nn

from uefl.algorithms.fedsr import PRIOR_PREFIX, ClassPrior
from uefl.core.noise import Dropout, salt_noise_layers, set_noise_key
from uefl.models.gaussian import Gaussian, kl_divergence


def test_divergence_equals_that_of_torch_with_scaled_codes():
    torch.manual_seed(0)
    q, y = Gaussian(torch.randn(6, 4).double(), torch.rand(6, 4).double() + 0.1), torch.arange(6) % 3
    prior = ClassPrior(3, 4).double()
    for p in prior.parameters():
        nn.init.normal_(p)
    scale, sigma = prior.log_scale.exp(), F.softplus(prior.raw[y]) + 1e-6
    code = distributions.Normal(scale * q.mean, scale * q.deviation)
    expected = distributions.kl_divergence(code, distributions.Normal(prior.mean[y], sigma)).sum(-1)
    assert torch.allclose(kl_divergence(prior.scale_code(q), prior(y)), expected, atol=1e-12)


def test_loss_is_the_sum_of_its_three_terms():
    method, batch = make_method("fedsr", l2r=0.3, cmi=0.2), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()  # in evaluation mode z is the mean
    q = net.classifier.posterior(net.extract_features(batch.x))
    task_loss = F.cross_entropy(net.classifier.head(q.mean), batch.y)
    norm = q.mean.square().sum(1).sqrt().mean()
    divergence = kl_divergence(net.prior.scale_code(q), net.prior(batch.y)).mean()
    assert torch.allclose(method.loss(bind_model(net), batch), task_loss + 0.3 * norm + 0.2 * divergence)


def test_loss_of_a_training_step_has_the_norm_of_the_sampled_code():
    method, batch = make_method("fedsr", l2r=0.3, cmi=0.2), make_batch()
    net = build_model(method, replace(MLP_MODEL, dropout=0.0)).double().train()
    set_noise_key(salt_noise_layers(net), 7)
    q = net.classifier.posterior(net.extract_features(batch.x))
    z = net.classifier.sample(*q)  # the draw of key 7
    divergence = kl_divergence(net.prior.scale_code(q), net.prior(batch.y)).mean()
    expected = F.cross_entropy(net.classifier.head(z), batch.y) + 0.3 * z.norm(dim=1).mean() + 0.2 * divergence
    assert torch.allclose(method.loss(bind_model(net), batch), expected)
    assert abs(z.norm(dim=1).mean() - q.mean.norm(dim=1).mean()) > 0.1


def test_code_with_deviation_near_zero_has_finite_loss_and_gradients():
    method = make_method("fedsr")
    net = build_model(method, MLP_MODEL)
    with torch.no_grad():
        net.classifier.body[1].bias[16:] = -1e4
    model = bind_model(net)
    loss = method.loss(model, make_batch(dtype=torch.float32))
    gradients = torch.autograd.grad(loss, list(model.params.values()), allow_unused=True)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize("codebook", [False, True])
def test_zero_weights_are_fedavg_on_the_same_network(codebook):
    fedsr, fedavg = make_method("fedsr", l2r=0.0, cmi=0.0, codebook=codebook), make_method("fedavg", codebook=codebook)
    one, other = run_method(fedsr), run_method(fedavg, net=build_model(fedsr))
    shared = {n: t for n, t in other.server.model_state.items() if not n.startswith(PRIOR_PREFIX)}
    assert have_equal_bits(one.server.model_state, shared)


def test_deterministic_limit_is_fedavg_on_an_ordinary_network():
    sgd = make_method("scaffold").local
    fedsr, fedavg = make_method("fedsr", l2r=0.0, cmi=0.0, local=sgd), make_method("fedavg", local=sgd)
    model = replace(MLP_MODEL, dropout=0.0)
    net, ordinary = build_model(fedsr, model), build_model(fedavg, model)
    body, head = net.classifier.body[1], net.classifier.head[1]
    with torch.no_grad():
        body.bias[16:] = -1e4  # σ → 0
    hidden = nn.Linear(body.in_features, 16)
    hidden.weight.data, hidden.bias.data = body.weight[:16].clone(), body.bias[:16].clone()
    last = nn.Linear(16, 3)
    last.load_state_dict(head.state_dict())
    ordinary.encoder.load_state_dict(net.encoder.state_dict())
    ordinary.classifier[0], ordinary.classifier[1], ordinary.classifier[2] = Dropout(0.0), hidden, nn.Identity()
    ordinary.classifier[4] = last
    one = run_method(fedsr, net=net, dtype=torch.float64).server.model_state
    other = run_method(fedavg, net=ordinary, dtype=torch.float64).server.model_state
    encoders = [{n: t for n, t in state.items() if n.startswith("encoder.")} for state in (one, other)]
    assert max_difference(*encoders) < 1e-6
    assert max_difference({"w": one["classifier.head.1.weight"]}, {"w": other["classifier.4.weight"]}) < 1e-6


def test_prediction_is_the_mean_over_codes():
    net = build_model(make_method("fedsr", eval_draws=200), MLP_MODEL).double().eval()
    logits = net.predict_with_samples(make_batch().x, 2).logits
    assert logits.shape == (200, 12, 3)
    assert logits.std(0).min() > 0
    q = net.classifier.posterior(net.extract_features(make_batch().x))
    # The mean of 200 draws has a standard error of 0.07 deviations: 0.3 are four of them.
    assert (logits.mean(0) - net.classifier.head(q.mean)).abs().max() < 0.3 * logits.std()


def test_priors_are_trained_and_differ_between_silos():
    client_states = run_method(make_method("fedsr", cmi=0.1)).clients.client_states
    one, other = (client_states[f"silo {i}"]["prior.mean"] for i in (0, 1))
    assert one.abs().max() > 0
    assert not torch.equal(one, other)
