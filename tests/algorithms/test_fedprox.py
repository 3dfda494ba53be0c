import pytest
import torch
from federations import batch, distance, method, model_of, network, run, same


@pytest.mark.parametrize("codebook", [False, True])
def test_without_mu_it_is_fedavg_bit_for_bit(codebook):
    a, b = run(method("fedprox", mu=0.0, codebook=codebook)), run(method("fedavg", codebook=codebook))
    assert same(a.server.state, b.server.state)


def test_a_large_mu_keeps_weights_where_they_were():
    begin = run(method("fedavg"), rounds=1).clients.initial
    weights = [n for n, _ in network(method("fedavg")).named_parameters()]
    moved = {}
    for mu in (0.0, 100.0):
        after = run(method("fedprox", mu=mu), rounds=1).server.state
        moved[mu] = distance({n: after[n] for n in weights}, {n: begin[n] for n in weights})
    assert moved[100.0] < moved[0.0]


def test_the_pull_is_half_mu_times_the_squared_way():
    near, plain, b = method("fedprox", mu=0.5), method("fedavg"), batch()
    model = model_of(network(near).double().eval())
    weights = sum(p.numel() for p in model.params.values())
    with torch.no_grad():
        assert near.loss(model, b) == plain.loss(model, b)
        for p in model.params.values():
            p += 0.01
        assert float(near.loss(model, b) - plain.loss(model, b)) == pytest.approx(0.25 * weights * 0.01**2)
