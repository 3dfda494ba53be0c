"""Ditto: shared weights as FedAvg's, and own weights of each silo near the received ones."""

import pytest
import torch
from harness import (
    bind_model,
    build_model,
    have_equal_bits,
    make_batch,
    make_method,
    max_difference,
    run_method,
)

from uefl.algorithms.ditto import PERSONAL_PREFIX
from uefl.core.local import LocalTraining


def get_own_weights(run, silo_name):
    state = run.clients.client_states[silo_name].items()
    return {n.removeprefix(PERSONAL_PREFIX): t for n, t in state if n.startswith(PERSONAL_PREFIX)}


@pytest.mark.parametrize("fields", [{}, {"clients_per_round": 2}, {"logit_adjustment": "local"}])
def test_shared_weights_are_those_of_fedavg_bit_for_bit(fields):
    ditto, fedavg = (run_method(make_method(name, **fields)) for name in ("ditto", "fedavg"))
    assert have_equal_bits(ditto.server.model_state, fedavg.server.model_state)
    assert [r["bytes_up"] for r in ditto.records] == [r["bytes_up"] for r in fedavg.records]
    assert [r["bytes_down"] for r in ditto.records] == [r["bytes_down"] for r in fedavg.records]


def test_without_the_proximal_term_a_silo_trains_alone_bit_for_bit():
    """Also batch-norm statistics: those of the own weights are their own."""
    ditto, alone = run_method(make_method("ditto", lam=0.0)), run_method(make_method("local-only"))
    for silo_name, state in alone.clients.client_states.items():
        assert have_equal_bits(get_own_weights(ditto, silo_name), state)
    for record, record_alone in zip(ditto.records, alone.records, strict=True):
        for silo_name, silo in record["silos"].items():
            assert silo["nll"] == record_alone["silos"][silo_name]["nll"]


def test_large_weight_keeps_own_weights_at_the_received_ones():
    """With λ = 1/lr, a step of SGD moves them to the received weights, less one gradient step from where they are."""
    change = {}
    for lam in (0.0, 100.0):
        local = LocalTraining(optimizer="sgd", lr=0.01, momentum=0.0, batch_size=12, epochs=2)
        method = make_method("ditto", lam=lam, local=local)
        run = run_method(method, rounds=2)
        received = run_method(method, rounds=1).server.model_state
        own, names = (
            get_own_weights(run, "silo 1"),
            [n for n, _ in build_model(make_method("fedavg")).named_parameters()],
        )
        change[lam] = max_difference({n: own[n] for n in names}, {n: received[n] for n in names})
    assert change[100.0] < 0.02  # one step of 0.01 times a gradient of the order of 1
    assert change[100.0] < change[0.0] / 2


def test_own_loss_has_half_lambda_times_the_squared_distance_from_the_received_weights():
    ditto, fedavg, batch = make_method("ditto", lam=0.5), make_method("fedavg"), make_batch()
    model = bind_model(build_model(ditto).double().eval())
    names = [n for n in model.params if not n.startswith(PERSONAL_PREFIX)]
    num_weights = sum(model.params[n].numel() for n in names)
    with torch.no_grad():
        for n in names:
            model.params[PERSONAL_PREFIX + n] += 0.01
            model.params[n] += 3.0  # the silo's training of w does not move the anchor
        own = model.with_params({n: model.params[PERSONAL_PREFIX + n] for n in names})
        difference = float(ditto.personal_loss(model, batch) - fedavg.loss(own, batch))
    assert difference == pytest.approx(0.25 * num_weights * 0.01**2)


def test_own_weights_are_in_no_message():
    run = run_method(make_method("ditto"))
    assert not any(n.startswith(PERSONAL_PREFIX) for n in run.clients.sent_names | run.clients.received_names)
    own = get_own_weights(run, "silo 0")
    for reply in run.clients.replies:
        shared = [n for n in own if n.endswith("weight")]
        assert not any(torch.equal(reply.tensors[n], own[n]) for n in shared)
