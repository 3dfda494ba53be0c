"""Logit adjustment: a silo trains and predicts with the log of its own class frequencies, which never leave it."""

from dataclasses import replace

import pytest
import torch
from harness import (
    MLP_MODEL,
    NUM_CLASSES,
    bind_model,
    build_model,
    call_with_mistake,
    make_batch,
    make_encoder,
    make_method,
    make_pattern_silos,
    run_method,
)
from torch import nn

from uefl.algorithms import METHODS
from uefl.algorithms.fccl import LOGITS
from uefl.algorithms.references import CENTRAL_SILO
from uefl.core.errors import InputError
from uefl.core.federation import Examples
from uefl.core.label_prior import LOG_PRIOR, compute_log_prior, mark_labels
from uefl.experiment.experiment import fingerprint_silos
from uefl.experiment.loading import load, open_models
from uefl.experiment.silo_choice import choose_silo
from uefl.experiment.train import train
from uefl.models.model_config import ModelConfig

LINEAR_MODEL = ModelConfig(encoder="identity", width=0, hidden_size=0, dropout=0.0, feature_norm="none")


def make_skewed_silos():
    """Return silos with different class frequencies: silo i has few examples of class i."""
    silos = []
    for i, silo in enumerate(make_pattern_silos((36, 45, 36))):
        kept = (silo.train.y != i) | (torch.arange(len(silo.train.y)) < 9)
        silos.append(replace(silo, train=Examples(silo.train.x[kept], silo.train.y[kept])))
    return silos


def compute_expected_prior(y):
    counts = [1 + int((y == c).sum()) for c in range(NUM_CLASSES)]
    return torch.tensor([n / sum(counts) for n in counts], dtype=torch.float64).log()


def collect_weights(run):
    states = [run.server.model_state, *run.clients.client_states.values()]
    return torch.cat([t.flatten().double() for s in states for n, t in s.items() if n.endswith("weight")])


def test_prior_is_the_log_of_smoothed_frequencies_and_zero_without_examples():
    expected = torch.tensor([5 / 8, 1 / 8, 2 / 8], dtype=torch.float64).log()
    assert torch.allclose(compute_log_prior(torch.tensor([4, 0, 1])), expected)
    assert torch.equal(compute_log_prior(torch.zeros(3, dtype=torch.int64)), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("ensemble_size", [1, 2])
def test_training_loss_is_the_cross_entropy_of_adjusted_logits(ensemble_size):
    method, batch = make_method("fedavg", logit_adjustment="local"), make_batch()
    model = replace(MLP_MODEL, ensemble_size=ensemble_size)
    net = build_model(method, model).double().eval()
    prior = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    loss = method.loss(bind_model(net, client_state={LOG_PRIOR: prior}), batch)
    expected = sum(nn.functional.cross_entropy(logits + prior, batch.y) for logits in net(batch.x).logits)
    assert torch.allclose(loss, expected)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "centralized"])  # whose own tests are below
def test_every_method_trains_and_evaluates_with_the_prior(name):
    """Each update of own labels uses it: the weights of one round differ, and so does the evaluation of equal ones."""
    codebook = name in ("uefl", "vq-fedavg")
    silos = make_skewed_silos()
    method = make_method(name, rounds=2, codebook=codebook)
    run = run_method(method, silos, rounds=1)
    adjusted = run_method(replace(method, logit_adjustment="local"), silos, rounds=1)
    assert not torch.allclose(collect_weights(run), collect_weights(adjusted), atol=1e-5)
    broadcast = method.make_broadcast(run.clients, run.server)
    sums = [
        next(iter(run.clients.query(m, "evaluate", broadcast, ("test",)))).answers["test"]
        for m in (method, replace(method, logit_adjustment="local"))
    ]
    assert sums[0]["nll"] != sums[1]["nll"]
    assert sums[0]["entropy"] != sums[1]["entropy"]


def test_silo_evaluates_logits_plus_the_prior_of_its_training_labels():
    method, silos = make_method("fedavg", logit_adjustment="local", mc_samples=1), make_skewed_silos()
    net = build_model(method, replace(MLP_MODEL, dropout=0.0)).double()
    run = run_method(method, silos, net=net, dtype=torch.float64)
    net = run.clients.net.eval()
    net.load_state_dict(run.server.model_state)
    for silo in silos:
        logits = net(silo.test.x.double()).logits[0].detach() + compute_expected_prior(silo.train.y)
        recorded = run.records[-1]["silos"][silo.name]
        assert recorded["accuracy"] == pytest.approx(float((logits.argmax(-1) == silo.test.y).double().mean()))
        assert recorded["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, silo.test.y)))


@pytest.mark.parametrize("name", ["fedavg", "centralized"])
def test_equal_frequencies_change_nothing_but_rounding(name):
    one, other = (
        run_method(make_method(name, logit_adjustment=value), model=MLP_MODEL, dtype=torch.float64)
        for value in ("none", "local")
    )
    assert torch.allclose(collect_weights(one), collect_weights(replace_states(other)), atol=1e-9)


def replace_states(run):
    for state in run.clients.client_states.values():
        state.pop(LOG_PRIOR)
    return run


def test_silo_without_training_data_adds_nothing():
    *others, last = make_skewed_silos()
    no_examples = Examples(last.train.x[:0], last.train.y[:0])
    silos = [*others, replace(last, train=no_examples)]
    method = make_method("fedavg", logit_adjustment="local")
    run = run_method(method, silos)
    broadcast = method.make_broadcast(run.clients, run.server)
    run.clients.client_states.clear()  # the prior is computed for every message, and not only for the first one
    adjusted, plain = (
        {r.silo_name: r.answers["test"]["nll"] for r in run.clients.query(m, "evaluate", broadcast, ("test",))}
        for m in (method, replace(method, logit_adjustment="none"))
    )
    assert adjusted["silo 2"] == plain["silo 2"]
    assert adjusted["silo 0"] != plain["silo 0"]


def make_linear_run(name, silos, **fields):
    """Train logistic regression on full batches, whose order changes nothing but rounding."""
    method = make_method(name, logit_adjustment="local", mc_samples=1)
    method = replace(method, local=replace(method.local, batch_size=1000), **fields)
    return run_method(method, silos, model=LINEAR_MODEL, dtype=torch.float64)


@pytest.mark.parametrize("ensemble_size", [1, 2])
def test_centralized_loss_adjusts_each_example_by_the_prior_of_its_silo(ensemble_size):
    method, batch = make_method("centralized", logit_adjustment="local"), make_batch()
    net = build_model(method, replace(MLP_MODEL, ensemble_size=ensemble_size)).double().eval()
    sources = torch.tensor([2, 0, 1, 0, 2, 1] * 2)
    silo_labels = [torch.tensor(y) for y in ([0, 0, 1], [2, 2, 2, 2, 1], [1])]
    marked = torch.cat([mark_labels(y, torch.tensor(i)) for i, y in enumerate(silo_labels)])
    model = bind_model(net, client_state=method.compute_label_state(net, marked))
    loss = method.loss(model, batch._replace(y=mark_labels(batch.y, sources)))
    priors = torch.stack([compute_expected_prior(silo_labels[i]) for i in sources])
    expected = sum(nn.functional.cross_entropy(logits + priors, batch.y) for logits in net(batch.x).logits)
    assert torch.allclose(loss, expected)


@pytest.mark.parametrize("model", [LINEAR_MODEL, MLP_MODEL])
def test_centralized_silos_predict_with_the_priors_of_their_own_labels(model):
    silos = make_skewed_silos()
    method = make_method("centralized", logit_adjustment="local", mc_samples=1, evaluate_train=True)
    net = build_model(method, replace(model, dropout=0.0)).double()
    run = run_method(method, silos, net=net, dtype=torch.float64)
    net = run.clients.net.eval()
    net.load_state_dict(run.server.model_state)
    losses = []
    for silo in silos:
        prior = compute_expected_prior(silo.train.y)
        recorded = run.records[-1]["silos"][silo.name]
        assert recorded["nll"] == pytest.approx(compute_nll(net, silo.test, prior))
        losses += [compute_nll(net, silo.train, prior)] * len(silo.train.y)
    on_all_data = run.records[-1]["silos"][CENTRAL_SILO]["train"]
    assert on_all_data["nll"] == pytest.approx(sum(losses) / len(losses))


def compute_nll(net, examples, prior):
    logits = net(examples.x.double()).logits[0].detach() + prior
    return float(nn.functional.cross_entropy(logits, examples.y))


def test_centralized_training_of_one_silo_is_training_it_alone_with_its_prior():
    silo = make_skewed_silos()[1]
    centralized, alone = (make_linear_run(name, [silo]) for name in ("centralized", "local-only"))
    for name, weights in alone.clients.client_states[silo.name].items():
        if name in centralized.server.model_state:
            assert torch.allclose(centralized.server.model_state[name], weights, atol=1e-12)
    records = [run.records[-1]["silos"][silo.name] for run in (centralized, alone)]
    assert records[0]["nll"] == pytest.approx(records[1]["nll"])
    assert records[0]["accuracy"] == records[1]["accuracy"]


def test_centralized_training_does_not_depend_on_the_order_of_silos():
    silos = make_skewed_silos()
    one, other = (run_method(make_method("centralized", logit_adjustment="local"), s) for s in (silos, silos[::-1]))
    assert torch.equal(collect_weights(one), collect_weights(other))
    assert one.records[-1]["silos"]["silo 0"]["nll"] == other.records[-1]["silos"]["silo 0"]["nll"]


def test_centralized_silo_without_training_data_adds_nothing():
    first, *others = make_skewed_silos()
    no_examples = Examples(first.train.x[:0], first.train.y[:0])
    silos = [replace(first, train=no_examples), *others]
    method = make_method("centralized", logit_adjustment="local", mc_samples=1)
    net = build_model(method, replace(MLP_MODEL, dropout=0.0)).double()
    run = run_method(method, silos, net=net, dtype=torch.float64)
    net = run.clients.net.eval()
    net.load_state_dict(run.server.model_state)
    recorded = run.records[-1]["silos"]["silo 0"]
    assert recorded["nll"] == pytest.approx(compute_nll(net, first.test, torch.zeros(NUM_CLASSES)))


def test_only_centralized_runs_with_the_prior_get_another_fingerprint():
    """They trained without it in earlier versions, and a finished run is found by this hash."""
    silos = make_skewed_silos()

    def compute_fingerprint(value):
        return fingerprint_silos(make_method("centralized", logit_adjustment=value).prepare_silos(silos))

    prepared = make_method("centralized", logit_adjustment="local").prepare_silos(silos)
    without_priors = [replace(silo, sources=None, moved_labels=None) for silo in prepared]
    assert fingerprint_silos(without_priors) == compute_fingerprint("none") != compute_fingerprint("local")


@pytest.mark.parametrize("name", METHODS)
def test_prior_is_in_no_message(name):
    silos = make_skewed_silos()
    run = run_method(make_method(name, logit_adjustment="local", codebook=name in ("uefl", "vq-fedavg")), silos)
    assert LOG_PRIOR not in run.clients.sent_names | run.clients.received_names
    priors = [compute_expected_prior(silo.train.y).float() for silo in silos]
    for reply in run.clients.replies:
        tensors = [t for t in (*reply.tensors.values(), *reply.extras.values()) if t.shape == (NUM_CLASSES,)]
        assert not any(torch.allclose(t, prior) for t in tensors for prior in priors)


def test_logits_that_fccl_sends_are_not_adjusted():
    method = make_method("fccl", logit_adjustment="local", rounds=1, iterations=1)
    silos = make_skewed_silos()
    run = run_method(method, silos)
    reply, net = run.clients.replies[0], run.clients.net.eval()
    net.load_state_dict({n: run.clients.client_states[reply.silo_name][n] for n in net.state_dict()})
    with torch.no_grad():
        assert torch.allclose(reply.extras[LOGITS], net(silos[0].public).logits[0], atol=1e-6)


def train_adjusted(name, silos, **fields):
    torch.manual_seed(0)
    encoder, method = make_encoder(), make_method(name, logit_adjustment="local", **fields)
    return train(method, silos, encoder, num_classes=NUM_CLASSES, hidden_size=16), encoder


@pytest.mark.parametrize("name", ["fedavg", "uefl", "vhl", "fedcr", "pmfl", "fccl", "local-only", "centralized"])
def test_a_silos_model_predicts_with_its_prior(name, tmp_path):
    silos = make_skewed_silos()
    result, encoder = train_adjusted(name, silos, codebook=name == "uefl")
    result.save(tmp_path / "all")
    for silo in silos:
        recorded = result.records[-1]["silos"][silo.name]
        result.save(tmp_path / silo.name, silo=silo.name)
        for model in (load(tmp_path / "all", silo.name, encoder=encoder), load(tmp_path / silo.name, encoder=encoder)):
            predictions = model.predict(silo.test.x)
            assert (predictions.labels == silo.test.y.numpy()).mean() == pytest.approx(recorded["accuracy"])
            assert predictions.uncertainty.entropy.mean() == pytest.approx(recorded["entropy"], rel=1e-5)


def test_without_a_silo_and_for_unknown_labels_no_prior_is_used(tmp_path):
    silos = make_skewed_silos()
    result, encoder = train_adjusted("fedavg", silos)
    x = silos[0].test.x
    shared, own = result.model(), result.model("silo 0")
    with torch.no_grad():
        expected = shared.net(x).logits[0].softmax(-1)
    assert torch.allclose(torch.from_numpy(shared.predict(x).probabilities), expected, atol=1e-6)
    assert not torch.allclose(torch.from_numpy(own.predict(x).probabilities), expected, atol=1e-3)
    result.save(tmp_path, silo="silo 1")
    copy = open_models(tmp_path, encoder=encoder)
    assert [facts.label_counts for facts in copy.description.silos.values()] == [result.model("silo 1").label_counts]
    facts = {n: replace(f, label_counts=()) for n, f in result.models.description.silos.items()}
    of_coordinator = replace(result.models, description=replace(result.models.description, silos=facts))
    with pytest.raises(InputError, match=r"^the labels of silo silo 0 stayed at the silo; use the copy"):
        of_coordinator.build("silo 0")


def test_silo_is_chosen_by_inputs_among_silos_that_differ_in_their_prior_alone():
    silos = make_skewed_silos()
    result, _ = train_adjusted("fedavg", silos)
    assert result.models.has_own_parts
    assert set(choose_silo(result.models, silos[0].test.x).scores) == {"silo 0", "silo 1", "silo 2"}


def test_unknown_value_is_one_line():
    message = call_with_mistake("run", "fedavg", "logit_adjustment=global")
    assert "logit_adjustment" in message
    assert "none, local" in message
