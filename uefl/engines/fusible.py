"""Layers in a form that a compiler can fuse with what is around them; elsewhere, and in numbers, they are torch's.

Libraries fill convolutions of one channel up to eight, and the compiler's own max-pool computes more addresses than
values on its way back: of the release's network for MNIST they took 8 % and 3 % of a step on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 16  # products that an output of a thin convolution is the sum of
ROW = 8  # products want rows that are whole multiples of 16 bytes, in half precision too


def fusible(net: nn.Module) -> None:
    """Let plain layers of a network be those below, where they can; their tensors stay."""
    for m in net.modules():
        if type(m) is nn.Conv2d and m.weight[0].numel() <= FEW and m.groups == 1 and m.padding_mode == "zeros":
            m.__class__ = m.__class__ if isinstance(m.padding, str) else Thin
        if type(m) is nn.MaxPool2d and isinstance(m.kernel_size, int) and m.kernel_size == m.stride:
            other = m.padding or m.dilation != 1 or m.ceil_mode or m.return_indices
            m.__class__ = m.__class__ if other else Pool


class Thin(nn.Conv2d):
    """A convolution of few inputs as a product of what it sees with its weights: y_o = Σ_k w_ok · x_k at every place.

    Only at a network's input, where nothing goes further back.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or input.requires_grad:
            return super().forward(input)
        assert not isinstance(self.padding, str)
        x = F.pad(input, (self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        rows, columns = (
            s * torch.arange((n - d * (k - 1) - 1) // s + 1, device=x.device)[:, None]
            + d * torch.arange(k, device=x.device)
            for n, k, d, s in zip(x.shape[2:], self.kernel_size, self.dilation, self.stride)
        )
        x = x.movedim(1, -1)[:, rows][:, :, :, columns]  # [B,H,h,W,w,C]
        x, w = x.permute(0, 1, 3, 5, 2, 4).flatten(3), self.weight.flatten(1)  # [B,H,W,K] and [O,K]
        fill = (0, -w.shape[1] % ROW)
        y = F.linear(F.pad(x, fill), F.pad(w, fill))
        y = y if self.bias is None else y + self.bias.to(y.dtype)  # in what comes next; in the product it is slow
        return y.movedim(-1, 1)  # channels last in memory, too


class Pool(nn.MaxPool2d):
    """Max-pool of windows that do not overlap: the way back is torch's, without its search for windows."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return F.max_pool2d(input, self.kernel_size)
        y: Tensor = Largest.apply(input, self.kernel_size)  # type: ignore[no-untyped-call]
        return y


class Largest(torch.autograd.Function):
    """The largest of every k×k window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        y, at = F.max_pool2d(x, k, return_indices=True)
        ctx.save_for_backward(at)
        ctx.sizes = *x.shape[2:], k
        return y

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None]:
        (at,), (up,), (h, w, k) = ctx.saved_tensors, above, ctx.sizes
        at, up = at.movedim(1, -1), up.movedim(1, -1)  # [B,h,w,C]
        rows, columns = at.shape[1:3]
        places = torch.arange(h * w, device=up.device).reshape(h, w, 1)[: rows * k, : columns * k]
        places = places.reshape(rows, k, columns, k, 1)
        found = torch.where(at[:, :, None, :, None] == places, up[:, :, None, :, None], 0)
        found = F.pad(found.flatten(3, 4).flatten(1, 2), (0, 0, 0, w - columns * k, 0, h - rows * k))
        return found.movedim(-1, 1), None
