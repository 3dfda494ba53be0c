import pytest
import torch
import torch.nn.functional as F
from federations import PLAIN, batch, distance, method, model_of, network, run

from uefl.algorithms.patterns import patterns
from uefl.algorithms.vhl import VIRTUAL, alike


def test_there_is_an_output_for_every_virtual_class():
    assert network(method("vhl"))(batch(dtype=torch.float32).x).logits.shape[-1] == 6


def test_without_its_terms_it_is_fedavg_on_the_wider_network():
    of = method("vhl", virtual=0.0, align=0.0, contrast=0.0)
    a = run(of, model=PLAIN, dtype=torch.float64)
    b = run(method("fedavg"), net=network(of, PLAIN), dtype=torch.float64)
    assert distance(a.server.state, b.server.state) < 1e-9


def test_virtual_data_depend_on_the_seed_alone_and_stay_the_same():
    of = method("vhl")
    first, last = run(of, rounds=1).server.memory[VIRTUAL], run(of).server.memory[VIRTUAL]
    assert torch.equal(first, last)
    assert first.shape == (15, 1, 8, 8)
    assert not torch.equal(first, patterns(1, VIRTUAL, 3, 5, 1))


def test_images_of_one_virtual_class_are_alike():
    x = patterns(0, VIRTUAL, 3, 50, 1).reshape(3, 50, -1)
    assert x.std(1).mean() == pytest.approx(0.5, abs=0.05)
    assert x.mean(1).std(0).mean() > 0.5


def test_the_contrast_is_the_one_of_the_paper():
    torch.manual_seed(0)
    f, y = F.normalize(torch.randn(6, 4).double(), dim=1), torch.tensor([0, 0, 1, 1, 1, 2])
    total = 0.0
    for i in range(6):
        others = [a for a in range(6) if a != i]
        below = sum(torch.exp(f[i] @ f[a] / 0.07) for a in others)
        partners = [p for p in others if y[p] == y[i]]
        for p in partners:  # the last one has none and counts as 0
            total -= torch.log(torch.exp(f[i] @ f[p] / 0.07) / below) / len(partners)
    assert torch.allclose(alike(f, y, 0.07), total / 6)


def test_alignment_takes_plain_labels_and_cross_entropy_shifted_ones():
    of, b = method("vhl", align=0.0, contrast=0.0), batch()
    net = network(of, PLAIN).double().eval()
    images = patterns(0, VIRTUAL, 3, 5, 1)
    index = net.choice((12,), 15)
    virtual = net(images[index].double()).logits[0]
    expected = F.cross_entropy(net(b.x).logits[0], b.y) + F.cross_entropy(virtual, index // 5 + 3)
    model = model_of(net, sent={VIRTUAL: images})
    assert torch.allclose(of.loss(model, b), expected)
    f = F.normalize(torch.cat([net.features(b.x), net.features(images[index].double())]), dim=1)
    full = method("vhl", contrast=0.0).loss(model, b)
    assert torch.allclose(full - expected, alike(f, torch.cat([b.y, index // 5]), 0.07))
    assert torch.allclose(method("vhl", align=0.0).loss(model, b) - expected, 0.1 * alike(f[12:], index // 5, 0.07))


def test_virtual_features_are_a_fixed_target_of_the_alignment():
    torch.manual_seed(0)
    f = torch.randn(4, 3, requires_grad=True)
    y = torch.tensor([0, 1, 0, 1])
    alike(torch.cat([f[:2], f[2:].detach()]), y, 0.07).backward()
    assert f.grad[:2].abs().sum() > 0
    assert f.grad[2:].abs().sum() == 0


def test_alignment_ends_after_some_local_epochs():
    of, b = method("vhl", align_epochs=1), batch()
    model = model_of(network(of, PLAIN).double().eval(), sent={VIRTUAL: patterns(0, VIRTUAL, 3, 5, 1)})
    without = method("vhl", align=0.0, contrast=0.0).loss(model, b)
    assert of.loss(model, b) != without
    assert of.loss(model, b._replace(epoch=1)) == without
