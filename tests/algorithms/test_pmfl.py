"""PMFL: shared rows, a silo's own rows, query gradients and the server's Adam."""

import pytest
import torch
from harness import (
    TINY_SETTINGS_NO_CODEBOOK,
    RecordingEngine,
    have_equal_bits,
    make_clients,
    make_method,
    make_pattern_silos,
    max_difference,
    run_method,
)
from torch import nn

from uefl.algorithms.pmfl import OWN_PREFIX, PMFL, STEP, select_query_examples, take_adam_step
from uefl.core.federation import Batch, Examples
from uefl.core.noise import derive_key, normal
from uefl.experiment.loading import load
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder


def test_if_everything_is_shared_and_averaged_it_is_fedavg_bit_for_bit():
    a = run_method(make_method("pmfl", shared_fraction=1.0, server_update="average"))
    b = run_method(make_method("fedavg"))
    assert have_equal_bits(a.server.model_state, b.server.model_state)


def test_a_silo_sends_and_receives_only_shared_rows():
    run = run_method(make_method("pmfl"))
    initial = run.clients.initial_tensors
    for reply in run.clients.replies:
        assert {n: t.shape for n, t in reply.tensors.items()} == {n: t.shape for n, t in run.server.model_state.items()}
        assert not reply.extras
    for n, t in run.server.model_state.items():
        assert len(t) == -(-len(initial[n]) // 2) if t.dim() else t.shape == initial[n].shape
    half = sum(t.numel() for t in run.server.model_state.values()) / sum(t.numel() for t in initial.values())
    assert 0.45 < half < 0.6


def test_a_silo_starts_with_its_own_rows_below_the_received_ones():
    method = make_method("pmfl", shared_fraction=0.25)
    run = run_method(method, rounds=2)
    client_state, initial = run.clients.client_states["silo 1"], run.clients.initial_tensors
    model = run.clients._receive_broadcast(method, method.make_broadcast(run.clients, run.server), "silo 1")
    for n, shared in run.server.model_state.items():
        tensor = model.net.state_dict()[n]
        if shared.dim():
            assert torch.equal(tensor[: len(shared)], shared)
            assert torch.equal(tensor[len(shared) :], client_state[OWN_PREFIX + n])
    own = client_state[OWN_PREFIX + "classifier.1.weight"]
    assert not torch.equal(own, initial["classifier.1.weight"][-len(own) :])
    assert not torch.equal(own, run.clients.client_states["silo 0"][OWN_PREFIX + "classifier.1.weight"])


def test_a_reply_is_the_gradient_of_the_loss_on_the_query_examples_at_the_trained_weights():
    trained = {}

    class Recorded(PMFL):
        def finish_training(self, model, *args, **fields):
            trained.update({n: t.clone() for n, t in model.state_dict().items()})
            return super().finish_training(model, *args, **fields)

    silo, local = make_pattern_silos()[0], make_method("pmfl").local
    method = Recorded(rounds=1, iterations=1, mc_samples=2, local=local, shared_fraction=0.5)
    run = run_method(method, [silo], dtype=torch.float64)
    net = run.clients.net.eval()
    net.load_state_dict(trained)
    x, y = silo.train.x[12:].double(), silo.train.y[12:]
    nn.functional.cross_entropy(net(x).logits[0], y).backward()
    sent = run.clients.replies[0].tensors
    expected = {n: p.grad[: len(sent[n])] for n, p in net.named_parameters()}
    assert max_difference({n: sent[n] for n in expected}, expected) < 1e-12
    assert not have_equal_bits(trained, run.clients.initial_tensors)


def test_training_uses_the_support_examples_alone():
    seen = []

    class Recorded(PMFL):
        def loss(self, model, batch: Batch):
            seen.append(batch.x)
            return super().loss(model, batch)

    silo, method = make_pattern_silos()[0], make_method("pmfl", rounds=1, iterations=1)
    run_method(Recorded(rounds=1, iterations=1, mc_samples=2, local=method.local), [silo])
    support = {tuple(x.flatten()[:4].tolist()) for x in silo.train.x[:12]}
    *steps, query = seen
    assert {tuple(x.flatten()[:4].tolist()) for batch in steps for x in batch} == support
    assert len(query) == 12


def test_the_step_of_the_server_is_torchs_adam():
    weight = nn.Parameter(normal(derive_key("w"), (5, 3)).double())
    optimizer = torch.optim.Adam([weight], lr=0.01)
    mine, mean, square = weight.detach().clone(), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    for step in range(1, 6):
        weight.grad = normal(derive_key("g", step), (5, 3)).double()
        optimizer.step()
        mine, mean, square = take_adam_step(mine, weight.grad, mean, square, step=step, lr=0.01)
    assert torch.allclose(mine, weight, atol=1e-14)


def test_rounds_at_the_server_are_those_of_torchs_adam_with_its_rate():
    """Two rounds: the moments of the first one count in the second."""
    method = make_method("pmfl", rounds=2, iterations=1, server_lr=0.02)
    clients = make_clients(method, engine=RecordingEngine, dtype=torch.float64)
    server = method.initialize_server(clients)
    names = [n.removeprefix("adam.mean.") for n in server.method_state if n.startswith("adam.mean.")]
    weights = {n: server.model_state[n].clone().requires_grad_() for n in names}
    adam = torch.optim.Adam(list(weights.values()), lr=0.02)
    for _ in range(2):
        clients.replies.clear()
        server = method.step(clients, server)
        total = sum(reply.num_examples for reply in clients.replies)
        for n, weight in weights.items():
            weight.grad = sum(reply.tensors[n] * (reply.num_examples / total) for reply in clients.replies)
        adam.step()
        for n, weight in weights.items():
            torch.testing.assert_close(server.model_state[n], weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("server_update", ["adam", "average"])
def test_without_a_valid_reply_the_server_keeps_its_state(server_update):
    method = make_method("pmfl", server_update=server_update)
    run = run_method(method, rounds=1)
    fit = run.clients.fit
    run.clients.fit = lambda *a, **k: (r._replace(rejected="no") for r in fit(*a, **k))
    after = method.step(run.clients, run.server)
    assert have_equal_bits(after.model_state, run.server.model_state)
    assert have_equal_bits(after.method_state, run.server.method_state)


def test_the_step_counts_rounds_and_average_needs_no_state():
    run = run_method(make_method("pmfl"))
    assert int(run.server.method_state[STEP]) == run.server.round == 3
    assert not run_method(make_method("pmfl", server_update="average")).server.method_state


@pytest.mark.parametrize(("n", "num_query"), [(1, 1), (2, 1), (5, 3), (8, 4)])
def test_every_silo_has_query_examples(n, num_query):
    assert len(select_query_examples(Examples(torch.zeros(n, 1), torch.zeros(n))).y) == num_query


def test_a_saved_model_has_the_rows_of_its_silo_and_the_reported_accuracy(tmp_path):
    (experiment,) = parse_experiments(["pmfl", *TINY_SETTINGS_NO_CODEBOOK], (), "default").values()
    folder = RunFolder(run(experiment, tmp_path))
    reported = folder.read_summary()["last"]["silos"]
    silos, _ = experiment.data.load(0)
    for silo in silos:
        net = load(folder.model_path, silo.name).net
        with torch.no_grad():
            accuracy = (net(silo.test.x).logits[0].argmax(-1) == silo.test.y).double().mean().item()
        assert accuracy == pytest.approx(reported[silo.name]["accuracy"])
