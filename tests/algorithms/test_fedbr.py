import math

import torch
import torch.nn.functional as F
from federations import NORMED, PLAIN, batch, images, method, model_of, network, run, silos

from uefl.algorithms.fedbr import PROJECTION, PSEUDO
from uefl.federation import Broadcast


def steps(of):
    return of.updates(Broadcast(1, {}, (), torch.ones(0, 0)))


def pseudo():
    return {PSEUDO: images(12, 99).x}


def test_the_maximum_step_raises_the_contrast_for_fixed_features():
    of, b = method("fedbr"), batch()
    model = model_of(network(of, PLAIN).double().eval(), sent=pseudo())
    up, _ = steps(of)
    mine = {n: p for n, p in model.params.items() if up.learns(n)}
    assert mine
    assert all(n.startswith(PROJECTION) for n in mine)
    before = up.loss(model, b)
    with torch.no_grad():
        for p, g in zip(mine.values(), torch.autograd.grad(before, list(mine.values()))):
            p -= 0.01 * g
    assert up.loss(model, b) < before  # the loss is −T


def test_only_the_projection_feels_the_maximum_step():
    of = method("fedbr")
    model = model_of(network(of, PLAIN).double().eval(), sent=pseudo())
    up, down = steps(of)
    others = {n: p for n, p in model.params.items() if down.learns(n)}
    assert not any(n.startswith(PROJECTION) for n in others)
    found = torch.autograd.grad(up.loss(model, batch()), list(others.values()), allow_unused=True)
    assert all(g is None for g in found)


def test_no_class_costs_at_least_log_c():
    of, b = method("fedbr"), batch()
    seen = of.seen(model_of(network(of, PLAIN).double().eval(), sent=pseudo()), b)
    assert F.cross_entropy(seen.pseudo_logits, seen.target) >= math.log(3)
    assert torch.allclose(seen.target, torch.full((12, 3), 1 / 3).double())


def test_the_contrast_is_the_one_of_the_paper():
    of, b = method("fedbr"), batch()
    net = network(of, PLAIN).double().eval()
    model = model_of(net, sent=pseudo())
    with torch.no_grad():
        net.encoder.layers[1].weight += 0.1 * torch.rand_like(net.encoder.layers[1].weight)  # moved since it arrived
    seen = of.seen(model, b)
    e1, e2, e3 = (net.projection(f) for f in (seen.pseudo, seen.received, seen.real))
    near, far = (torch.exp(2 * F.cosine_similarity(e1, e)) for e in (e2, e3))
    found = of.contrast(model, seen.pseudo, seen.received, seen.real)
    assert torch.allclose(found, -torch.log(near / (near + far)).mean())
    assert not torch.allclose(seen.pseudo, seen.received)


def test_a_mixture_is_half_a_local_image_and_half_its_label():
    of, b = method("fedbr", pseudo="mixture"), batch()
    target = of.seen(model_of(network(of, PLAIN).double().eval(), sent=pseudo()), b).target
    assert torch.allclose(target.sum(1), torch.ones(12).double())
    assert torch.allclose(target.max(1).values, torch.full((12,), 0.5 + 1 / 6).double())


def test_silos_give_means_of_their_own_images_once():
    done = run(method("fedbr"), rounds=1)
    means = done.server.memory[PSEUDO]
    assert means.shape == (12, 1, 8, 8)
    assert torch.equal(means, run(method("fedbr")).server.memory[PSEUDO])
    spread = torch.cat([s.train.x for s in silos()]).std()
    assert means.std() < spread  # means of 10 are smoother than images


def test_noise_stands_in_for_a_public_data_set_and_no_image_is_asked_for():
    asked = []
    of = method("fedbr", pseudo="mixture")
    clients = run(of, rounds=1).clients
    clients.ask = lambda *a: asked.append(a) or iter(())
    assert of.start(clients).memory[PSEUDO].shape == (12, 1, 8, 8)
    assert not asked


def test_the_received_models_norms_do_not_move():
    of = method("fedbr")
    net = network(of, NORMED).train()
    model = model_of(net, sent={PSEUDO: images(12, 99).x})
    before = {n: t.clone() for n, t in model.received.items()}
    of.loss(model, batch(dtype=torch.float32))
    assert all(torch.equal(before[n], t) for n, t in model.received.items())
    assert all(m.training for m in net.modules())
