"""The lower and the upper reference: each silo alone, and all data in one place."""

from harness import SHORT_RUN, have_equal_bits, make_clients, make_network, make_striped_silos, run_rounds

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.references import CENTRAL_SILO, Centralized, LocalOnly
from uefl.core.federation import Silo, concatenate_examples
from uefl.engines.serial import SerialEngine


def test_local_only_training_is_a_federation_of_one_silo():
    local_only, fedavg = LocalOnly(**SHORT_RUN), FedAvg(**SHORT_RUN)
    clients = make_clients(local_only)
    server, records = run_rounds(local_only, clients)
    assert server.model_state == {}
    for silo in make_striped_silos():
        single, single_records = run_rounds(fedavg, make_clients(fedavg, [silo]))
        client_state = clients.client_states[silo.name]
        weights = {n: t for n, t in client_state.items() if not n.startswith("optimizer.")}
        assert have_equal_bits(weights, single.model_state)
        metrics, single_metrics = (rows[-1]["silos"][silo.name] for rows in (records, single_records))
        assert metrics["accuracy"] == single_metrics["accuracy"]
        assert metrics["entropy"] == single_metrics["entropy"]


def test_local_only_training_sends_and_receives_nothing():
    method = LocalOnly(**SHORT_RUN)
    _, records = run_rounds(method, make_clients(method))
    assert {(record["bytes_up"], record["bytes_down"]) for record in records} == {(0, 0)}


def test_centralized_training_is_ordinary_training_on_all_data_and_silos_only_evaluate():
    centralized, fedavg = Centralized(**SHORT_RUN), FedAvg(**SHORT_RUN)
    server, records = run_rounds(centralized, make_clients(centralized))
    first, *_ = silos = make_striped_silos()
    train = concatenate_examples([silo.train for silo in silos])
    all_data = Silo(CENTRAL_SILO, train, first.validation, first.test)
    single, _ = run_rounds(fedavg, SerialEngine([all_data], make_network(fedavg)))
    assert have_equal_bits(server.model_state, single.model_state)
    for record in records:
        assert record["participants"] == [CENTRAL_SILO] == ["pooled"]
        assert [n for n, silo in record["silos"].items() if "accuracy" in silo] == ["ada", "bob", "cyd", "dan"]
