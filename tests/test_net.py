"""The network: what samples, what is shared between samples, and what an ensemble's members are to each other."""

import pytest
import torch
from stripes import CLASSES, encoder, images
from torch import nn

from uefl.models.net import Ensemble, Net
from uefl.noise import Dropout, key, noises, set_key

X = images(6, 0).x


def net(body=None, seed=0, **fields):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Net(body or encoder(), CLASSES, (1, 8, 8), **{"hidden": 16, "dropout": 0.3, **fields}).with_codebook(
            2, 6
        )
    return made.eval()


def samples(made, passes=20, address=0):
    set_key(noises(made), address)
    with torch.no_grad():
        return made.examine(X, passes).samples


def all_differ(found):
    return all(not torch.equal(found[i], found[j]) for i in range(len(found)) for j in range(i))


@pytest.mark.parametrize("place", ["hidden", "logits"])
def test_twenty_dropout_passes_differ(place):
    found = samples(net(dropout_at=place))
    assert found.shape == (20, 6, CLASSES)
    assert all_differ(found)


def test_without_dropout_all_passes_are_the_plain_prediction():
    made = net(dropout=0.0)
    seen = made.examine(X, 3)
    assert torch.allclose(seen.samples, seen.logits.expand(3, -1, -1), atol=1e-6)


def test_the_plain_prediction_is_that_of_evaluation_mode():
    made = net()
    assert torch.equal(made.examine(X, 5).logits, made(X).logits)


def test_the_mean_of_many_samples_is_near_the_plain_prediction_of_a_linear_head():
    """Dropout keeps the mean: on the logits it is exact but for chance."""
    made = net(dropout_at="logits", dropout=0.1)
    made.classifier[2].p = 0.0  # only the layer on the logits draws
    found, plain = samples(made, 20_000).mean(0), made(X).logits[0]
    assert torch.allclose(found, plain, atol=0.02)


def test_examining_moves_nothing_and_leaves_every_mode():
    made = net()
    before = {n: t.clone() for n, t in made.state_dict().items()}
    made.examine(X, 5)
    assert all(torch.equal(t, before[n]) for n, t in made.state_dict().items())
    assert not any(m.training for m in made.modules())


def test_features_are_computed_once_where_dropout_comes_after_them():
    made, calls = net(), []
    made.encoder.register_forward_hook(lambda *_: calls.append(1))
    made.examine(X, 20)
    assert len(calls) == 1


def drawing(layer):
    return nn.Sequential(encoder(), layer)


@pytest.mark.parametrize("layer", [Dropout(0.2), nn.Dropout(0.2), nn.Dropout2d(0.2)])
@pytest.mark.parametrize("head", [0.0, 0.3])
def test_passes_differ_where_the_encoder_draws_itself(layer, head):
    torch.manual_seed(0)
    assert all_differ(samples(net(drawing(layer), dropout=head)))


def test_the_head_draws_anew_in_every_pass_where_the_encoder_draws_itself():
    """A layer that drops next to nothing makes the encoder draw; the head must not repeat its mask."""
    assert all_differ(samples(net(drawing(nn.Dropout(1e-9)))))
    assert all_differ(samples(net(drawing(Dropout(1e-9)))))


def test_one_address_gives_the_same_samples_and_another_gives_others():
    made = net(drawing(Dropout(0.2)))
    one = samples(made, address=key("one"))
    assert torch.equal(one, samples(made, address=key("one")))
    assert not torch.equal(one, samples(made, address=key("two")))


def test_passes_do_not_change_what_training_draws_next():
    made = net(drawing(Dropout(0.2))).train()
    set_key(noises(made), 7)
    before = made.encoder[1](X)
    made.eval()
    samples(made)
    made.train()
    set_key(noises(made), 7)
    assert torch.equal(made.encoder[1](X), before)


def test_features_are_normalised_before_they_are_cut():
    made = net()
    z = made.encode(X)
    assert torch.allclose(z.mean(-1), torch.zeros(6, 4), atol=1e-5)
    assert torch.allclose(z.square().mean(-1), torch.ones(6, 4), atol=1e-2)
    assert torch.equal(made.segments(X)[0], z.reshape(-1, 4))
    assert not torch.allclose(net(normalise="none").encode(X).mean(-1), torch.zeros(6, 4), atol=1e-2)


@pytest.mark.parametrize(
    "body",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8)),  # [B, d]
        nn.Sequential(nn.Flatten(2), nn.Linear(64, 8)),  # [B, l, d]
        nn.Conv2d(1, 8, 3),  # [B, d, h, w]
    ],
)
def test_any_encoder_will_do(body):
    seen = net(body)(X)
    assert seen.logits.shape == (1, 6, CLASSES)
    assert seen.chosen.shape == (1, 6, seen.chosen.shape[2], 2)


def test_building_leaves_the_encoder_in_the_mode_it_was_in():
    made = Net(encoder().train(), CLASSES, (1, 8, 8))
    assert all(m.training for m in made.encoder.modules())
    assert made.encoder[1].num_batches_tracked == 0


def test_members_of_an_ensemble_differ_and_are_its_samples():
    made = Ensemble(lambda: net(encoder(), seed=int(torch.randint(1000, ()))), 3).eval()
    seen = made.examine(X, 20)
    assert seen.samples.shape == (3, 6, CLASSES)
    assert all_differ(seen.samples)
    for m, member in enumerate(made.members):
        assert torch.equal(seen.samples[m], member(X).logits[0])
        assert torch.equal(seen.chosen[m], member(X).chosen[0])
        assert torch.equal(made.segments(X)[m], member.segments(X)[0])
    assert seen.commitment.item() == pytest.approx(sum(m(X).commitment.item() for m in made.members))
