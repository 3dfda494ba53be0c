"""Deep ensembles: each member trains separately with its own codewords; all share one ledger and one decision (T9)."""

from dataclasses import replace

import pytest
import torch
from harness import (
    CODEWORDS,
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_clients,
    make_network,
    make_striped_silos,
    run_rounds,
)

from uefl.algorithms.uefl import UEFL
from uefl.core.metrics import compute_metrics
from uefl.core.noise import normal
from uefl.engines.serial import SerialEngine
from uefl.models.network import Ensemble


def select_member(model_state, m):
    """Return the tensors of one member, with the names of a single network."""
    prefix = f"members.{m}."
    return {n.removeprefix(prefix): t for n, t in model_state.items() if n.startswith(prefix)}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_each_member_trains_exactly_as_a_single_network(optimizer):
    local = replace(LOCAL, optimizer=optimizer, weight_decay=0.01)
    codebook = replace(SMALL_CODEBOOK, codebook_init="gaussian", extend="none")
    method = UEFL(**{**SHORT_RUN, "local": local}, codebook=codebook)
    ensemble = make_network(method, ensemble_size=2, dropout=0.0)
    assert isinstance(ensemble, Ensemble)
    clients = SerialEngine(make_striped_silos(), ensemble, dtype=torch.float64)
    start = method.initialize_server(clients)
    server, _ = run_rounds(method, clients, server=start)
    for m in range(2):
        single_clients = SerialEngine(make_striped_silos(), ensemble.members[m], dtype=torch.float64)
        single_start = method.initialize_server(single_clients)
        single_start = single_start.replace(model_state=select_member(start.model_state, m))
        single, _ = run_rounds(method, single_clients, server=single_start)
        for name, tensor in select_member(server.model_state, m).items():
            assert torch.allclose(tensor, single.model_state[name], rtol=0, atol=1e-9), name
    codewords = [select_member(server.model_state, m)[CODEWORDS] for m in range(2)]
    assert not torch.allclose(*codewords)


def test_members_have_one_ledger_and_their_own_codewords():
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK)
    clients = make_clients(method, ensemble_size=2, dropout=0.0)
    server, records = run_rounds(method, clients)
    codewords = [select_member(server.model_state, m)[CODEWORDS] for m in range(2)]
    assert codewords[0].shape == codewords[1].shape == (server.access.shape[1], 4)
    assert not torch.equal(*codewords)
    assert server.access.shape[1] == 24
    assert sum(silo["is_uncertain"] for silo in records[2]["silos"].values()) == 3
    replies = list(clients.fit(method, method.make_broadcast(clients, server)))
    for reply, access_row in zip(replies, server.access):
        assert {len(t) for n, t in reply.tensors.items() if n.endswith(CODEWORDS)} == {int(access_row.sum())}


def test_entropy_is_that_of_the_mean_prediction_of_the_members():
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK)
    clients = make_clients(method, ensemble_size=3, dropout=0.0)
    server, records = run_rounds(method, clients)
    clients._receive_broadcast(method, method.make_broadcast(clients, server), "ada")
    with torch.no_grad():
        p = clients.net.eval()(clients.silos["ada"].test.x).logits.softmax(-1).mean(0)
    entropy = -(p * p.log()).sum(1).mean().item()
    assert records[-1]["silos"]["ada"]["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert records[-1]["silos"]["ada"]["mutual_information"] > 0


def test_gaussian_initial_codebook_differs_between_members():
    method = UEFL(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, codebook_init="gaussian"))
    model_state = method.initialize_server(make_clients(method, ensemble_size=2)).model_state
    assert not torch.equal(select_member(model_state, 0)[CODEWORDS], select_member(model_state, 1)[CODEWORDS])
    assert normal(1, (2, 6, 4)).shape == (2, 6, 4)


def test_same_seed_gives_the_same_ensemble():
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK)
    one, again = (run_rounds(method, make_clients(method, ensemble_size=2))[0].model_state for _ in range(2))
    assert have_equal_bits(one, again)


def test_quantization_error_is_the_mean_over_the_members():
    """A larger ensemble does not have a larger L_code: the record is comparable with that of one network."""
    method = UEFL(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, codebook_init="gaussian"))
    clients = make_clients(method, ensemble_size=3, dropout=0.0)
    broadcast = method.make_broadcast(clients, method.initialize_server(clients))._replace(participants=("ada",))
    (reply,) = clients.query(method, "evaluate", broadcast, ("test",))
    errors = []
    with torch.no_grad():
        for member in clients.net.eval().members:
            segments = member.encode_segments(clients.silos["ada"].test.x)[0]
            distance = torch.cdist(segments, member.codebook.codewords).min(1).values
            errors.append(distance.square().mean() / 4)  # a segment has 4 channels
    assert compute_metrics(reply.answers["test"])["quantization_error"] == pytest.approx(float(sum(errors)) / 3)
