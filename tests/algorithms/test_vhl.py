"""VHL: virtual classes of noise images, and features aligned with them."""

import pytest
import torch
import torch.nn.functional as F
from harness import MLP_MODEL, bind_model, build_model, make_batch, make_method, max_difference, run_method

from uefl.algorithms.noise_images import make_noise_images
from uefl.algorithms.vhl import VIRTUAL, supervised_contrastive_loss


def test_network_has_an_output_per_virtual_class():
    assert build_model(make_method("vhl"))(make_batch(dtype=torch.float32).x).logits.shape[-1] == 6


def test_zero_weights_are_fedavg_on_the_wider_network():
    vhl = make_method("vhl", virtual_weight=0.0, align_weight=0.0, contrast_weight=0.0)
    one = run_method(vhl, model=MLP_MODEL, dtype=torch.float64)
    other = run_method(make_method("fedavg"), net=build_model(vhl, MLP_MODEL), dtype=torch.float64)
    assert max_difference(one.server.model_state, other.server.model_state) < 1e-9


def test_virtual_images_depend_only_on_the_seed_and_never_change():
    method = make_method("vhl")
    first, last = (run_method(method, rounds=rounds).server.method_state[VIRTUAL] for rounds in (1, None))
    assert torch.equal(first, last)
    assert first.shape == (15, 1, 8, 8)
    assert torch.equal(first, make_noise_images(0, VIRTUAL, 3, 5, 1))
    assert not torch.equal(first, make_noise_images(1, VIRTUAL, 3, 5, 1))


def test_images_of_one_virtual_class_are_similar():
    x = make_noise_images(0, VIRTUAL, 3, 50, 1).reshape(3, 50, -1)
    assert x.std(1).mean() == pytest.approx(0.5, abs=0.05)  # 50 images: the deviation is known to 10 % per pixel
    assert x.mean(1).std(0).mean() > 0.5  # of three means ~ N(0, 1), 0.89 is expected


def test_supervised_contrastive_loss_is_the_formula_of_the_paper():
    torch.manual_seed(0)
    f, y = F.normalize(torch.randn(6, 4).double(), dim=1), torch.tensor([0, 0, 1, 1, 1, 2])
    total = 0.0
    for i in range(6):
        others = [a for a in range(6) if a != i]
        denominator = sum(torch.exp(f[i] @ f[a] / 0.07) for a in others)
        partners = [p for p in others if y[p] == y[i]]
        for p in partners:  # the last one has none and counts as 0
            total -= torch.log(torch.exp(f[i] @ f[p] / 0.07) / denominator) / len(partners)
    assert torch.allclose(supervised_contrastive_loss(f, y, 0.07), total / 6)


def test_cross_entropy_uses_shifted_virtual_labels_and_alignment_unshifted_ones():
    method, batch = make_method("vhl", align_weight=0.0, contrast_weight=0.0), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    images = make_noise_images(0, VIRTUAL, 3, 5, 1)
    indices = net.choice((12,), 15)
    virtual_images, virtual_classes = images[indices].double(), indices // 5
    virtual_loss = F.cross_entropy(net(virtual_images).logits[0], virtual_classes + 3)
    expected = F.cross_entropy(net(batch.x).logits[0], batch.y) + virtual_loss
    model = bind_model(net, extras={VIRTUAL: images})
    assert torch.allclose(method.loss(model, batch), expected)
    features = torch.cat([net.extract_features(batch.x), net.extract_features(virtual_images)])
    f, y = F.normalize(features, dim=1), torch.cat([batch.y, virtual_classes])
    aligned = make_method("vhl", contrast_weight=0.0).loss(model, batch)
    assert torch.allclose(aligned - expected, supervised_contrastive_loss(f, y, 0.07))
    contrasted = make_method("vhl", align_weight=0.0).loss(model, batch)
    assert torch.allclose(contrasted - expected, 0.1 * supervised_contrastive_loss(f[12:], virtual_classes, 0.07))


def test_alignment_moves_real_features_to_virtual_ones_and_not_the_reverse():
    """The gradient of the encoder is that of a loss in which the virtual features are constants."""
    batch = make_batch()
    aligned = make_method("vhl", virtual_weight=0.0, contrast_weight=0.0)
    net = build_model(aligned, MLP_MODEL).double().eval()
    images, weight = make_noise_images(0, VIRTUAL, 3, 5, 1), net.encoder.layers[1].weight
    indices = net.choice((12,), 15)
    real = F.normalize(net.extract_features(batch.x), dim=1)
    virtual = F.normalize(net.extract_features(images[indices].double()), dim=1)
    labels, task_loss = torch.cat([batch.y, indices // 5]), F.cross_entropy(net(batch.x).logits[0], batch.y)

    def compute_gradient(loss):
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    constant, moving = (
        compute_gradient(task_loss + supervised_contrastive_loss(torch.cat([real, targets]), labels, 0.07))
        for targets in (virtual.detach(), virtual)
    )
    gradient = compute_gradient(aligned.loss(bind_model(net, extras={VIRTUAL: images}), batch))
    assert torch.allclose(gradient, constant, atol=1e-12)
    assert not torch.allclose(gradient, moving, atol=1e-3)


def test_alignment_ends_after_a_number_of_local_epochs():
    method, batch = make_method("vhl", align_epochs=1), make_batch()
    net = build_model(method, MLP_MODEL).double().eval()
    model = bind_model(net, extras={VIRTUAL: make_noise_images(0, VIRTUAL, 3, 5, 1)})
    without_alignment = make_method("vhl", align_weight=0.0, contrast_weight=0.0).loss(model, batch)
    assert method.loss(model, batch) != without_alignment
    assert method.loss(model, batch._replace(epoch=1)) == without_alignment
    (update,) = method.make_updates(None)
    assert update.per_epoch
