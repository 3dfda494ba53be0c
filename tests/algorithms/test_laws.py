"""Laws of determinism and of data use that every registered method obeys, checked by whole runs on striped silos."""

import math
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
    make_encoder,
    make_network,
    make_short_method,
    make_striped_silos,
    run_rounds,
)
from torch import nn

from uefl.algorithms import METHODS
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import Examples
from uefl.engines.serial import SerialEngine


def make_law_method(name):
    """Return a method with a short run; its codebook, if it has one, is small."""
    method = make_short_method(METHODS[name])
    return replace(method, codebook=method.codebook and replace(SMALL_CODEBOOK, extend=method.codebook.extend))


def collect_tensors(server, clients):
    """Return the tensors of the server and of all client states."""
    client_states = clients.client_states.items()
    return server.model_state | {f"{silo}: {n}": t for silo, state in client_states for n, t in state.items()}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_and_records_every_round_once(name):
    method = replace(make_law_method(name), rounds=6)
    method = replace(method, local=method.adapt_local_training(replace(LOCAL, epochs=3, lr=1e-2)))
    _, records = run_rounds(method, make_clients(method))
    assert [record["round"] for record in records] == list(range(1, method.total_rounds + 1))
    accuracies = [silo["accuracy"] for silo in records[-1]["silos"].values() if "accuracy" in silo]
    assert len(accuracies) == 4
    assert sum(accuracies) / 4 > 0.5  # chance is a third; 56 test images give a standard error of 0.06


@pytest.mark.parametrize("name", METHODS)
def test_same_seed_gives_the_same_bits_and_another_seed_gives_other_bits(name):
    method, runs = make_law_method(name), []
    for seed in (3, 3, 4):
        clients = make_clients(method, seed=seed)
        server, records = run_rounds(method, clients)
        entropies = [record["silos"]["ada"]["entropy"] for record in records]
        runs.append((collect_tensors(server, clients), server.access, entropies))
    (tensors, access, entropies), (same_tensors, same_access, same_entropies), (other_tensors, _, _) = runs
    assert have_equal_bits(tensors, same_tensors)
    assert torch.equal(access, same_access)
    assert entropies == same_entropies
    assert not any(torch.equal(tensors[n], other_tensors[n]) for n in tensors if n.endswith("weight"))


def test_global_random_generator_has_no_effect():
    method, states = make_law_method("uefl"), []
    for seed in (1, 2):
        clients = make_clients(method)
        torch.manual_seed(seed)
        states.append(run_rounds(method, clients)[0].model_state)
    assert have_equal_bits(*states)


def test_order_of_batches_depends_on_the_seed_of_the_engine():
    method = FedAvg(**SHORT_RUN)
    net = make_network(method, dropout=0.0)
    one, other = (
        run_rounds(method, SerialEngine(make_striped_silos(), net, seed=seed), 1)[0].model_state["classifier.1.weight"]
        for seed in (0, 1)
    )
    assert not torch.allclose(one, other, atol=1e-4)


def test_dropout_draws_differ_between_seeds_silos_rounds_and_steps():
    method, noise_keys = FedAvg(**SHORT_RUN), []

    def record_key(layer, _inputs, output):
        if layer.training and output.dim() == 2:
            noise_keys.append(layer.key.item())

    for seed in (0, 1):
        clients = SerialEngine(make_striped_silos(), make_network(method), seed=seed)
        clients.net.classifier[0].register_forward_hook(record_key)
        run_rounds(method, clients, 2)
    sizes = [len(silo.train.y) for silo in make_striped_silos()]
    assert len(noise_keys) == 2 * 2 * sum(math.ceil(n / 8) - (n % 8 == 1) for n in sizes)
    assert len(set(noise_keys)) == len(noise_keys)


def test_noise_keys_of_a_silo_are_announced_in_the_order_of_its_steps():
    """Then dropout draws small masks of several steps at once."""
    method, used, announced = FedAvg(**SHORT_RUN), [], []

    def record_keys(layer, _inputs, _output):
        used.append(layer.key.item())
        if layer.step_keys not in announced:
            announced.append(layer.step_keys)

    clients = SerialEngine(make_striped_silos(), make_network(method))
    clients.net.classifier[0].register_forward_hook(record_keys)
    broadcast = method.make_broadcast(clients, method.initialize_server(clients))
    list(clients.fit(method, broadcast, evaluate=False))
    assert len(announced) == len(broadcast.participants)
    assert used == [key for keys in announced for key in keys]


@pytest.mark.parametrize("name", METHODS)
def test_result_does_not_depend_on_the_order_in_which_silos_are_given(name):
    method = make_law_method(name)
    (one, records), (other, other_records) = (
        run_rounds(method, make_clients(method, silos)) for silos in (make_striped_silos(), make_striped_silos()[::-1])
    )
    assert have_equal_bits(one.model_state, other.model_state)
    assert torch.equal(one.access, other.access)
    for record, other_record in zip(records, other_records, strict=True):
        entropies, other_entropies = (
            {silo_name: silo.get("entropy") for silo_name, silo in r["silos"].items()} for r in (record, other_record)
        )
        assert entropies == other_entropies


CHANGES = {
    "labels": lambda test: Examples(test.x, test.y.roll(1)),
    "images": lambda test: Examples(test.x.flip(0) * -3, test.y),
    "all": lambda test: Examples(test.x[:4] * 2, test.y[:4].flip(0)),
}


@pytest.mark.parametrize(("name", "change"), [*((n, "all") for n in METHODS), ("uefl", "labels"), ("uefl", "images")])
def test_test_data_change_nothing_but_the_metrics_on_them(name, change):
    method, runs = make_law_method(name), []
    changed_silos = [replace(silo, test=CHANGES[change](silo.test)) for silo in make_striped_silos()]
    for silos in (make_striped_silos(), changed_silos):
        clients = make_clients(method, silos)
        server, records = run_rounds(method, clients)
        runs.append((server, collect_tensors(server, clients), [record["silos"]["ada"] for record in records]))
    (server, tensors, entries), (other_server, other_tensors, other_entries) = runs
    assert have_equal_bits(tensors, other_tensors)
    assert torch.equal(server.access, other_server.access)
    assert server.iteration == other_server.iteration
    assert [e["validation"] for e in entries] == [e["validation"] for e in other_entries]
    assert entries[-1]["nll"] != other_entries[-1]["nll"]


def test_client_does_not_change_the_broadcast():
    method = make_law_method("uefl")
    clients = make_clients(method)
    server, _ = run_rounds(method, clients, 2)
    before = {n: t.clone() for n, t in server.model_state.items()}
    broadcast = method.make_broadcast(clients, server)._replace(round=server.round + 1)
    fit_replies = list(clients.fit(method, broadcast))
    query_replies = list(clients.query(method, "evaluate", broadcast, ("test",)))
    assert len(fit_replies) == len(query_replies) == 4
    assert have_equal_bits(server.model_state, before)
    trained, sent = ({n: t for n, t in d.items() if n != CODEWORDS} for d in (fit_replies[0].tensors, before))
    assert not have_equal_bits(trained, sent)


def test_reply_does_not_change_when_the_next_silo_trains():
    method = make_law_method("uefl")
    clients = make_clients(method)
    server, _ = run_rounds(method, clients, 2)
    replies = clients.fit(method, method.make_broadcast(clients, server)._replace(round=3))
    first = next(replies)
    before = {n: t.clone() for n, t in first.tensors.items()}
    list(replies)
    assert have_equal_bits(first.tensors, before)


def make_encoder_with_torch_dropout():
    return nn.Sequential(make_encoder(), nn.Dropout(0.2))


def test_encoder_with_torch_dropout_is_reproducible():
    method = make_law_method("uefl")
    torch.manual_seed(1)
    one, records = run_rounds(method, make_clients(method, encoder_factory=make_encoder_with_torch_dropout))
    torch.manual_seed(2)
    clients = make_clients(method, make_striped_silos()[::-1], encoder_factory=make_encoder_with_torch_dropout)
    again, records_again = run_rounds(method, clients)
    assert have_equal_bits(one.model_state, again.model_state)
    entropies, entropies_again = ([r["silos"]["ada"]["entropy"] for r in rows] for rows in (records, records_again))
    assert entropies == entropies_again
    net = make_network(method, encoder_factory=make_encoder_with_torch_dropout)
    other, _ = run_rounds(method, SerialEngine(make_striped_silos(), net, seed=9))
    assert not have_equal_bits(one.model_state, other.model_state)
