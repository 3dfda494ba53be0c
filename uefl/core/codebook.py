"""A codebook that all segments of a feature share: nearest codeword, straight-through gradient, L_code, perplexity.

Van den Oord et al., Neural discrete representation learning (2017), and section 3.2 of the UEFL paper. A silo's
codebook holds only the codewords that this silo may use; the server's ledger decides which ones.

Legend: B images, l tokens per image, d channels, s segments, N = B·l·s, D = d/s size of a codeword, V codewords.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.core.errors import InputError
from uefl.core.tracing import is_traced

CodewordGradient = Literal["code", "task"]
Gate = Literal["none", "fixed", "learned"]


class QuantizedFeatures(NamedTuple):
    """Features after quantization."""

    z: Tensor  # [B, l, d] or [B, d], as the features: codewords in place of segments, or mixed with them by the gate
    codeword_indices: Tensor  # [B, l, s]
    commitment_loss: Tensor  # ‖sg(c) − z‖², trains the encoder
    codebook_loss: Tensor  # ‖c − sg(z)‖², trains the codewords


def bypass_quantization(z: Tensor) -> QuantizedFeatures:
    """Return features unchanged, without codewords."""
    zero = z.new_zeros(())
    indices = torch.zeros(z.shape[0], count_tokens(z), 0, dtype=torch.int64, device=z.device)
    return QuantizedFeatures(z, indices, zero, zero)


def arrange_features(z: Tensor) -> Tensor:
    """Return an encoder's output with channels last: a map [B,d,h,w] as tokens [B,l,d]; [B,l,d] and [B,d] as is."""
    if not isinstance(z, Tensor):
        raise InputError(f"an encoder must return one tensor [B,d,h,w], [B,l,d] or [B,d], not a {type(z).__name__}")
    if z.dim() == 4:
        return z.flatten(2).transpose(1, 2)
    if z.dim() in (2, 3):
        return z
    raise InputError(f"an encoder must return [B,d,h,w], [B,l,d] or [B,d], not a tensor of shape {tuple(z.shape)}")


def to_tokens(z: Tensor) -> Tensor:
    """Return an encoder's output, [B,d,h,w], [B,l,d] or [B,d], as tokens [B,l,d]."""
    z = arrange_features(z)
    return z.unsqueeze(1) if z.dim() == 2 else z


def count_tokens(z: Tensor) -> int:
    """Return the number l of tokens per image of features [B,l,d]; features [B,d] are one token."""
    return z.shape[1] if z.dim() == 3 else 1


def reshape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor in a shape; if it has it, no operation is left for the backward pass either."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


class Codebook(nn.Module):
    """The codewords one silo may use. Without codewords (during the warm-up) features pass unchanged.

    With a gate g, the output is g · codeword + (1 − g) · feature. A learned gate has one g per channel.
    """

    def __init__(
        self,
        num_features: int,
        segments: int,
        num_codewords: int = 0,
        reduction: Literal["mean", "sum"] = "mean",
        *,
        codeword_gradient: CodewordGradient = "code",
        gate: Gate = "none",
        gate_value: float = 1.0,
    ) -> None:
        super().__init__()
        if num_features % segments:
            raise InputError(f"segments={segments} does not divide the encoder's {num_features} channels")
        self.segments = segments
        self.scale = num_features if reduction == "sum" else 1  # ‖·‖² of a token, or its mean over channels (D18)
        self.codewords = nn.Parameter(torch.randn(num_codewords, num_features // segments))  # Gaussian, as in the paper
        self.codeword_gradient, self.gate, self.gate_value = codeword_gradient, gate, gate_value
        if gate == "learned":
            self.add_gate(gate_value)

    def add_gate(self, value: float) -> None:
        """Give every channel a learned gate that starts with this value; an earlier gate is replaced."""
        num_features = self.segments * self.codewords.shape[1]
        self.gate = "learned"
        self.gate_logits = nn.Parameter(self.codewords.new_full((num_features,), math.log(value / (1 - value))))

    def split_segments(self, z: Tensor) -> Tensor:
        """Return features [B,l,d] or [B,d] as segments [N,D], the input of the quantizer and of K-means (D20)."""
        size = z.shape[-1] // self.segments
        return reshape(z, (z.numel() // size, size))

    def find_nearest(self, segments: Tensor) -> Tensor:
        """Return the index of the nearest codeword, by squared Euclidean distance, of each row of [N,D]."""
        # In full precision, as half precision would confuse near codewords.
        codewords, device_type = self.codewords.detach(), segments.device.type
        if segments.dtype == codewords.dtype and not torch.is_autocast_enabled(device_type):
            return find_nearest(segments, codewords)
        with torch.autocast(device_type, enabled=False):
            return find_nearest(segments.to(codewords.dtype), codewords)

    def look_up(self, indices: Tensor) -> Tensor:
        """Return codewords [N,D] by their indices [N]."""
        if not torch.compiler.is_compiling():
            return F.embedding(indices, self.codewords)
        codewords: Tensor = CompiledLookup.apply(self.codewords, indices)  # type: ignore[no-untyped-call]
        return codewords

    def forward(self, z: Tensor) -> QuantizedFeatures:
        if self.codewords.shape[0] == 0:
            return bypass_quantization(z)
        is_fixed = is_constant(z)
        features = z if is_fixed else z.detach()
        indices = self.find_nearest(self.split_segments(features))  # i = argmin_j ‖z − c_j‖ (Eq. 4)
        codewords = reshape(self.look_up(indices), z.shape)
        # Both terms of L_code (Eq. 5). They have the same value, and the first has no gradient if features have none.
        codebook_loss = multiply_loss(self.scale, mean_squared_distance(codewords, features))
        commitment_loss = (
            codebook_loss.detach()
            if is_fixed
            else multiply_loss(self.scale, mean_squared_distance(z, codewords.detach()))
        )
        indices = indices.reshape(z.shape[0], count_tokens(z), self.segments)  # `len` would fix B in an exported file
        output = self.apply_gate(z, self.pass_gradient(z, codewords))
        return QuantizedFeatures(output, indices, commitment_loss, codebook_loss)

    def pass_gradient(self, z: Tensor, codewords: Tensor) -> Tensor:
        """Return the codewords with the gradient of the task: to the features alone, or to the codewords too."""
        if self.codeword_gradient == "task":
            return codewords if is_constant(z) else codewords + (z - z.detach())
        return z + (codewords - z).detach()

    def apply_gate(self, z: Tensor, codewords: Tensor) -> Tensor:
        """Return g · codewords + (1 − g) · z, whose gradient to the encoder is that of the codewords alone."""
        if self.gate == "none":
            return codewords
        g = torch.sigmoid(self.gate_logits) if self.gate == "learned" else self.gate_value
        return g * codewords + (1 - g) * z


def find_nearest(segments: Tensor, codewords: Tensor) -> Tensor:
    """Return argmin_j |z − c_j|² for each row z of [N,D]."""
    # |z−c|² = |z|² − 2 z·c + |c|², and |z|² does not change the order.
    squares = torch.linalg.vecdot(codewords, codewords)
    return torch.addmm(squares, segments, codewords.t(), alpha=-2).argmin(1)


def is_constant(z: Tensor) -> bool:
    """Return whether features have no gradient, such as the columns of a table without an encoder."""
    return not is_traced(z) and not z.requires_grad


def multiply_loss(weight: float, loss: Tensor) -> Tensor:
    """Return weight · loss; with few examples, a product with 1 would take as long as any other operation."""
    return loss if weight == 1 else weight * loss


def mean_squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return `F.mse_loss` of tensors of one shape, without its three operations that broadcast them."""
    distance: Tensor = torch.ops.aten.mse_loss.default(a, b)
    return distance


class CompiledLookup(torch.autograd.Function):
    """Codewords by their indices, for compiled code.

    The gradient of `F.embedding` sorts tokens by codeword and sums each run: deterministic, and without a tensor of
    tokens × codewords. A compiler would replace it by a deterministic scatter, which takes twenty times as long.
    """

    @staticmethod
    def forward(codewords: Tensor, indices: Tensor) -> Tensor:
        return F.embedding(indices, codewords)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
        codewords, indices = inputs
        ctx.save_for_backward(indices)
        ctx.num_codewords = len(codewords)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (indices,), (gradient,) = ctx.saved_tensors, gradients
        return sum_by_codeword(gradient, indices, ctx.num_codewords), None


@torch.library.custom_op("uefl::sum_by_codeword", mutates_args=())
def sum_by_codeword(gradient: Tensor, indices: Tensor, num_codewords: int) -> Tensor:
    """Sum the gradients [N,D] of tokens with the same codeword: [V,D]."""
    sums: Tensor = torch.ops.aten.embedding_dense_backward(gradient, indices, num_codewords, -1, False)
    return sums


@sum_by_codeword.register_fake
def _fake_sum_by_codeword(gradient: Tensor, indices: Tensor, num_codewords: int) -> Tensor:
    del indices
    return gradient.new_empty(num_codewords, gradient.shape[1])


def count_codewords(indices: Tensor, num_codewords: int) -> Tensor:
    """Return how often each codeword was used."""
    flat = indices.reshape(-1)
    return torch.zeros(num_codewords, dtype=torch.float64, device=indices.device).scatter_add(
        0, flat, torch.ones_like(flat, dtype=torch.float64)
    )


def perplexity(counts: Tensor) -> Tensor:
    """Return exp(−Σ p log p) of the use of codewords: the effective number of codewords (D19)."""
    p = counts / counts.sum(-1, keepdim=True).clamp_min(1)
    return torch.exp(-torch.special.xlogy(p, p).sum(-1))
