"""A codebook that all segments of a feature share: nearest word, straight-through gradient, L_code, perplexity.

Van den Oord et al., Neural discrete representation learning (2017), and section 3.2 of the UEFL paper. A silo's
codebook holds only the words that this silo may use: which ones these are is the server's ledger, not the module's.

Legend: B images, l tokens of an image, d channels, s segments, N = B·l·s, D = d/s width of a word, V words.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.errors import InputError


class Coded(NamedTuple):
    """Features after discretization."""

    z: Tensor  # [B, l, d] words in place of segments; the gradient passes straight through to the features
    chosen: Tensor  # [B, l, s] which word
    commitment: Tensor  # ‖sg(c) − z‖², moves the encoder
    codeword: Tensor  # ‖c − sg(z)‖², moves the words


def uncoded(z: Tensor) -> Coded:
    """Features that pass as they are: no word is chosen."""
    none = z.new_zeros(())
    return Coded(z, torch.zeros(*z.shape[:-1], 0, dtype=torch.int64, device=z.device), none, none)


def tokens(z: Tensor) -> Tensor:
    """Any encoder's output, [B,d,h,w], [B,l,d] or [B,d], as tokens [B,l,d]."""
    if z.dim() == 4:
        return z.flatten(2).transpose(1, 2)
    if z.dim() == 2:
        return z.unsqueeze(1)
    if z.dim() == 3:
        return z
    raise InputError(f"an encoder must return [B,d,h,w], [B,l,d] or [B,d], not a tensor of shape {tuple(z.shape)}")


class Codebook(nn.Module):
    """The words one silo may use. Without any word it lets features pass (the warm-up before the first book)."""

    def __init__(self, width: int, segments: int, words: int = 0, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        if width % segments:
            raise InputError(f"segments={segments} does not divide the encoder's {width} channels")
        self.segments = segments
        self.scale = width if reduction == "sum" else 1  # ‖·‖² of a token, or its mean over channels (D18)
        self.words = nn.Parameter(torch.randn(words, width // segments))  # Gaussian, as in the paper

    def split(self, z: Tensor) -> Tensor:
        """Tokens [B,l,d] as segments [N,D]: exactly what the quantizer, and K-means, see (D20)."""
        return z.reshape(-1, z.shape[-1] // self.segments)

    def nearest(self, flat: Tensor) -> Tensor:
        """Index of the nearest word, by squared Euclidean distance, of each row of [N,D]."""
        # |z−c|² = |z|² − 2 z·c + |c|²; |z|² does not change the order. Near words differ by less than half precision.
        with torch.autocast(flat.device.type, enabled=False):
            distance = torch.addmm(self.words.square().sum(1), flat.to(self.words.dtype), self.words.t(), alpha=-2)
        return distance.argmin(1)

    def spoken(self, index: Tensor) -> Tensor:
        """Words [N,D] by their indices [N]."""
        if not by_product(index):
            return F.embedding(index, self.words)
        word: Tensor = Spoken.apply(self.words, index)  # type: ignore[no-untyped-call]
        return word

    def forward(self, z: Tensor) -> Coded:
        if self.words.shape[0] == 0:
            return uncoded(z)
        flat = self.split(z)
        index = self.nearest(flat.detach())  # Eq. 6: i = argmin_j ‖z − c_j‖
        word = self.spoken(index).reshape(z.shape)
        commitment = self.scale * F.mse_loss(z, word.detach())  # Eq. 7
        codeword = self.scale * F.mse_loss(word, z.detach())
        return Coded(z + (word - z).detach(), index.reshape(*z.shape[:-1], self.segments), commitment, codeword)


def by_product(index: Tensor) -> bool:
    """Whether gradients of words are summed by a product."""
    return index.is_cuda


class Spoken(torch.autograd.Function):
    """Words by their indices. The way back is a product with what was chosen.

    On CUDA the sum of gradients by word, in an order that gives the same bits twice, is else a ninth of a step.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(words: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, words)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
        words, index = inputs
        ctx.save_for_backward(index)
        ctx.words = len(words)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None]:
        (index,), (up,) = ctx.saved_tensors, above
        with torch.autocast(up.device.type, enabled=False):
            chosen = up.new_zeros(()).expand(len(index), ctx.words).scatter(1, index[:, None], 1)
            return chosen.t() @ up, None


def usage(index: Tensor, words: int) -> Tensor:
    """How often each word was chosen."""
    flat = index.reshape(-1)
    return torch.zeros(words, dtype=torch.float64, device=index.device).scatter_add(
        0, flat, torch.ones_like(flat, dtype=torch.float64)
    )


def perplexity(used: Tensor) -> Tensor:
    """exp(−Σ p log p) over how often words were used: how many words the silo really speaks (D19)."""
    p = used / used.sum(-1, keepdim=True).clamp_min(1)
    return torch.exp(-torch.special.xlogy(p, p).sum(-1))
