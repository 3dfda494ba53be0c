"""The round that every method shares: local training, averaging, participation, batch norm and optimizer state."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    CODEWORDS,
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_clients,
    make_method,
    make_network,
    make_striped_silo,
    make_striped_silos,
    run_method,
    run_rounds,
)

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.federation import iterate_batch_slices
from uefl.core.local import LocalTraining
from uefl.core.noise import derive_key, permutation


def train_in_plain_pytorch(net, examples, method):
    """Train one silo without engine, broadcast and averaging; return its tensors."""
    net.train()
    for round_number in range(1, method.total_rounds + 1):
        optimizer = torch.optim.Adam(net.parameters(), method.local.lr)
        for epoch in range(method.local.epochs):
            order = permutation(derive_key(0, "ada", round_number, epoch, addresses.BATCH_ORDER), len(examples.y))
            for batch_slice in iterate_batch_slices(len(examples.y), method.local.batch_size):
                x, y = examples.x[order[batch_slice]].double(), examples.y[order[batch_slice]]
                z = net.encoder(x).flatten(2).transpose(1, 2)
                z = F.layer_norm(z, (8,))
                code_loss = 0.0
                if method.codebook:
                    segments, codewords = z.reshape(-1, 4), net.codebook.codewords
                    c = codewords[torch.cdist(segments, codewords).argmin(1)].reshape(z.shape)
                    code_loss = 0.25 * ((c.detach() - z) ** 2).mean() + 1.0 * ((c - z.detach()) ** 2).mean()
                    z = z + (c - z).detach()
                hidden = F.gelu(F.linear(z.flatten(1), net.classifier[1].weight, net.classifier[1].bias))
                logits = F.linear(hidden, net.classifier[4].weight, net.classifier[4].bias)
                optimizer.zero_grad()
                (F.cross_entropy(logits, y) + code_loss).backward()
                optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize(
    "codebook",
    [None, replace(SMALL_CODEBOOK, codebook_init="gaussian", extend="none")],
    ids=["without codebook", "with codebook"],
)
def test_federation_of_one_silo_is_ordinary_training(codebook):
    method = FedAvg(**{**SHORT_RUN, "local": replace(LOCAL, epochs=2)}, codebook=codebook)
    clients = make_clients(method, make_striped_silos()[:1], dtype=torch.float64, dropout=0.0)
    server = method.initialize_server(clients)
    net = copy.deepcopy(make_network(method, dropout=0.0)).double()
    if codebook:
        net.codebook.codewords.data = server.model_state[CODEWORDS].clone()
    server, _ = run_rounds(method, clients, server=server)
    for name, tensor in train_in_plain_pytorch(net, make_striped_silos()[0].train, method).items():
        assert torch.allclose(server.model_state[name], tensor, rtol=0, atol=1e-9), name


def train_separately(method):
    """Yield the number of examples and the trained tensors of each silo, trained in an engine without the others."""
    for silo in make_striped_silos():
        clients = make_clients(method, [silo], dtype=torch.float64)
        broadcast = method.make_broadcast(clients, method.initialize_server(clients))._replace(round=1)
        (reply,) = clients.fit(method, broadcast)
        yield len(silo.train.y), reply.tensors


@pytest.mark.parametrize("aggregation_weights", ["num_examples", "uniform"])
def test_round_is_the_weighted_mean_of_silos_that_train_separately(aggregation_weights):
    method = FedAvg(**SHORT_RUN, aggregation_weights=aggregation_weights)
    server, _ = run_rounds(method, make_clients(method, dtype=torch.float64), 1)
    weighted = [(n if aggregation_weights == "num_examples" else 1, t) for n, t in train_separately(method)]
    for name, tensor in server.model_state.items():
        if tensor.is_floating_point():
            mean = sum(weight * tensors[name] for weight, tensors in weighted) / sum(weight for weight, _ in weighted)
            assert torch.allclose(tensor, mean, atol=1e-12), name


def test_clients_per_round_are_drawn_anew_and_only_they_change_the_model():
    method = FedAvg(**{**SHORT_RUN, "rounds": 12}, clients_per_round=2)
    clients = make_clients(method)
    server = method.initialize_server(clients)
    participants = [method.select_participants(clients, server.replace(round=r)) for r in range(40)]
    assert all(len(set(pair)) == 2 for pair in participants)
    assert set().union(*participants) == {"ada", "bob", "cyd", "dan"}
    assert len(set(participants)) == 6  # every pair
    one, _ = run_rounds(method, clients, 1)
    full = FedAvg(**SHORT_RUN)
    first_pair = [silo for silo in make_striped_silos() if silo.name in participants[0]]
    other, _ = run_rounds(full, make_clients(full, first_pair), 1)
    assert have_equal_bits(one.model_state, other.model_state)
    _, records = run_rounds(method, make_clients(method))
    assert [record["round"] for record in records] == list(range(1, method.total_rounds + 1))
    # All silos evaluate, some train.
    assert all("accuracy" in silo for record in records for silo in record["silos"].values())
    assert [tuple(record["participants"]) for record in records] == participants[: method.total_rounds]


def test_participants_depend_on_the_seed_and_every_silo_takes_part_equally_often():
    method = FedAvg(**SHORT_RUN, clients_per_round=1)
    draws = []
    for seed in (0, 1):
        clients = make_clients(method, seed=seed)
        server = method.initialize_server(clients)
        draws.append([method.select_participants(clients, server.replace(round=r)) for r in range(400)])
    assert draws[0] != draws[1]
    counts = Counter(name for (name,) in draws[0])
    # A binomial count of 400 draws with chance 1/4 has deviation 8.7: 100 ± 4.6 deviations.
    assert all(60 <= counts[name] <= 140 for name in ("ada", "bob", "cyd", "dan"))


def test_local_batch_norm_is_never_sent_and_differs_between_silos():
    method = FedAvg(**SHORT_RUN, batch_norm="local")
    clients = make_clients(method)
    server, _ = run_rounds(method, clients)
    assert not [n for n in server.model_state if "running" in n or "tracked" in n]
    reply = next(iter(clients.fit(method, method.make_broadcast(clients, server))))
    assert set(reply.tensors) == set(server.model_state)
    means = [clients.client_states[name]["encoder.1.running_mean"] for name in server.silo_names]
    assert not any(torch.equal(means[0], other) for other in means[1:])


def test_batch_norm_that_is_not_averaged_keeps_its_initial_statistics():
    method = FedAvg(**SHORT_RUN, batch_norm="not_averaged")
    server, _ = run_rounds(method, make_clients(method))
    assert torch.equal(server.model_state["encoder.1.running_mean"], torch.zeros(8))
    assert torch.equal(server.model_state["encoder.1.running_var"], torch.ones(8))
    assert not torch.equal(server.model_state["encoder.1.weight"], torch.ones(8))
    averaged, _ = run_rounds(FedAvg(**SHORT_RUN), make_clients(method))
    assert not torch.equal(averaged.model_state["encoder.1.running_mean"], torch.zeros(8))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_optimizer_state_stays_at_the_silo_without_reset(optimizer):
    """One silo without reset trains over three rounds as in one round of three times the epochs."""
    local = LocalTraining(optimizer=optimizer, lr=1e-2, batch_size=40, epochs=1, weight_decay=0.01)  # 1 batch per epoch
    runs = {
        "stored": (replace(local, reset_optimizer=False), 3),
        "reset": (replace(local, reset_optimizer=True), 3),
        "long": (replace(local, epochs=3), 1),
    }
    weights = {}
    for name, (local_training, rounds) in runs.items():
        method = FedAvg(**{**SHORT_RUN, "local": local_training})
        clients = make_clients(method, make_striped_silos()[:1], dtype=torch.float64, dropout=0.0)
        weights[name] = run_rounds(method, clients, rounds)[0].model_state["classifier.1.weight"]
    assert torch.allclose(weights["stored"], weights["long"], atol=1e-12)
    assert not torch.allclose(weights["reset"], weights["long"], atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_optimizer_state_survives_an_extension(optimizer):
    local = replace(LOCAL, reset_optimizer=False, optimizer=optimizer)
    method = UEFL(**{**SHORT_RUN, "local": local}, codebook=SMALL_CODEBOOK)
    clients = make_clients(method)
    server, _ = run_rounds(method, clients)
    assert server.access.shape[1] > 6
    assert any(n.startswith("optimizer.") and n.endswith("classifier.1.weight") for n in clients.client_states["ada"])


def test_silos_with_equal_names_are_an_error():
    with pytest.raises(InputError, match="silo names must be unique"):
        make_clients(FedAvg(), [make_striped_silo("ada", 8, 0), make_striped_silo("ada", 8, 1)])


def test_accuracy_on_training_examples_is_recorded_on_request():
    record = run_method(make_method("fedavg", evaluate_train=True)).records[-1]
    assert all(0 <= silo["train"]["accuracy"] <= 1 for silo in record["silos"].values())


def test_leaving_out_the_evaluation_of_local_models_changes_nothing_else():
    with_local, without = (run_method(make_method("fedavg", evaluate_local=value)) for value in (True, False))
    assert have_equal_bits(with_local.server.model_state, without.server.model_state)
    for one, other in zip(with_local.records, without.records, strict=True):
        for silo_name, entries in one["silos"].items():
            assert "local_accuracy" in entries
            assert "local_accuracy" not in other["silos"][silo_name]
            assert entries["accuracy"] == other["silos"][silo_name]["accuracy"]
