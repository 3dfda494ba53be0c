"""Layers in a form that a compiler can fuse with what is around them; elsewhere, and in numbers, they are torch's.

Libraries fill convolutions of one channel up to eight; the compiler's own max-pool computes more addresses than values
on its way back, and stops fusion on its way there; its batch norm reads five numbers a value. Together a fifth of a
step of the release's network for MNIST on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 16  # products that an output of a thin convolution is the sum of
ROW = 8  # products want rows that are whole multiples of 16 bytes, in half precision too
WIDEST = 4  # pools of larger windows are many values to choose from

# By itself the compiler writes down what reads more than 4 tensors and is read again, as a pool does.
FUSION = {"realize_reads_threshold": 16, "realize_opcount_threshold": 100}


def fusible(net: nn.Module) -> None:
    """Let plain layers of a network be those below, where they can; their tensors stay."""
    for m in net.modules():
        if type(m) is nn.Conv2d and m.weight[0].numel() <= FEW and m.groups == 1 and m.padding_mode == "zeros":
            m.__class__ = m.__class__ if isinstance(m.padding, str) else Thin
        if type(m) is nn.MaxPool2d and isinstance(m.kernel_size, int) and m.kernel_size == m.stride:
            other = m.kernel_size > WIDEST or m.padding or m.dilation != 1 or m.ceil_mode or m.return_indices
            m.__class__ = m.__class__ if other else Pool
        if type(m) is nn.BatchNorm2d and m.affine and m.track_running_stats and m.momentum is not None:
            m.__class__ = Norm


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
        y = y.movedim(-1, 1)  # channels last in memory, too
        # In what comes next: in the product it is slow. Its gradient is a sum that a norm beside it needs as well; the
        # compiler takes it once if neither is a result itself: hence the 1, here and there.
        return y if self.bias is None else as_fine(full(y) + 1 * self.bias[:, None, None], y)


class Pool(nn.MaxPool2d):
    """Max-pool of windows that do not overlap."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return F.max_pool2d(input, self.kernel_size)
        y: Tensor = Largest.apply(input, self.kernel_size)  # type: ignore[no-untyped-call]
        return y


class Largest(torch.autograd.Function):
    """The largest of every k×k window, the first of equal ones; the way back needs its place in the window alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        h, w = (k * (n // k) for n in x.shape[2:])
        y, *others = (x[:, :, i:h:k, j:w:k] for i in range(k) for j in range(k))
        at = torch.zeros_like(y, dtype=torch.int8)
        for place, other in enumerate(others, 1):
            at = torch.where(other > y, place, at)
            y = torch.maximum(y, other)
        ctx.save_for_backward(at)
        ctx.sizes = *x.shape[2:], k
        return y

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None]:
        (at,), (up,), (h, w, k) = ctx.saved_tensors, above, ctx.sizes
        at, up = at.movedim(1, -1), up.movedim(1, -1)  # [B,h,w,C]
        rows, columns = at.shape[1:3]
        places = torch.arange(k * k, dtype=torch.int8, device=up.device).reshape(k, 1, k, 1)
        found = torch.where(at[:, :, None, :, None] == places, up[:, :, None, :, None], 0)  # [B,h,k,w,k,C]
        found = F.pad(found.flatten(3, 4).flatten(1, 2), (0, 0, 0, w - columns * k, 0, h - rows * k))
        return found.movedim(-1, 1), None


class Norm(nn.BatchNorm2d):
    """Batch norm in training, with two numbers a channel for what is done to every value."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, input: Tensor) -> Tensor:
        n = input.numel() // input.shape[1]
        if not torch.compiler.is_compiling() or not self.training or n < 2:
            return super().forward(input)
        with torch.no_grad():
            # In one pass, of what is left after a first value: that is of the size of all, so squares do not cancel.
            first = full(input[:1, :, :1, :1])
            rest = full(input) - first
            mean = rest.sum(PLACES, keepdim=True) * (1 / n)
            variance = (rest.square().sum(PLACES, keepdim=True) * (1 / n) - mean.square()).clamp_min(0)  # [1,C,1,1]
            mean = mean + first
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(variance.flatten() * (n / (n - 1)), self.momentum)
            scale = (variance + self.eps).rsqrt()
        y: Tensor = Normed.apply(input, self.weight, self.bias, mean, scale)  # type: ignore[no-untyped-call]
        return y


class Normed(torch.autograd.Function):
    """y = a·x + b with a = γ/σ and b = β − μa, for x's own μ (`mean`) and 1/σ (`scale`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        a = written(scale * weight[:, None, None])
        b = written(bias[:, None, None] - mean * a)
        ctx.save_for_backward(x, a, mean, scale)
        return as_fine(full(x) * a + b, x)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        """∂x = a (u − Σu/n − x̂ Σux̂/n) = a·u + p·x + q for u from above and x̂ = (x − μ)/σ."""
        (x, a, mean, scale), u = ctx.saved_tensors, full(above[0])
        n = x.numel() // x.shape[1]
        bias = u.sum(PLACES, keepdim=True)
        weight = (u * (full(x) - mean)).sum(PLACES, keepdim=True) * scale
        p = written(a * scale * weight * (-1 / n))
        q = written(a * bias * (-1 / n) - p * mean)
        return as_fine(a * u + p * full(x) + q, x), weight.flatten(), (1 * bias).flatten(), None, None


PLACES = (0, 2, 3)


def full(x: Tensor) -> Tensor:
    """Half precision in single: sums want it."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def as_fine(t: Tensor, x: Tensor) -> Tensor:
    """In the precision of x. Only if it is another: results cast to what they are have no gradient in torch 2.11."""
    return t if t.dtype == x.dtype else t.to(x.dtype)


def written(t: Tensor) -> Tensor:
    """A channel's number [1,C,1,1], computed once and not again for every value that needs it.

    A pool of one place is that place; but a compiler writes down what it is to pool.
    """
    return F.avg_pool2d(t, 1)
