"""The network: which layers sample, what samples share, and how the members of an ensemble relate."""

import pytest
import torch
from harness import NUM_CLASSES, make_encoder, make_striped_examples
from torch import nn

from uefl.core.noise import Dropout, derive_key, salt_noise_layers, set_noise_key
from uefl.models.network import Ensemble, Net

X = make_striped_examples(6, 0).x


def make_net(encoder=None, seed=0, **fields):
    fields = {"hidden_size": 16, "dropout": 0.3, **fields}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net(encoder or make_encoder(), NUM_CLASSES, (1, 8, 8), **fields).add_codebook(2, 6)
    return net.eval()


def draw_samples(net, mc_samples=20, noise_key=0):
    set_noise_key(salt_noise_layers(net), noise_key)
    with torch.no_grad():
        return net.predict_with_samples(X, mc_samples).sampled_logits


def all_differ(samples):
    return all(not torch.equal(samples[i], samples[j]) for i in range(len(samples)) for j in range(i))


@pytest.mark.parametrize("dropout_at", ["hidden", "logits"])
def test_twenty_dropout_passes_differ(dropout_at):
    samples = draw_samples(make_net(dropout_at=dropout_at))
    assert samples.shape == (20, 6, NUM_CLASSES)
    assert all_differ(samples)


def test_without_dropout_all_samples_equal_the_prediction():
    prediction = make_net(dropout=0.0).predict_with_samples(X, 3)
    assert torch.allclose(prediction.sampled_logits, prediction.logits.expand(3, -1, -1), atol=1e-6)


def test_the_prediction_is_that_of_evaluation_mode():
    net = make_net()
    assert torch.equal(net.predict_with_samples(X, 5).logits, net(X).logits)


def test_the_mean_of_many_samples_is_near_the_prediction_of_a_linear_head():
    """Dropout on the logits keeps their mean."""
    net = make_net(dropout_at="logits", dropout=0.1)
    net.classifier[2].p = 0.0  # only the layer on the logits draws
    # A logit below 1 has a deviation of 1/3 under dropout 0.1: 0.02 are eight standard errors of 20,000 draws.
    assert torch.allclose(draw_samples(net, 20_000).mean(0), net(X).logits[0], atol=0.02)


def test_sampling_changes_no_tensor_and_no_mode():
    net = make_net()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    net.predict_with_samples(X, 5)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert not any(m.training for m in net.modules())


def test_features_are_computed_once_if_only_the_classifier_has_dropout():
    net, calls = make_net(), []
    net.encoder.register_forward_hook(lambda *_: calls.append(1))
    net.predict_with_samples(X, 20)
    assert len(calls) == 1


def make_random_encoder(layer):
    return nn.Sequential(make_encoder(), layer)


@pytest.mark.parametrize("layer", [Dropout(0.2), nn.Dropout(0.2), nn.Dropout2d(0.2)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_passes_differ_if_the_encoder_has_dropout(layer, dropout):
    torch.manual_seed(0)
    assert all_differ(draw_samples(make_net(make_random_encoder(layer), dropout=dropout)))


def test_the_classifier_has_another_mask_per_pass_if_the_encoder_has_dropout():
    """Dropout with a tiny rate makes the encoder random, so only the classifier's masks can differ."""
    assert all_differ(draw_samples(make_net(make_random_encoder(nn.Dropout(1e-9)))))
    assert all_differ(draw_samples(make_net(make_random_encoder(Dropout(1e-9)))))


def test_the_same_key_gives_the_same_samples_and_another_gives_others():
    net = make_net(make_random_encoder(Dropout(0.2)))
    samples = draw_samples(net, noise_key=derive_key("one"))
    assert torch.equal(samples, draw_samples(net, noise_key=derive_key("one")))
    assert not torch.equal(samples, draw_samples(net, noise_key=derive_key("two")))


def test_passes_do_not_change_the_next_draws_of_training():
    net = make_net(make_random_encoder(Dropout(0.2))).train()
    set_noise_key(salt_noise_layers(net), 7)
    before = net.encoder[1](X)
    net.eval()
    draw_samples(net)
    net.train()
    set_noise_key(salt_noise_layers(net), 7)
    assert torch.equal(net.encoder[1](X), before)


def test_features_are_normalized_before_they_are_split_into_segments():
    net = make_net()
    z = net.encode(X)
    assert torch.allclose(z.mean(-1), torch.zeros(6, 4), atol=1e-5)
    assert torch.allclose(z.square().mean(-1), torch.ones(6, 4), atol=1e-2)  # layer norm adds 1e-5 to variances > 1e-3
    assert torch.equal(net.encode_segments(X)[0], z.reshape(-1, 4))
    assert not torch.allclose(make_net(feature_norm="none").encode(X).mean(-1), torch.zeros(6, 4), atol=1e-2)


@pytest.mark.parametrize(
    "encoder",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8)),  # [B, d]
        nn.Sequential(nn.Flatten(2), nn.Linear(64, 8)),  # [B, l, d]
        nn.Conv2d(1, 8, 3),  # [B, d, h, w]
    ],
)
def test_encoders_may_return_vectors_tokens_or_maps(encoder):
    prediction = make_net(encoder)(X)
    assert prediction.logits.shape == (1, 6, NUM_CLASSES)
    assert prediction.codeword_indices.shape == (1, 6, prediction.codeword_indices.shape[2], 2)


def test_building_a_network_keeps_the_mode_of_the_encoder():
    net = Net(make_encoder().train(), NUM_CLASSES, (1, 8, 8))
    assert all(m.training for m in net.encoder.modules())
    assert net.encoder[1].num_batches_tracked == 0


def test_members_of_an_ensemble_differ_and_are_its_samples():
    ensemble = Ensemble(lambda: make_net(make_encoder(), seed=int(torch.randint(1000, ()))), 3).eval()
    prediction = ensemble.predict_with_samples(X, 20)
    assert prediction.sampled_logits.shape == (3, 6, NUM_CLASSES)
    assert all_differ(prediction.sampled_logits)
    for m, member in enumerate(ensemble.members):
        assert torch.equal(prediction.sampled_logits[m], member(X).logits[0])
        assert torch.equal(prediction.codeword_indices[m], member(X).codeword_indices[0])
        assert torch.equal(ensemble.encode_segments(X)[m], member.encode_segments(X)[0])
    total = sum(member(X).commitment_loss.item() for member in ensemble.members)
    assert prediction.commitment_loss.item() == pytest.approx(total)
