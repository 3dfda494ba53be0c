"""FedBR: pseudo-images of no class, a contrastive loss, and one maximization and one minimization step per batch."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import (
    BATCH_NORM_MODEL,
    MLP_MODEL,
    bind_model,
    build_model,
    make_batch,
    make_method,
    make_pattern_examples,
    make_pattern_silos,
    run_method,
)

from uefl.algorithms.fedbr import PROJECTION_PREFIX, PSEUDO
from uefl.core.federation import Broadcast
from uefl.core.local import LocalTraining
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine


def make_updates(method):
    return method.make_updates(Broadcast(1, {}, (), torch.ones(0, 0)))


def make_model(method, net=None):
    """Return a model in double precision with pseudo-images among the extras."""
    net = build_model(method, MLP_MODEL).double().eval() if net is None else net
    return bind_model(net, extras={PSEUDO: make_pattern_examples(12, 99).x})


def test_maximization_step_increases_the_contrastive_loss_of_fixed_features():
    method, batch = make_method("fedbr"), make_batch()
    model = make_model(method)
    maximize, _ = make_updates(method)
    params = {n: p for n, p in model.params.items() if maximize.is_trainable(n)}
    assert params
    assert all(n.startswith(PROJECTION_PREFIX) for n in params)
    with torch.no_grad():
        outputs = method.compute_outputs(model, batch)
    loss, before = maximize.loss(model, batch), method.contrastive_loss(model, outputs).item()
    assert loss.item() == pytest.approx(-1.0 * before)  # γ is 1
    with torch.no_grad():
        for p, g in zip(params.values(), torch.autograd.grad(loss, list(params.values()))):
            p -= 0.01 * g
    assert method.contrastive_loss(model, outputs).item() > before


def test_maximization_step_trains_only_the_projection():
    method = make_method("fedbr")
    model = make_model(method)
    maximize, minimize = make_updates(method)
    others = {n: p for n, p in model.params.items() if minimize.is_trainable(n)}
    assert not any(n.startswith(PROJECTION_PREFIX) for n in others)
    gradients = torch.autograd.grad(maximize.loss(model, make_batch()), list(others.values()), allow_unused=True)
    assert all(g is None for g in gradients)


def test_cross_entropy_of_pseudo_images_is_at_least_log_c():
    method, batch = make_method("fedbr"), make_batch()
    outputs = method.compute_outputs(make_model(method), batch)
    assert F.cross_entropy(outputs.pseudo_logits, outputs.pseudo_targets) >= math.log(3)
    assert torch.allclose(outputs.pseudo_targets, torch.full((12, 3), 1 / 3).double())


def test_contrastive_loss_is_the_formula_of_the_paper():
    method, batch = make_method("fedbr"), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    model = make_model(method, net)
    with torch.no_grad():
        net.encoder.layers[1].weight += 0.1 * torch.rand_like(net.encoder.layers[1].weight)  # changed since it arrived
    outputs = method.compute_outputs(model, batch)
    features = (outputs.pseudo_features, outputs.received_features, outputs.real_features)
    e1, e2, e3 = (net.projection(f) for f in features)
    near, far = (torch.exp(2 * F.cosine_similarity(e1, e)) for e in (e2, e3))
    assert torch.allclose(method.contrastive_loss(model, outputs), -torch.log(near / (near + far)).mean())
    assert not torch.allclose(outputs.pseudo_features, outputs.received_features)


def test_mixture_target_is_half_a_local_label_and_half_no_class():
    method, batch = make_method("fedbr", pseudo_data="mixture"), make_batch()
    targets = method.compute_outputs(make_model(method), batch).pseudo_targets
    assert torch.allclose(targets.sum(1), torch.ones(12).double())
    assert torch.allclose(targets.max(1).values, torch.full((12,), 0.5 + 1 / 6).double())


def test_silos_send_means_of_their_images_once():
    means = run_method(make_method("fedbr"), rounds=1).server.method_state[PSEUDO]
    assert means.shape == (12, 1, 8, 8)
    assert torch.equal(means, run_method(make_method("fedbr")).server.method_state[PSEUDO])
    images = torch.cat([silo.train.x for silo in make_pattern_silos()])
    assert means.std() < images.std()  # means of 10 are smoother than images


def test_mixture_uses_noise_images_and_queries_no_silo():
    method = make_method("fedbr", pseudo_data="mixture")
    clients = run_method(method, rounds=1).clients
    clients.query = lambda *_: pytest.fail("a silo was queried")
    assert method.initialize_server(clients).method_state[PSEUDO].shape == (12, 1, 8, 8)


def test_batch_norm_of_the_received_model_does_not_change():
    method = make_method("fedbr")
    net = build_model(method, BATCH_NORM_MODEL).train()
    model = make_model(method, net)
    before = {n: t.clone() for n, t in model.received_state.items()}
    method.loss(model, make_batch(dtype=torch.float32))
    assert all(torch.equal(before[n], t) for n, t in model.received_state.items())
    assert all(m.training for m in net.modules())


def test_mixture_is_the_mean_of_a_pseudo_image_and_a_local_image_and_of_their_labels():
    method, batch = make_method("fedbr", pseudo_data="mixture"), make_batch()
    model = make_model(method)
    partner = model.net.choice((12,), 12)
    images = (model.extras[PSEUDO].double() + batch.x[partner]) / 2
    targets = (torch.full((12, 3), 1 / 3).double() + F.one_hot(batch.y[partner], 3)) / 2
    outputs = method.compute_outputs(model, batch)
    assert torch.allclose(outputs.pseudo_targets, targets)
    assert torch.allclose(outputs.pseudo_features, model.net.encode(images).mean(1))
    assert not torch.equal(batch.y[partner], batch.y)


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
def test_one_training_step_moves_batch_norm_statistics_once(engine):
    method = make_method("fedbr", local=LocalTraining(batch_size=24, epochs=1))  # one batch per round
    silos = make_pattern_silos((24, 24))
    clients = engine(silos, build_model(method, BATCH_NORM_MODEL))
    server = method.initialize_server(clients)
    broadcast = method.make_broadcast(clients, server)._replace(round=1)
    for reply in clients.fit(method, broadcast, evaluate=False):
        counts = [t for n, t in reply.tensors.items() if n.endswith("num_batches_tracked")]
        assert counts
        assert all(int(count) == 1 for count in counts)
        moved = {n: t for n, t in reply.tensors.items() if n.endswith("running_mean")}
        images = torch.cat([clients.silos[reply.silo_name].train.x, server.method_state[PSEUDO].to(torch.float32)])
        net = build_model(method, BATCH_NORM_MODEL).train()
        net.encode(images)  # one pass over real and pseudo-images in training mode
        expected = {n: t for n, t in net.state_dict().items() if n.endswith("running_mean")}
        first = next(iter(expected))
        torch.testing.assert_close(moved[first], expected[first], rtol=1e-4, atol=1e-6)
