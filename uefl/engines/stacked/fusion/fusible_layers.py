"""Replace layers of a network by equivalent ones that torch's compiler can fuse with their neighbors.

The entry is `make_layers_fusible`; without a compiler, the layers call torch's code. Why: libraries pad convolutions of
one channel to eight; the compiler's max-pool computes more addresses than values in the backward pass, and prevents
fusion in the forward pass; its batch norm reads five numbers per value. Together these take a fifth of a training step
of the authors' MNIST network on an H200 (benchmark `authors_code`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_THIN_INPUTS = 16  # inputs per output of a convolution with few inputs
ROW_MULTIPLE = 8  # matrix products are fast if rows are multiples of 16 bytes, also in half precision
MAX_POOL_WINDOW = 4  # larger windows compare too many values

# By default the compiler materializes a tensor that reads more than 4 tensors and is read again, such as a pool.
INDUCTOR_OPTIONS = {"realize_reads_threshold": 16, "realize_opcount_threshold": 100}


def make_layers_fusible(net: nn.Module) -> None:
    """Change the class of torch's layers in place to the fusible ones below, if they support the layer's settings.

    Names, tensors and references to the layers stay as they are.
    """
    for m in net.modules():
        if type(m) is nn.Conv2d and m.weight[0].numel() <= MAX_THIN_INPUTS:
            unsupported = m.groups != 1 or m.padding_mode != "zeros" or isinstance(m.padding, str)
            m.__class__ = m.__class__ if unsupported else FusibleConv2d
        if type(m) is nn.MaxPool2d and isinstance(m.kernel_size, int) and m.kernel_size == m.stride:
            too_large = m.kernel_size > MAX_POOL_WINDOW
            unsupported = bool(too_large or m.padding or m.dilation != 1 or m.ceil_mode or m.return_indices)
            m.__class__ = m.__class__ if unsupported else FusibleMaxPool2d
        if type(m) is nn.BatchNorm2d and m.affine and m.track_running_stats and m.momentum is not None:
            m.__class__ = FusibleBatchNorm2d


class FusibleConv2d(nn.Conv2d):
    """A convolution of few inputs as a matrix product of patches and weights: y_o = Σ_k w_ok · x_k at every position.

    Used only at a network's input, which needs no gradient.
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
        padding = (0, -w.shape[1] % ROW_MULTIPLE)
        y = F.linear(F.pad(x, padding), F.pad(w, padding))
        y = y.movedim(-1, 1)  # channels last in memory, too
        # The bias is fused with the next operation, since it is slow within the product. Its gradient is a sum that a
        # following norm also needs; the compiler computes it once if neither is a result itself: hence both factors 1.
        return y if self.bias is None else cast_like(to_single_precision(y) + 1 * self.bias[:, None, None], y)


class FusibleMaxPool2d(nn.MaxPool2d):
    """Max-pool of windows without overlap."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return F.max_pool2d(input, self.kernel_size)
        y: Tensor = WindowMax.apply(input, self.kernel_size)  # type: ignore[no-untyped-call]
        return y


class WindowMax(torch.autograd.Function):
    """The maximum of each k×k window, the first among equals; the backward pass needs only its position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        h, w = (k * (n // k) for n in x.shape[2:])
        y, *others = (x[:, :, i:h:k, j:w:k] for i in range(k) for j in range(k))
        position = torch.zeros_like(y, dtype=torch.int8)
        for i, other in enumerate(others, 1):
            position = torch.where(other > y, i, position)
            y = torch.maximum(y, other)
        ctx.save_for_backward(position)
        ctx.sizes = *x.shape[2:], k
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (position,), (dy,), (h, w, k) = ctx.saved_tensors, grad_outputs, ctx.sizes
        position, dy = position.movedim(1, -1), dy.movedim(1, -1)  # [B,h,w,C]
        rows, columns = position.shape[1:3]
        positions = torch.arange(k * k, dtype=torch.int8, device=dy.device).reshape(k, 1, k, 1)
        dx = torch.where(position[:, :, None, :, None] == positions, dy[:, :, None, :, None], 0)  # [B,h,k,w,k,C]
        dx = F.pad(dx.flatten(3, 4).flatten(1, 2), (0, 0, 0, w - columns * k, 0, h - rows * k))
        return dx.movedim(-1, 1), None


class FusibleBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that, in training, applies one scale and one shift per channel."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, input: Tensor) -> Tensor:
        n = input.numel() // input.shape[1]
        is_plain = self.training and self.track_running_stats
        if not torch.compiler.is_compiling() or not is_plain or n < 2:
            return super().forward(input)
        with torch.no_grad():
            # One pass over the differences from the first value, so that squares do not cancel.
            first = to_single_precision(input[:1, :, :1, :1])
            difference = to_single_precision(input) - first
            mean = difference.sum(REDUCED_AXES, keepdim=True) * (1 / n)  # [1,C,1,1]
            mean_square = difference.square().sum(REDUCED_AXES, keepdim=True) * (1 / n)
            variance = (mean_square - mean.square()).clamp_min(0)
            mean = mean + first
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(variance.flatten() * (n / (n - 1)), self.momentum)
            scale = (variance + self.eps).rsqrt()
        y: Tensor = BatchNormFunction.apply(input, self.weight, self.bias, mean, scale)  # type: ignore[no-untyped-call]
        return y


class BatchNormFunction(torch.autograd.Function):
    """y = a·x + b with a = γ/σ and b = β − μa, where μ is `mean` and 1/σ is `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        a = materialize(scale * weight[:, None, None])
        b = materialize(bias[:, None, None] - mean * a)
        ctx.save_for_backward(x, a, mean, scale)
        return cast_like(to_single_precision(x) * a + b, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """∂x = a (∂y − Σ∂y/n − x̂ Σ(∂y·x̂)/n) = a·∂y + p·x + q with x̂ = (x − μ)/σ."""
        (x, a, mean, scale), dy = ctx.saved_tensors, to_single_precision(grad_outputs[0])
        n = x.numel() // x.shape[1]
        dbias = dy.sum(REDUCED_AXES, keepdim=True)
        dweight = (dy * (to_single_precision(x) - mean)).sum(REDUCED_AXES, keepdim=True) * scale
        p = materialize(a * scale * dweight * (-1 / n))
        q = materialize(a * dbias * (-1 / n) - p * mean)
        dx = cast_like(a * dy + p * to_single_precision(x) + q, x)
        return dx, dweight.flatten(), (1 * dbias).flatten(), None, None


REDUCED_AXES = (0, 2, 3)


def to_single_precision(x: Tensor) -> Tensor:
    """Convert half precision to single precision, which sums need."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def cast_like(t: Tensor, x: Tensor) -> Tensor:
    """Convert to the dtype of x only if it differs: in torch 2.11, a cast to the same dtype loses the gradient."""
    return t if t.dtype == x.dtype else t.to(x.dtype)


def materialize(t: Tensor) -> Tensor:
    """Make the compiler store a tensor [1,C,1,1] instead of computing it again for every value.

    A 1x1 average-pool is the identity, but the compiler materializes its input.
    """
    return F.avg_pool2d(t, 1)
