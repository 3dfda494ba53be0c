"""Batch norm of stacked clients in training, in Triton: each activation is read twice and written once per direction.

Under `vmap`, torch's basic operations take about twice as many passes over the activations. Sums have a fixed order, so
results are deterministic, and they do not depend on the number of clients.

Legend: G clients, N positions of all images, C channels; S parts of the positions, summed separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2048  # of one block of positions and channels
POSITIONS_PER_PART = 1024


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _sum_kernel(
    x, dy, center, sums, N, C, PART: tl.constexpr, IS_BACKWARD: tl.constexpr, DOUBLE: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """sums [G,S,2,C] = Σ a and Σ a·(x − center) over a part of the positions, with a = dy or a = x − center."""
    part, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    middle = tl.load(center + g * C + c, mask=c < C, other=0.0).to(dtype)
    total, product = tl.zeros((BN, BC), dtype), tl.zeros((BN, BC), dtype)
    for start in range(0, PART, BN):
        n = part * PART + start + tl.arange(0, BN)
        inside = (n < N)[:, None] & (c < C)[None, :]
        offset = g * N * C + n[:, None] * C + c[None, :]
        difference = tl.where(inside, tl.load(x + offset, mask=inside, other=0.0).to(dtype) - middle[None, :], 0.0)
        if IS_BACKWARD:
            a = tl.load(dy + offset, mask=inside, other=0.0).to(dtype)
        else:
            a = difference
        total += a
        product += a * difference
    offset = (g * tl.num_programs(0) + part) * 2 * C + c
    tl.store(sums + offset, tl.sum(total, 0), mask=c < C)
    tl.store(sums + offset + C, tl.sum(product, 0), mask=c < C)


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _combine_kernel(
    x, dy, p, q, a, y, N, C, IS_BACKWARD: tl.constexpr, DOUBLE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y [G,N,C] = p·x + q, and in the backward pass + a·dy, with one p, q and a [G,C] per channel."""
    g = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = (n < N)[:, None] & (c < C)[None, :]
    offset = g * N * C + n[:, None] * C + c[None, :]
    factor = tl.load(p + g * C + c, mask=c < C, other=0.0)[None, :]
    result = tl.load(x + offset, mask=inside, other=0.0).to(dtype) * factor
    result += tl.load(q + g * C + c, mask=c < C, other=0.0)[None, :]
    if IS_BACKWARD:
        factor = tl.load(a + g * C + c, mask=c < C, other=0.0)[None, :]
        result += tl.load(dy + offset, mask=inside, other=0.0).to(dtype) * factor
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=inside)


def _choose_block(channels: int) -> tuple[int, int]:
    """Return the block's numbers of positions and channels."""
    block_channels = min(128, max(16, triton.next_power_of_2(channels)))
    return BLOCK_ELEMENTS // block_channels, block_channels


def _sum_positions(x: Tensor, dy: Tensor | None, center: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of `_sum_kernel` over all positions of x [G,N,C]: [G,C] each."""
    (groups, n, c), (bn, bc) = x.shape, _choose_block(x.shape[2])
    parts = triton.cdiv(n, POSITIONS_PER_PART)
    sums = center.new_empty(groups, parts, 2, c)
    _sum_kernel[(parts, groups, triton.cdiv(c, bc))](
        x, x if dy is None else dy, center, sums, n, c, POSITIONS_PER_PART, dy is not None,
        center.dtype == torch.float64, bn, bc, num_warps=4,
    )  # fmt: skip
    total, product = sums.sum(1).unbind(1)
    return total, product


def _combine(x: Tensor, p: Tensor, q: Tensor, dy: Tensor | None = None, a: Tensor | None = None) -> Tensor:
    """Return p·x + q, or p·x + q + a·dy, of x and dy [G,N,C] with p, q and a [G,C]."""
    (groups, n, c), (bn, bc) = x.shape, _choose_block(x.shape[2])
    y = torch.empty_like(x)
    _combine_kernel[(triton.cdiv(n, bn), groups, triton.cdiv(c, bc))](
        x, x if dy is None else dy, p, q, p if a is None else a, y, n, c, dy is not None,
        p.dtype == torch.float64, bn, bc, num_warps=4,
    )  # fmt: skip
    return y


def to_positions(images: Tensor) -> Tensor:
    """Return images [G,B,C,H,W] as [G,N,C], without a copy if channels are last in memory."""
    return images.permute(0, 1, 3, 4, 2).contiguous().flatten(1, 3)


def to_images(positions: Tensor, shape: Sequence[int]) -> Tensor:
    """Return positions [G,N,C] as images [G,B,C,H,W] with channels last in memory."""
    groups, b, c, h, w = shape
    return positions.reshape(groups, b, h, w, c).permute(0, 1, 4, 2, 3)


class StackedBatchNorm(torch.autograd.Function):
    """Normalize x [G,B,C,H,W] by its own statistics; weight and bias are [G,C]. Return y, mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        positions = to_positions(x)
        n, dtype = positions.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
        first = positions[:, 0].to(dtype).contiguous()  # differences from it do not cancel in squares
        total, squares = _sum_positions(positions, None, first)
        mean_difference = total / n
        variance = (squares / n - mean_difference.square()).clamp_min(0)
        mean, scale = first + mean_difference, (variance + eps).rsqrt()
        a = (scale * weight).to(dtype).contiguous()
        y = _combine(positions, a, (bias - mean * a).to(dtype).contiguous())
        ctx.save_for_backward(positions, mean, scale, a)
        ctx.shape, ctx.dtypes = x.shape, (weight.dtype, bias.dtype)
        ctx.mark_non_differentiable(mean, variance)
        return to_images(y, x.shape), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _dmean: Tensor, _dvariance: Tensor) -> Any:
        """∂x = a (∂y − Σ∂y/n − x̂ Σ(∂y·x̂)/n) = a·∂y + p·x + q with x̂ = (x − μ)/σ."""
        positions, mean, scale, a = ctx.saved_tensors
        n, gradients = positions.shape[1], to_positions(dy.to(positions.dtype))
        dbias, products = _sum_positions(positions, gradients, mean)
        dweight = products * scale
        dx = None
        if ctx.needs_input_grad[0]:
            p = a * scale * dweight * (-1 / n)
            q = a * dbias * (-1 / n) - p * mean
            dx = to_images(_combine(positions, p, q, gradients, a), ctx.shape)
        return dx, dweight.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None


class VmapBatchNorm(torch.autograd.Function):
    """Batch norm by statistics of the batch, which uses `StackedBatchNorm` under `vmap`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = StackedBatchNorm.apply(x[None], weight[None], bias[None], eps)
        return y[0], mean[0], variance[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: weights are trained only under `vmap`, which calls `StackedBatchNorm`."""

    @staticmethod
    def vmap(
        info: Any, dims: Sequence[int | None], x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Any, tuple[int, int, int]]:
        tensors = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, weight, bias), dims)
        )
        return StackedBatchNorm.apply(*tensors, eps), (0, 0, 0)
