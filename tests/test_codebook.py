"""Nearest word, straight-through gradient, L_code and perplexity, against numbers worked out by hand."""

import math

import pytest
import torch

from uefl.codebook import Codebook, perplexity, tokens, uncoded, usage
from uefl.errors import InputError


def book(words, segments=1, width=2, reduction="mean"):
    made = Codebook(width, segments, len(words), reduction)
    with torch.no_grad():
        made.words.copy_(torch.tensor(words))
    return made


def test_each_segment_becomes_the_nearest_word():
    coded = book([[0.0, 0.0], [1.0, 1.0], [-3.0, 2.0]])(
        torch.tensor([[[0.9, 0.7], [-2.0, 2.0]], [[0.1, -0.2], [5, 5]]])
    )
    assert coded.chosen[..., 0].tolist() == [[1, 2], [0, 1]]
    assert torch.allclose(coded.z, torch.tensor([[[1.0, 1.0], [-3.0, 2.0]], [[0.0, 0.0], [1.0, 1.0]]]))


def test_the_nearest_word_is_the_one_of_least_euclidean_distance():
    torch.manual_seed(0)
    made, z = Codebook(8, 2, 50).double(), torch.randn(5, 7, 8, dtype=torch.float64)
    expected = torch.cdist(z.reshape(-1, 4), made.words).argmin(1)
    assert torch.equal(made(z).chosen.reshape(-1), expected)


def test_segments_share_one_book():
    """Both halves of a token find the same word, and its gradient hears from both."""
    made = book([[0.0, 0.0], [1.0, 1.0]], segments=2, width=4)
    coded = made(torch.tensor([[[0.9, 0.9, 1.2, 1.2]]]))
    assert coded.chosen.tolist() == [[[1, 1]]]
    coded.codeword.backward()
    # d/dc of the mean over 4 elements of (c − z)²: 2/4 · Σ over both segments of (c − z)
    assert torch.allclose(made.words.grad, torch.tensor([[0.0, 0.0], [0.5 * (0.1 - 0.2)] * 2]))


def test_the_code_loss_is_the_formula_on_hand_checked_numbers():
    made = book([[0.0, 0.0], [1.0, 1.0]])
    z = torch.tensor([[[0.8, 0.6]], [[0.1, 0.3]]], requires_grad=True)
    coded = made(z)
    value = (0.2**2 + 0.4**2 + 0.1**2 + 0.3**2) / 4  # = .075
    assert coded.commitment.item() == pytest.approx(value)
    assert coded.codeword.item() == pytest.approx(value)


def test_the_sum_is_over_the_channels_of_a_token():
    z = torch.tensor([[[0.8, 0.6], [0.1, 0.3]]])
    coded = book([[0.0, 0.0], [1.0, 1.0]], reduction="sum")(z)
    assert coded.commitment.item() == pytest.approx((0.2**2 + 0.4**2 + 0.1**2 + 0.3**2) / 2)  # per token, two tokens


def test_the_commitment_moves_the_features_alone():
    made, z = book([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    made(z).commitment.backward()
    assert torch.allclose(z.grad, torch.tensor([[[-0.2, -0.4]]]))  # 2/2 (z − c)
    assert made.words.grad is None


def test_the_codeword_term_moves_the_words_alone():
    made, z = book([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    made(z).codeword.backward()
    assert torch.allclose(made.words.grad, torch.tensor([[0.0, 0.0], [0.2, 0.4]]))  # 2/2 (c − z)
    assert z.grad is None


def test_the_gradient_passes_straight_through_to_the_features_and_not_to_the_words():
    made, z = book([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    weight = torch.tensor([[3.0, -5.0]])
    (made(z).z @ weight.t()).square().sum().backward()
    assert torch.allclose(z.grad, 2 * -2.0 * weight[None])  # taken at the word (1, 1): 2 (w·c) w
    assert made.words.grad is None


def test_a_word_that_is_not_chosen_has_no_gradient_among_many():
    torch.manual_seed(0)
    made, z = Codebook(4, 1, 5000).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    coded = made(z)
    coded.codeword.backward()
    expected = torch.zeros_like(made.words)
    for where, i in enumerate(coded.chosen.reshape(-1).tolist()):
        expected[i] += 2 * (made.words[i].detach() - z.reshape(-1, 4)[where]) / z.numel()
    assert torch.allclose(made.words.grad, expected, atol=1e-15)


def test_the_way_back_holds_nothing_of_the_size_tokens_by_words():
    made, held = Codebook(8, 2, 512), []
    z = torch.randn(16, 16, 8, requires_grad=True)  # 512 segments
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        coded = made(z)
        loss = coded.z.square().sum() + coded.commitment + coded.codeword
    loss.backward()
    assert held
    assert max(held) <= max(z.numel(), made.words.numel())


@pytest.mark.parametrize("shape", [(3, 6, 2, 5), (3, 10, 6), (3, 6)])
def test_any_encoder_output_becomes_tokens(shape):
    z = torch.randn(shape)
    found = tokens(z)
    assert found.shape == (3, 10 if len(shape) > 2 else 1, 6)
    if len(shape) == 4:
        assert torch.equal(found[1, 7], z[1, :, 1, 2])  # token 7 of two rows of five
    elif len(shape) == 2:
        assert torch.equal(found[:, 0], z)
    else:
        assert torch.equal(found, z)


def test_other_shapes_and_segments_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match=r"\(3,\)"):
        tokens(torch.zeros(3))
    with pytest.raises(InputError, match="segments=3 does not divide the encoder's 8 channels"):
        Codebook(8, 3)


def test_without_words_features_pass_as_they_are():
    z = torch.randn(2, 3, 4)
    coded = Codebook(4, 2, 0)(z)
    assert torch.equal(coded.z, z)
    assert coded.chosen.shape == uncoded(z).chosen.shape == (2, 3, 0)
    assert coded.commitment == coded.codeword == 0


def test_uniform_use_has_the_perplexity_of_all_words():
    assert perplexity(usage(torch.arange(7).repeat(5), 7)).item() == pytest.approx(7)


def test_one_word_has_perplexity_one_and_words_nobody_uses_do_not_count():
    assert perplexity(usage(torch.zeros(2, 3, 4, dtype=torch.int64), 9)).item() == pytest.approx(1)
    half_and_quarters = perplexity(torch.tensor([2.0, 1.0, 1.0, 0.0]))
    assert half_and_quarters.item() == pytest.approx(math.exp(1.5 * math.log(2)))
