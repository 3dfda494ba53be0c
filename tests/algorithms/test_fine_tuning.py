"""Fine-tuning: after the last round every silo trains the final model on its own data, and sends nothing."""

from dataclasses import replace

import pytest
import torch
from harness import (
    MLP_MODEL,
    SMALL_CODEBOOK,
    drop_seconds,
    have_equal_bits,
    make_clients,
    make_method,
    make_pattern_silos,
    max_difference,
    run_method,
    run_rounds,
)
from torch import nn

from uefl.core.federation import Batch, Examples, is_codeword_tensor
from uefl.core.local import LocalTraining
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine

PLAIN_SGD = LocalTraining(optimizer="sgd", lr=0.1, momentum=0.0, batch_size=100, epochs=2, schedule="cosine")


@pytest.mark.parametrize("codebook", [False, True])
def test_without_epochs_it_is_fedavg_bit_for_bit(codebook):
    tuned = run_method(make_method("fine-tuning", fine_tuning_epochs=0, codebook=codebook))
    fedavg = run_method(make_method("fedavg", codebook=codebook))
    assert have_equal_bits(tuned.server.model_state, fedavg.server.model_state)
    assert [drop_seconds(r) for r in tuned.records] == [drop_seconds(r) for r in fedavg.records]
    assert not any(tuned.clients.client_states.values())


@pytest.mark.parametrize("codebook", [False, True])
def test_rounds_and_the_shared_model_are_those_of_fedavg(codebook):
    tuned = run_method(make_method("fine-tuning", fine_tuning_epochs=2, codebook=codebook))
    fedavg = run_method(make_method("fedavg", codebook=codebook))
    assert have_equal_bits(tuned.server.model_state, fedavg.server.model_state)
    earlier, earlier_of_fedavg = ([drop_seconds(r) for r in run.records[:-1]] for run in (tuned, fedavg))
    assert earlier == earlier_of_fedavg
    assert [r.get("is_fine_tuned") for r in tuned.records] == [*[None] * len(earlier), True]
    assert tuned.records[-1]["silos"]["silo 0"]["nll"] != fedavg.records[-1]["silos"]["silo 0"]["nll"]
    for state in tuned.clients.client_states.values():
        codewords = {n: t for n, t in state.items() if is_codeword_tensor(n)}
        row = tuned.server.access[0]
        assert all(len(t) <= len(row) for t in codewords.values())


def test_fine_tuning_is_plain_training_at_a_tenth_of_the_first_learning_rate():
    method = make_method("fine-tuning", fine_tuning_epochs=3, local=PLAIN_SGD)
    silos = make_pattern_silos()
    run = run_method(method, silos, model=replace(MLP_MODEL, dropout=0.0), dtype=torch.float64)
    net = run.clients.net.train()
    for silo in silos:
        net.load_state_dict(run.server.model_state)
        for _ in range(3):  # one batch per epoch
            batch = Batch(silo.train.x.double(), silo.train.y)
            loss = nn.functional.cross_entropy(net(batch.x).logits[0], batch.y)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for p, g in zip(net.parameters(), gradients):
                    p -= 0.1 * 0.1 * g
        state = run.clients.client_states[silo.name]
        assert max_difference({n: state[n] for n in net.state_dict()}, net.state_dict()) < 1e-12


def test_the_fine_tuned_model_never_leaves_a_silo():
    method = make_method("fine-tuning", fine_tuning_epochs=1)
    run = run_method(method)
    last = run.clients.replies[-3:]
    assert len(run.clients.replies) == 3 * (method.total_rounds + 1)
    assert all(not reply.tensors and not reply.extras and not reply.sent_bytes for reply in last)
    fedavg = run_method(make_method("fedavg"))
    assert run.records[-1]["bytes_up"] == fedavg.records[-1]["bytes_up"]
    assert run.records[-1]["bytes_down"] > fedavg.records[-1]["bytes_down"], "silos receive the final model to train it"


def make_silos_and_target():
    *others, last = make_pattern_silos()
    return [*others, replace(last, train=Examples(last.train.x[:0], last.train.y[:0]))]


def test_silo_without_training_data_uses_the_shared_model():
    methods = [make_method(name) for name in ("fine-tuning", "fedavg")]
    tuned, fedavg = (run_method(method, make_silos_and_target()).records[-1]["silos"] for method in methods)
    assert tuned["silo 2"]["nll"] == fedavg["silo 2"]["nll"]
    assert tuned["silo 0"]["nll"] != fedavg["silo 0"]["nll"]


def test_a_stack_takes_no_silo_with_a_model_of_its_own_beside_one_without():
    codebook = replace(SMALL_CODEBOOK, extend="none")  # so that all silos receive as many codewords
    method = replace(make_method("uefl", codebook=True, fine_tuning_epochs=1), codebook=codebook)
    (_, serial), (_, stacked) = (
        run_rounds(method, make_clients(method, make_silos_and_target(), engine=engine, dtype=torch.float64))
        for engine in (SerialEngine, StackedEngine)
    )
    for name, entry in serial[-1]["silos"].items():
        assert stacked[-1]["silos"][name]["nll"] == pytest.approx(entry["nll"], rel=1e-9)


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
@pytest.mark.parametrize("batch_norm", ["average", "personal"])
def test_uefl_with_epochs_is_fine_tuning_with_a_codebook(engine, batch_norm):
    fields = {"codebook": True, "fine_tuning_epochs": 2, "batch_norm": batch_norm}
    methods = [make_method(name, **fields) for name in ("uefl", "fine-tuning")]
    (server, records), (tuned, tuned_records) = (run_rounds(m, make_clients(m, engine=engine)) for m in methods)
    assert have_equal_bits(server.model_state, tuned.model_state)
    assert [drop_seconds(r) for r in records] == [drop_seconds(r) for r in tuned_records]
    assert server.access.shape[1] > methods[0].codebook.num_codewords, "silos have codewords of their own"
    plain = replace(methods[0], fine_tuning_epochs=0)
    untuned, earlier = run_rounds(plain, make_clients(plain, engine=engine))
    assert have_equal_bits(server.model_state, untuned.model_state), "fine-tuning moves nothing that is shared"
    assert records[-1]["silos"]["ada"]["nll"] != earlier[-1]["silos"]["ada"]["nll"]


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
def test_the_last_record_also_has_the_metrics_of_the_shared_model(engine):
    method = make_method("uefl", codebook=True, fine_tuning_epochs=2)
    (_, records), (_, plain) = (
        run_rounds(m, make_clients(m, engine=engine)) for m in (method, method.without_own_models())
    )
    assert not any("shared" in silo for record in records[:-1] for silo in record["silos"].values())
    for name, entry in plain[-1]["silos"].items():
        shared = records[-1]["silos"][name]["shared"]
        assert {"test nll": shared["nll"], **shared["validation"]} == {"test nll": entry["nll"], **entry["validation"]}
        assert shared["nll"] != records[-1]["silos"][name]["nll"]


@pytest.mark.parametrize("batch_norm", ["average", "personal"])
def test_further_rounds_start_without_what_fine_tuning_trained(batch_norm):
    method = make_method("fine-tuning", batch_norm=batch_norm)
    clients = make_clients(method)
    run_rounds(method, clients)
    names, personal = set(clients.net.state_dict()), set(method.client_state_names(clients.net))
    for state in clients.client_states.values():
        assert names <= set(state)
        resumed = method.resume_client_state(clients.net, {**state, "control": state["classifier.1.bias"]})
        assert set(resumed) == {"control"} | personal
