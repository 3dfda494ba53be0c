"""The loop over rounds and training from Python."""

import pytest
from harness import NUM_CLASSES, SHORT_RUN, have_equal_bits, make_clients, make_encoder, make_striped_silos

from uefl.algorithms.fedavg import FedAvg
from uefl.core.errors import InputError
from uefl.engines.serial import SerialEngine
from uefl.experiment.rounds import iterate_rounds
from uefl.experiment.train import train
from uefl.models.network import Net, initialize_network


def test_the_loop_yields_every_round_with_its_records():
    method = FedAvg(**SHORT_RUN)
    states = list(iterate_rounds(method, make_clients(method)))
    assert [server.round for server in states] == [1, 2, 3, 4, 5]
    records = [[record["round"] for record in server.completed_records] for server in states]
    assert records == [[], [1], [2], [3], [4, 5]]  # a round's model is evaluated in the next one


def test_the_loop_resumes_after_a_server_and_ends_with_the_same_bits():
    method = FedAvg(**SHORT_RUN)
    *_, whole = iterate_rounds(method, make_clients(method))
    *_, half = iterate_rounds(method, make_clients(method), num_rounds=2)
    assert half.round == 2
    *_, resumed = iterate_rounds(method, make_clients(method), half)
    assert have_equal_bits(resumed.model_state, whole.model_state)
    assert list(iterate_rounds(method, make_clients(method), whole)) == []


def test_training_reports_every_record():
    records = []
    result = train(
        FedAvg(**SHORT_RUN),
        make_striped_silos(),
        make_encoder(),
        num_classes=NUM_CLASSES,
        hidden_size=16,
        on_record=records.append,
    )
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
    assert result.records == records
    assert result.accuracy == result.summary["mean of last 5"]["mA"]
    assert result.entropy == result.summary["mean of last 5"]["mE"]


def test_training_rejects_engines_that_need_an_experiment():
    with pytest.raises(InputError, match="unknown engine 'flower'; known: auto, serial, processes, stacked, compiled"):
        train(FedAvg(), make_striped_silos(), make_encoder(), num_classes=NUM_CLASSES, engine="flower")


def test_training_with_a_seed_is_the_federation_with_that_seed():
    method, silos, encoder = FedAvg(**SHORT_RUN), make_striped_silos(), make_encoder()
    result = train(method, silos, encoder, num_classes=NUM_CLASSES, hidden_size=16, seed=3)
    net = initialize_network(3, lambda: Net(encoder, NUM_CLASSES, (1, 8, 8), hidden_size=16), method.adapt_network)
    *_, server = iterate_rounds(method, SerialEngine(silos, net, seed=3))
    assert have_equal_bits(result.server.model_state, server.model_state)
