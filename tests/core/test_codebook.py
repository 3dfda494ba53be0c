"""Nearest codeword, straight-through gradient, L_code and perplexity, compared with numbers computed by hand."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
import torch._dynamo  # looks functions up when it is imported: before a test replaces `is_compiling`
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uefl.core.codebook import (
    Codebook,
    bypass_quantization,
    count_codewords,
    multiply_loss,
    perplexity,
    sum_by_codeword,
    to_tokens,
)
from uefl.core.errors import InputError

TWO_CODEWORDS = [[0.0, 0.0], [1.0, 1.0]]


def make_codebook(codewords, segments=1, num_features=2, reduction="mean", **options):
    codebook = Codebook(num_features, segments, len(codewords), reduction, **options)
    with torch.no_grad():
        codebook.codewords.copy_(torch.tensor(codewords))
    return codebook


def test_each_segment_is_replaced_by_the_nearest_codeword():
    codebook = make_codebook([[0.0, 0.0], [1.0, 1.0], [-3.0, 2.0]])
    quantized = codebook(torch.tensor([[[0.9, 0.7], [-2.0, 2.0]], [[0.1, -0.2], [5, 5]]]))
    assert quantized.codeword_indices[..., 0].tolist() == [[1, 2], [0, 1]]
    assert torch.allclose(quantized.z, torch.tensor([[[1.0, 1.0], [-3.0, 2.0]], [[0.0, 0.0], [1.0, 1.0]]]))


def test_nearest_codeword_has_the_least_euclidean_distance():
    torch.manual_seed(0)
    codebook, z = Codebook(8, 2, 50).double(), torch.randn(5, 7, 8, dtype=torch.float64)
    expected = torch.cdist(z.reshape(-1, 4), codebook.codewords).argmin(1)
    assert torch.equal(codebook(z).codeword_indices.reshape(-1), expected)


def test_nearest_codeword_is_found_in_full_precision():
    """Half precision would choose another codeword for 40 of these 1400 segments."""
    torch.manual_seed(0)
    codebook, z = Codebook(8, 2, 500), torch.randn(100, 7, 8)
    expected = codebook(z).codeword_indices
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(codebook(z).codeword_indices, expected)


def test_codebook_enters_no_autocast_context_without_need(monkeypatch):
    monkeypatch.setattr(torch, "autocast", None)
    assert make_codebook(TWO_CODEWORDS)(torch.tensor([[[0.9, 0.8]]])).codeword_indices.item() == 1


def test_all_segments_share_one_codebook():
    """Both halves of a token use the same codeword, and its gradient is the sum over both."""
    codebook = make_codebook(TWO_CODEWORDS, segments=2, num_features=4)
    quantized = codebook(torch.tensor([[[0.9, 0.9, 1.2, 1.2]]]))
    assert quantized.codeword_indices.tolist() == [[[1, 1]]]
    quantized.codebook_loss.backward()
    # d/dc of the mean over 4 elements of (c − z)²: 2/4 · Σ over both segments of (c − z)
    assert torch.allclose(codebook.codewords.grad, torch.tensor([[0.0, 0.0], [0.5 * (0.1 - 0.2)] * 2]))


def test_both_terms_of_the_code_loss_are_the_mean_squared_distance():
    z = torch.tensor([[[0.8, 0.6]], [[0.1, 0.3]]], requires_grad=True)
    quantized = make_codebook(TWO_CODEWORDS)(z)
    expected = (0.2**2 + 0.4**2 + 0.1**2 + 0.3**2) / 4  # = .075
    assert quantized.commitment_loss.item() == pytest.approx(expected)
    assert quantized.codebook_loss.item() == pytest.approx(expected)


def test_reduction_sum_sums_over_the_channels_of_a_token():
    z = torch.tensor([[[0.8, 0.6], [0.1, 0.3]]])
    quantized = make_codebook(TWO_CODEWORDS, reduction="sum")(z)
    expected = (0.2**2 + 0.4**2 + 0.1**2 + 0.3**2) / 2  # per token, of two tokens
    assert quantized.commitment_loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_reduction_sum_does_not_depend_on_the_number_of_segments(segments):
    """‖·‖² is that of a whole token, however many codewords it consists of."""
    z = torch.tensor([[[0.8, 0.6, 0.1, 0.3], [0.9, 0.2, 0.3, 0.4]]], requires_grad=True)
    ones_and_zeros = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * (4 // segments)).reshape(-1, 4 // segments)
    quantized = make_codebook(ones_and_zeros.tolist(), segments, 4, "sum")(z)
    expected = (0.2**2 + 0.4**2 + 0.1**2 + 0.3**2 + 0.1**2 + 0.2**2 + 0.3**2 + 0.4**2) / 2  # per token, of two
    assert quantized.commitment_loss.item() == pytest.approx(expected)
    assert quantized.codebook_loss.item() == pytest.approx(expected)


def test_commitment_loss_trains_only_the_features():
    codebook, z = make_codebook(TWO_CODEWORDS), torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    codebook(z).commitment_loss.backward()
    assert torch.allclose(z.grad, torch.tensor([[[-0.2, -0.4]]]))  # 2/2 (z − c)
    assert codebook.codewords.grad is None


def test_codebook_loss_trains_only_the_codewords():
    codebook, z = make_codebook(TWO_CODEWORDS), torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    codebook(z).codebook_loss.backward()
    assert torch.allclose(codebook.codewords.grad, torch.tensor([[0.0, 0.0], [0.2, 0.4]]))  # 2/2 (c − z)
    assert z.grad is None


def test_straight_through_gradient_reaches_the_features_and_not_the_codewords():
    codebook, z = make_codebook(TWO_CODEWORDS), torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    weight = torch.tensor([[3.0, -5.0]])
    (codebook(z).z @ weight.t()).square().sum().backward()
    assert torch.allclose(z.grad, 2 * -2.0 * weight[None])  # at the codeword (1, 1): 2 (w·c) w
    assert codebook.codewords.grad is None


@pytest.mark.parametrize("is_compiling", [False, True])
def test_gradient_of_the_task_reaches_features_and_codewords_if_it_is_set(is_compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    codebook = make_codebook(TWO_CODEWORDS, codeword_gradient="task")
    z, weight = torch.tensor([[[0.8, 0.6]]], requires_grad=True), torch.tensor([[3.0, -5.0]])
    quantized = codebook(z)
    assert torch.equal(quantized.z, torch.tensor([[[1.0, 1.0]]]))
    (quantized.z @ weight.t()).square().sum().backward()
    assert torch.allclose(z.grad, 2 * -2.0 * weight[None])  # as without: 2 (w·c) w
    assert torch.allclose(codebook.codewords.grad, torch.stack([torch.zeros(2), 2 * -2.0 * weight[0]]))


@pytest.mark.parametrize("codeword_gradient", ["code", "task"])
def test_gate_mixes_codeword_and_feature(codeword_gradient):
    codebook = make_codebook(TWO_CODEWORDS, codeword_gradient=codeword_gradient, gate="fixed", gate_value=0.75)
    z, weight = torch.tensor([[[0.8, 0.6]]], requires_grad=True), torch.tensor([3.0, -5.0])
    quantized = codebook(z)
    assert torch.allclose(quantized.z, torch.tensor([[[0.95, 0.9]]]))  # .75 · 1 + .25 · z
    (quantized.z * weight).sum().backward()
    assert torch.allclose(z.grad, weight[None, None])  # straight through: no part of it is lost
    if codeword_gradient == "task":
        assert torch.allclose(codebook.codewords.grad[1], 0.75 * weight)
    else:
        assert codebook.codewords.grad is None


@pytest.mark.parametrize("codeword_gradient", ["code", "task"])
def test_gate_fixed_at_one_equals_no_gate_bit_by_bit(codeword_gradient):
    torch.manual_seed(0)
    outputs, z = [], torch.randn(4, 5, 8, requires_grad=True)
    codewords = torch.randn(6, 4).tolist()
    for options in ({}, {"gate": "fixed", "gate_value": 1.0}):
        codebook = make_codebook(codewords, 2, 8, codeword_gradient=codeword_gradient, **options)
        quantized = codebook(z)
        loss = quantized.z.square().sum() + quantized.codebook_loss + quantized.commitment_loss
        outputs.append([quantized.z, *torch.autograd.grad(loss, (z, codebook.codewords))])
    assert all(torch.equal(one, other) for one, other in zip(*outputs))


def test_learned_gate_starts_at_its_value_and_has_a_gradient_per_channel():
    codebook = make_codebook(TWO_CODEWORDS, gate="learned", gate_value=0.75)
    z = torch.tensor([[[0.8, 0.6]]], requires_grad=True)
    quantized = codebook(z)
    assert torch.allclose(quantized.z, torch.tensor([[[0.95, 0.9]]]))
    quantized.z.sum().backward()
    # d/dlogit of g · c + (1 − g) · z is g (1 − g) (c − z)
    assert torch.allclose(codebook.gate_logits.grad, 0.75 * 0.25 * torch.tensor([0.2, 0.4]))
    assert torch.allclose(z.grad, torch.ones(1, 1, 2))


class CountOperations(TorchDispatchMode):
    """Count tensor operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"codeword_gradient": "task"}, {"gate": "fixed", "gate_value": 0.1}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_features_without_gradient_train_codewords_alike_with_one_distance(reduction, options):
    torch.manual_seed(0)
    codebook, z = Codebook(6, 2, 5, reduction, **options), torch.randn(7, 3, 6)
    results = []
    for features in (z, z.clone().requires_grad_()):
        with CountOperations() as operations:
            quantized = codebook(features)
        loss = quantized.z.square().sum() + 0.3 * quantized.commitment_loss + quantized.codebook_loss
        (gradient,) = torch.autograd.grad(loss, [codebook.codewords])
        results.append((*quantized, gradient))
        assert operations.counts["mse_loss"] == (2 if features.requires_grad else 1)
    for constant, trained in zip(*results):
        assert torch.equal(constant, trained)
    assert not results[0][2].requires_grad


def test_features_under_vmap_keep_their_gradient():
    """There, tensors do not tell that they have one."""
    torch.manual_seed(0)
    codebook, z = Codebook(6, 2, 5, codeword_gradient="task"), torch.randn(4, 7, 3, 6, requires_grad=True)

    def loss(z):
        quantized = codebook(z)
        return quantized.z.sum() + quantized.commitment_loss

    (stacked,) = torch.autograd.grad(vmap(loss)(z).sum(), [z])
    (single,) = torch.autograd.grad(torch.stack([loss(one) for one in z]).sum(), [z])
    assert torch.allclose(stacked, single)
    assert stacked.abs().min() > 0


def test_a_loss_times_one_is_the_loss_itself():
    loss = torch.tensor(3.0)
    assert multiply_loss(1.0, loss) is loss
    assert multiply_loss(2.0, loss) == 6


def test_only_used_codewords_have_a_gradient():
    torch.manual_seed(0)
    codebook, z = Codebook(4, 1, 5000).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    quantized = codebook(z)
    quantized.codebook_loss.backward()
    expected = torch.zeros_like(codebook.codewords)
    for segment, i in zip(z.reshape(-1, 4), quantized.codeword_indices.reshape(-1).tolist()):
        expected[i] += 2 * (codebook.codewords[i].detach() - segment) / z.numel()
    assert torch.allclose(codebook.codewords.grad, expected, atol=1e-15)


def test_backward_pass_stores_no_tensor_of_tokens_times_codewords():
    codebook, stored_sizes = Codebook(8, 2, 512), []
    z = torch.randn(16, 16, 8, requires_grad=True)  # 512 segments
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored_sizes.append(t.numel()) or t, lambda t: t):
        quantized = codebook(z)
        loss = quantized.z.square().sum() + quantized.commitment_loss + quantized.codebook_loss
    loss.backward()
    assert stored_sizes
    assert max(stored_sizes) <= max(z.numel(), codebook.codewords.numel())


class LargestTensor(TorchDispatchMode):
    """Within this context, record the number of values of the largest tensor that any operation makes."""

    num_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.uefl.sum_by_codeword.default:
            with self:  # look inside
                return sum_by_codeword._init_fn(*args)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.num_values = max(self.num_values, tensor.numel())
        return outputs


def compute_code_loss(codebook, codewords, z):
    quantized = functional_call(codebook, {"codewords": codewords}, z)
    return quantized.z.square().sum() + quantized.commitment_loss + quantized.codebook_loss


@pytest.mark.parametrize(("num_silos", "is_compiling"), [(1, False), (3, False), (1, True)])
def test_backward_pass_makes_no_tensor_of_tokens_times_codewords(num_silos, is_compiling, monkeypatch):
    """All devices take this path; compiled code, which is never stacked, has a lookup of its own."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    codebook = Codebook(8, 2, 512).double()
    codewords = torch.randn(num_silos, 512, 4, dtype=torch.float64, requires_grad=True)
    z = torch.randn(num_silos, 16, 16, 8, dtype=torch.float64, requires_grad=True)  # 512 segments per silo
    compute = partial(compute_code_loss, codebook)
    losses = vmap(compute)(codewords, z) if num_silos > 1 else compute(codewords[0], z[0])
    with LargestTensor() as largest:
        gradients = torch.autograd.grad(losses.sum(), (codewords, z))
    assert 0 < largest.num_values <= max(z.numel(), codewords.numel()) < num_silos * 512 * 512
    for silo in range(num_silos):
        expected = torch.autograd.grad(compute(codewords[silo], z[silo]), (codewords, z))
        assert all(torch.allclose(g[silo], e[silo]) for g, e in zip(gradients, expected))


@pytest.mark.parametrize("shape", [(3, 6, 2, 5), (3, 10, 6), (3, 6)])
def test_every_form_of_encoder_output_becomes_tokens(shape):
    z = torch.randn(shape)
    tokens = to_tokens(z)
    assert tokens.shape == (3, 10 if len(shape) > 2 else 1, 6)
    if len(shape) == 4:
        assert torch.equal(tokens[1, 7], z[1, :, 1, 2])  # token 7 of two rows of five
    elif len(shape) == 2:
        assert torch.equal(tokens[:, 0], z)
    else:
        assert torch.equal(tokens, z)


def test_other_output_shapes_and_segments_that_do_not_divide_are_errors():
    with pytest.raises(InputError, match=r"\(3,\)"):
        to_tokens(torch.zeros(3))
    with pytest.raises(InputError, match="segments=3 does not divide the encoder's 8 channels"):
        Codebook(8, 3)


@pytest.mark.parametrize("gate", ["none", "fixed", "learned"])
def test_features_pass_unchanged_without_codewords(gate):
    z = torch.randn(2, 3, 4)
    quantized = Codebook(4, 2, 0, gate=gate, gate_value=0.5)(z)
    assert torch.equal(quantized.z, z)
    assert quantized.codeword_indices.shape == bypass_quantization(z).codeword_indices.shape == (2, 3, 0)
    assert quantized.commitment_loss == quantized.codebook_loss == 0


def test_perplexity_of_uniform_use_is_the_number_of_codewords():
    assert perplexity(count_codewords(torch.arange(7).repeat(5), 7)).item() == pytest.approx(7)


def test_perplexity_of_one_codeword_is_one_and_unused_codewords_do_not_count():
    assert perplexity(count_codewords(torch.zeros(2, 3, 4, dtype=torch.int64), 9)).item() == pytest.approx(1)
    half_and_quarters = perplexity(torch.tensor([2.0, 1.0, 1.0, 0.0]))
    assert half_and_quarters.item() == pytest.approx(math.exp(1.5 * math.log(2)))
