from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from federations import PLAIN, batch, distance, method, model_of, network, run, same
from torch import nn
from torch.distributions import Normal, kl_divergence

from uefl.algorithms.fedsr import Prior
from uefl.gaussian import Gaussian, divergence
from uefl.noise import Dropout


def test_the_divergence_is_that_of_torch_with_the_scale_folded_in():
    torch.manual_seed(0)
    q, y = Gaussian(torch.randn(6, 4).double(), torch.rand(6, 4).double() + 0.1), torch.arange(6) % 3
    prior = Prior(3, 4).double()
    for p in prior.parameters():
        nn.init.normal_(p)
    c0, sigma = prior.log_scale.exp(), F.softplus(prior.raw[y]) + 1e-6
    expected = kl_divergence(Normal(c0 * q.mean, c0 * q.deviation), Normal(prior.mean[y], sigma)).sum(-1)
    assert torch.allclose(divergence(prior.scaled(q), prior(y)), expected, atol=1e-12)


def test_the_loss_is_the_sum_of_its_three_terms():
    of, b = method("fedsr", l2r=0.3, cmi=0.2), batch()
    net = network(of, PLAIN).double().eval()  # in evaluation mode z is the mean
    seen = of.loss(model_of(net), b)
    q = net.classifier.posterior(net.features(b.x))
    task = F.cross_entropy(net.classifier.head(q.mean), b.y)
    small, close = q.mean.square().sum(1).sqrt().mean(), divergence(net.prior.scaled(q), net.prior(b.y)).mean()
    assert torch.allclose(seen, task + 0.3 * small + 0.2 * close)


def test_a_code_without_spread_gives_a_finite_loss_and_gradient():
    of = method("fedsr")
    net = network(of, PLAIN)
    with torch.no_grad():
        net.classifier.body[1].bias[16:] = -1e4
    model = model_of(net)
    loss = of.loss(model, batch(dtype=torch.float32))
    gradients = torch.autograd.grad(loss, list(model.params.values()), allow_unused=True)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize("codebook", [False, True])
def test_without_its_terms_it_is_fedavg_on_the_same_network(codebook):
    of = method("fedsr", l2r=0.0, cmi=0.0, codebook=codebook)
    a, b = run(of), run(method("fedavg", codebook=codebook), net=network(of))
    shared = {n: t for n, t in b.server.state.items() if not n.startswith("prior.")}
    assert same(a.server.state, shared)


def test_in_the_deterministic_limit_it_is_fedavg_on_an_ordinary_network():
    of = method("fedsr", l2r=0.0, cmi=0.0)
    model = replace(PLAIN, dropout=0.0)
    net, plain = network(of, model), network(method("fedavg"), model)
    body, head = net.classifier.body[1], net.classifier.head[1]
    with torch.no_grad():
        body.bias[16:] = -1e4  # σ → 0
    linear = nn.Linear(body.in_features, 16)
    linear.weight.data, linear.bias.data = body.weight[:16].clone(), body.bias[:16].clone()
    last = nn.Linear(16, 3)
    last.load_state_dict(head.state_dict())
    plain.encoder.load_state_dict(net.encoder.state_dict())
    plain.classifier[0], plain.classifier[1], plain.classifier[2] = Dropout(0.0), linear, nn.Identity()
    plain.classifier[4] = last
    sgd = method("scaffold").local
    a = run(method("fedsr", l2r=0.0, cmi=0.0, local=sgd), net=net, dtype=torch.float64).server.state
    b = run(method("fedavg", local=sgd), net=plain, dtype=torch.float64).server.state
    encoders = [{n: t for n, t in s.items() if n.startswith("encoder.")} for s in (a, b)]
    assert distance(*encoders) < 1e-6
    assert distance({"w": a["classifier.head.1.weight"]}, {"w": b["classifier.4.weight"]}) < 1e-6


def test_the_prediction_is_the_mean_over_codes():
    of = method("fedsr", draws=200)
    net = network(of, PLAIN).double().eval()
    seen = net.examine(batch().x, 2)
    assert seen.logits.shape == (200, 12, 3)
    assert seen.logits.std(0).min() > 0
    q = net.classifier.posterior(net.features(batch().x))
    mean = net.classifier.head(q.mean)
    assert (seen.logits.mean(0) - mean).abs().max() < 0.3 * seen.logits.std()


def test_priors_learn_and_differ_between_silos():
    done = run(method("fedsr", cmi=0.1))
    a, b = (done.clients.memory[f"silo {i}"]["prior.mean"] for i in (0, 1))
    assert a.abs().max() > 0
    assert not torch.equal(a, b)
