"""FedProx: FedAvg plus a proximal term."""

import pytest
import torch
from harness import bind_model, build_model, have_equal_bits, make_batch, make_method, max_difference, run_method


@pytest.mark.parametrize("codebook", [False, True])
def test_mu_zero_is_fedavg_bit_for_bit(codebook):
    fedprox = run_method(make_method("fedprox", mu=0.0, codebook=codebook))
    fedavg = run_method(make_method("fedavg", codebook=codebook))
    assert have_equal_bits(fedprox.server.model_state, fedavg.server.model_state)


def test_large_mu_keeps_weights_near_the_received_ones():
    initial = run_method(make_method("fedavg"), rounds=1).clients.initial_tensors
    names = [n for n, _ in build_model(make_method("fedavg")).named_parameters()]
    change = {}
    for mu in (0.0, 100.0):
        trained = run_method(make_method("fedprox", mu=mu), rounds=1).server.model_state
        change[mu] = max_difference({n: trained[n] for n in names}, {n: initial[n] for n in names})
    assert change[100.0] < change[0.0]


def test_proximal_term_is_half_mu_times_the_squared_distance():
    fedprox, fedavg, batch = make_method("fedprox", mu=0.5), make_method("fedavg"), make_batch()
    model = bind_model(build_model(fedprox).double().eval())
    num_weights = sum(p.numel() for p in model.params.values())
    with torch.no_grad():
        assert fedprox.loss(model, batch) == fedavg.loss(model, batch)
        for p in model.params.values():
            p += 0.01
        difference = float(fedprox.loss(model, batch) - fedavg.loss(model, batch))
    assert difference == pytest.approx(0.25 * num_weights * 0.01**2)
