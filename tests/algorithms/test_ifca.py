"""IFCA: every silo trains the model with the lowest training loss, and the server averages per model."""

from dataclasses import replace

import pytest
import torch
from harness import (
    BATCH_NORM_MODEL,
    MLP_MODEL,
    RecordingEngine,
    build_model,
    compute_mean_accuracy,
    drop_seconds,
    have_equal_bits,
    make_method,
    make_pattern_silos,
    max_difference,
    run_method,
    run_rounds,
)
from torch import nn

from uefl.algorithms.ifca import ASSIGNMENT, LOSS_TASK, get_model
from uefl.core.aggregate import WeightedMean
from uefl.core.federation import Examples
from uefl.core.noise import derive_key, permutation
from uefl.engines.serial import SerialEngine


def make_opposed_silos():
    """Return four silos in two groups that give the same images opposite labels."""
    silos = make_pattern_silos((24, 30, 24, 30))
    return [
        replace(s, **{split: Examples(s.examples(split).x, (s.examples(split).y + i // 2) % 3) for split in SPLITS})
        for i, s in enumerate(silos)
    ]


SPLITS = ("train", "validation", "test")


def test_one_model_is_fedavg_bit_for_bit():
    ifca, fedavg = run_method(make_method("ifca", num_models=1)), run_method(make_method("fedavg"))
    assert have_equal_bits(ifca.server.model_state, fedavg.server.model_state)
    for record, expected in zip(ifca.records, fedavg.records, strict=True):
        silos = {
            n: {k: v for k, v in silo.items() if k not in ("trained_model", "evaluated_model")}
            for n, silo in record["silos"].items()
        }
        assert drop_seconds({**record, "silos": silos}) == drop_seconds(expected)


def test_silos_that_contradict_each_other_keep_different_models():
    """A bad start may put all silos into one cluster, so each model starts a little nearer to one group."""
    silos, local = make_opposed_silos(), replace(make_method("fedavg").local, epochs=3, lr=0.01)
    fedavg, method = make_method("fedavg", rounds=4, local=local), make_method("ifca", rounds=4, local=local)
    starts = [run_method(fedavg, group, model=MLP_MODEL, rounds=1).server for group in (silos[:2], silos[2:])]
    clients = RecordingEngine(silos, build_model(method, MLP_MODEL))
    server = method.initialize_server(clients)
    models = {f"model.1.{n}": t for n, t in starts[1].model_state.items()}
    server = server.replace(model_state=starts[0].model_state, method_state={**server.method_state, **models})
    _, records = run_rounds(method, clients, server=server)
    assert [silo["trained_model"] for silo in records[-1]["silos"].values()] == [0, 0, 1, 1]
    shared = run_method(fedavg, silos, model=MLP_MODEL).records
    accuracy, shared_accuracy = (compute_mean_accuracy(rows[-1]) for rows in (records, shared))
    assert accuracy > shared_accuracy + 0.2  # one model cannot fit both groups


def test_a_round_equals_the_algorithm_written_out():
    """Choice by the training loss in evaluation mode, training of the chosen model, a mean per model."""
    silos, method = make_opposed_silos(), make_method("ifca", num_models=3)
    clients = RecordingEngine(silos, build_model(method, MLP_MODEL), dtype=torch.float64)
    server = method.initialize_server(clients)
    net, expected = clients.net.eval(), {}
    for silo in silos:
        losses = []
        for i in range(3):
            net.load_state_dict(get_model(server, i))
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(net(silo.train.x.double()).logits[0], silo.train.y)))
        expected[silo.name] = losses.index(min(losses))
    after = method.step(clients, server)
    assert after.method_state[ASSIGNMENT].tolist() == [expected[n] for n in server.silo_names]
    for i in range(3):
        mean, trained = WeightedMean(get_model(server, i)), [n for n in server.silo_names if expected[n] == i]
        for name in trained:
            alone = SerialEngine(
                [s for s in silos if s.name == name], build_model(method, MLP_MODEL), dtype=torch.float64
            )
            fedavg = make_method("fedavg")
            broadcast = fedavg.make_broadcast(alone, fedavg.initialize_server(alone))
            broadcast = broadcast._replace(round=1, model_state=get_model(server, i))
            (reply,) = alone.fit(fedavg, broadcast)
            mean.add(reply.tensors, reply.num_examples, broadcast.access[0])
        assert max_difference(get_model(after, i), mean.result()) < 1e-12
        assert trained or have_equal_bits(get_model(after, i), get_model(server, i))


def test_ties_go_to_the_lower_index():
    method = make_method("ifca")
    clients = RecordingEngine(make_pattern_silos(), build_model(method, MLP_MODEL))
    server = method.initialize_server(clients)
    same = {n: get_model(server, 0)[n.split(".", 2)[2]] for n in server.method_state if n != ASSIGNMENT}
    server = server.replace(method_state={**same, ASSIGNMENT: torch.ones(3, dtype=torch.int64)})
    server, _ = method.choose_models(clients, server, server.silo_names)
    assert server.method_state[ASSIGNMENT].tolist() == [0, 0, 0]


def test_a_silo_without_an_answer_keeps_its_model():
    class LateEngine(SerialEngine):
        def query(self, method, task, broadcast, splits):
            for reply in super().query(method, task, broadcast, splits):
                yield reply._replace(rejected="late") if (reply.silo_name, task) == ("silo 1", LOSS_TASK) else reply

    method = make_method("ifca")
    clients = LateEngine(make_pattern_silos(), build_model(method, MLP_MODEL))
    server = method.initialize_server(clients)
    server = server.replace(method_state={**server.method_state, ASSIGNMENT: torch.tensor([0, 1, 0])})
    server, _ = method.choose_models(clients, server, server.silo_names)
    assert int(server.method_state[ASSIGNMENT][1]) == 1


@pytest.mark.parametrize("initial_models", ["network", "classifier"])
def test_initial_models_are_different_draws_of_the_same_values(initial_models):
    method = make_method("ifca", num_models=3, initial_models=initial_models)
    clients = SerialEngine(make_pattern_silos(), build_model(method, BATCH_NORM_MODEL))
    server = method.initialize_server(clients)
    for name, tensor in server.model_state.items():
        values = [get_model(server, i)[name] for i in range(3)]
        assert all(torch.equal(v.flatten().sort()[0], tensor.flatten().sort()[0]) for v in values)
        if name.endswith("weight") and tensor.dim() > 1:
            differ = initial_models == "network" or name.startswith("classifier.")
            assert torch.equal(values[0], values[1]) != differ
            assert torch.equal(values[1], values[2]) != differ


def initialize_models(**settings):
    """Return the initial models of IFCA with three models, and the engine."""
    method = make_method("ifca", num_models=3, **settings)
    clients = SerialEngine(make_pattern_silos(), build_model(method, BATCH_NORM_MODEL), seed=5)
    server = method.initialize_server(clients)
    return [get_model(server, i) for i in range(3)], clients


def test_start_0_is_the_network_and_shuffles_of_it_by_seed_model_and_name():
    """Runs before there was the setting `start` had these initial models."""
    models, clients = initialize_models()
    network, trained = clients.initial_model_state(), dict(clients.net.named_parameters())
    assert have_equal_bits(models[0], network)
    for i in (1, 2):
        expected = {
            n: t.flatten()[permutation(derive_key(5, i, n, "initial models"), t.numel())].reshape(t.shape)
            if n in trained
            else t
            for n, t in network.items()
        }
        assert have_equal_bits(models[i], expected)


@pytest.mark.parametrize("initial_models", ["network", "classifier"])
def test_another_start_draws_every_model_anew(initial_models):
    first, _ = initialize_models(initial_models=initial_models)
    again, _ = initialize_models(initial_models=initial_models, start=0)
    second, third = (initialize_models(initial_models=initial_models, start=s)[0] for s in (1, 2))
    assert all(have_equal_bits(one, other) for one, other in zip(first, again, strict=True))
    for name, tensor in first[0].items():
        values = [model[name] for model in (*first, *second, *third)]
        assert all(torch.equal(v.flatten().sort()[0], tensor.flatten().sort()[0]) for v in values)
        if name.endswith("weight") and tensor.dim() > 1 and tensor.numel() > 10:  # few values have few orders
            differ = initial_models == "network" or name.startswith("classifier.")
            assert len({tuple(v.flatten().tolist()) for v in values}) == (9 if differ else 1)


def test_another_start_is_another_result():
    results = [run_method(make_method("ifca", start=start)).server for start in (0, 0, 1)]
    assert have_equal_bits(results[0].model_state, results[1].model_state)
    assert not have_equal_bits(results[0].model_state, results[2].model_state)


def test_every_model_that_a_silo_receives_is_counted():
    """k models for the choice and one for the training; the last record also has the choice before the evaluation."""
    method = make_method("ifca", num_models=3)
    run = run_method(method)
    fedavg = run_method(make_method("fedavg")).records
    model_bytes = fedavg[0]["bytes_down"]
    assert [r["bytes_down"] for r in run.records[:-1]] == [4 * model_bytes] * (method.total_rounds - 1)
    assert run.records[-1]["bytes_down"] == fedavg[-1]["bytes_down"] + 6 * model_bytes


def test_records_name_the_model_of_every_silo_and_round():
    method = make_method("ifca", clients_per_round=2)
    clients = RecordingEngine(make_opposed_silos(), build_model(method, MLP_MODEL))
    server, records = run_rounds(method, clients)
    for record in records:
        trained = [n for n, silo in record["silos"].items() if "trained_model" in silo]
        assert trained == record["participants"]
        assert all(silo["evaluated_model"] in (0, 1) for silo in record["silos"].values())
    last = [records[-1]["silos"][n]["evaluated_model"] for n in server.silo_names]
    assert last == server.method_state[ASSIGNMENT].tolist()
