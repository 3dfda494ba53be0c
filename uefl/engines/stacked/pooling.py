"""Max-pooling of stacked clients over windows of two by two pixels, in Triton.

Torch stores the position of every maximum as an integer of 8 bytes, and its gradient kernel is slow with channels last.
Here the gradient finds the maximum again: the first one of a window in the order of its rows, as torch does.

Legend: N images of all clients, H and W their rows and columns, C channels, P and Q rows and columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _pool_kernel(
    x, y, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y [N,P,Q,C] = the maxima of the windows of x [N,H,W,C]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N.to(tl.int64) * (P * Q * C)  # so the compiler knows that a vector of channels is inside or not
    source = x + ((i // (C * Q * P) * H + i // (C * Q) % P * 2) * W + i // C % Q * 2) * C + i % C
    first, second = tl.load(source, mask=inside), tl.load(source + C, mask=inside)
    third, fourth = tl.load(source + W * C, mask=inside), tl.load(source + W * C + C, mask=inside)
    top = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    bottom = tl.maximum(third, fourth, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + i, tl.maximum(top, bottom, propagate_nan=tl.PropagateNan.ALL), mask=inside)


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _pool_gradient_kernel(
    x, y, dy, dx, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx [N,H,W,C] = dy [N,P,Q,C] at the first maximum of each window, and 0 elsewhere."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N.to(tl.int64) * (P * Q * C)
    offset = ((i // (C * Q * P) * H + i // (C * Q) % P * 2) * W + i // C % Q * 2) * C + i % C
    maximum, gradient = tl.load(y + i, mask=inside), tl.load(dy + i, mask=inside)
    zero = tl.zeros_like(gradient)
    is_first = tl.load(x + offset, mask=inside) == maximum
    is_second = (tl.load(x + offset + C, mask=inside) == maximum) & ~is_first
    is_third = (tl.load(x + offset + W * C, mask=inside) == maximum) & ~is_first & ~is_second
    tl.store(dx + offset, tl.where(is_first, gradient, zero), mask=inside)
    tl.store(dx + offset + C, tl.where(is_second, gradient, zero), mask=inside)
    tl.store(dx + offset + W * C, tl.where(is_third, gradient, zero), mask=inside)
    is_fourth = ~is_first & ~is_second & ~is_third
    tl.store(dx + offset + W * C + C, tl.where(is_fourth, gradient, zero), mask=inside)


class StackedMaxPool(torch.autograd.Function):
    """Pool x [G,B,C,H,W]: [G,B,C,P,Q], both with channels last in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        images = x.permute(0, 1, 3, 4, 2).contiguous()
        groups, b, h, w, c = images.shape
        y = images.new_empty(groups, b, h // 2, w // 2, c)
        ctx.save_for_backward(images, y)
        _pool_kernel[(triton.cdiv(y.numel(), BLOCK),)](images, y, groups * b, h, w, c, h // 2, w // 2, BLOCK)
        return y.permute(0, 1, 4, 2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        images, y = ctx.saved_tensors
        groups, b, h, w, c = images.shape
        gradients = dy.permute(0, 1, 3, 4, 2).contiguous()
        dx = torch.zeros_like(images) if h % 2 or w % 2 else torch.empty_like(images)  # no window has an odd last row
        _pool_gradient_kernel[(triton.cdiv(y.numel(), BLOCK),)](
            images, y, gradients, dx, groups * b, h, w, c, h // 2, w // 2, BLOCK
        )
        return dx.permute(0, 1, 4, 2, 3)


class VmapMaxPool(torch.autograd.Function):
    """Max-pooling that uses `StackedMaxPool` under `vmap`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: gradients are computed only under `vmap`, which calls `StackedMaxPool`."""

    @staticmethod
    def vmap(_info: Any, dims: Sequence[int], x: Tensor) -> tuple[Tensor, int]:
        return StackedMaxPool.apply(x.movedim(dims[0], 0)), 0


def is_supported(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Return whether the kernels support this pooling: windows of two by two pixels that do not overlap."""
    has_windows = kernel_size in (2, (2, 2)) and stride in (None, 2, (2, 2)) and dilation in (1, (1, 1))
    is_plain = padding in (0, (0, 0)) and not ceil_mode and not return_indices
    return x.dim() == 4 and min(x.shape[2:]) > 1 and has_windows and is_plain
