"""Group norm of stacked clients, in Triton: each activation is read twice and written once per direction.

Torch's kernel needs channels first in memory, and our convolutions have them last: it would copy every activation to
the one order and back. A program computes one image, whose second reading finds it in the cache. Sums have a fixed
order, so results are deterministic, and they do not depend on the number of clients. The result has the type of x; in
half precision, that of torch would be float32, which the next convolution rounds.

Legend: G clients, B images, N positions of an image, C channels in GROUPS groups of SIZE.
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

from uefl.engines.stacked.batch_norm import to_images, to_positions

BLOCK_ELEMENTS = 4096  # of one block of positions and channels
MAX_CHANNELS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _average_groups(values, C: tl.constexpr, GROUPS: tl.constexpr):
    """Return for each channel the mean of its group's values."""
    SIZE: tl.constexpr = C // GROUPS
    means = tl.sum(tl.reshape(values, (GROUPS, SIZE)), 1) / SIZE
    return tl.reshape(tl.broadcast_to(means[:, None], (GROUPS, SIZE)), (C,))


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _group_norm_kernel(
    x, weight, bias, y, means, scales, N, EPS: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr,
    DOUBLE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y [G,B,N,C] = (x − μ)/σ · weight + bias with means μ and scales 1/σ of the channels' groups, [G,B,C]."""
    g = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    image = g * tl.num_programs(0) + tl.program_id(0)
    x += image * N * C
    y += image * N * C
    c = tl.arange(0, C)
    first = tl.load(x + c).to(dtype)  # differences from it do not cancel in squares
    total, squares = tl.zeros((BN, C), dtype), tl.zeros((BN, C), dtype)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        inside = (n < N)[:, None] & (c < C)[None, :]
        values = tl.load(x + n[:, None] * C + c[None, :], mask=inside, other=0.0).to(dtype)
        difference = tl.where(inside, values - first[None, :], 0.0)
        total += difference
        squares += difference * difference
    difference = tl.sum(total, 0) / N
    variance = tl.sum(squares, 0) / N - difference * difference  # of each channel
    of_channel = first + difference
    mean = _average_groups(of_channel, C, GROUPS)
    variance = _average_groups(variance + (of_channel - mean) * (of_channel - mean), C, GROUPS)
    scale = 1 / tl.sqrt(tl.maximum(variance, 0.0) + EPS)
    tl.store(means + image * C + c, mean)
    tl.store(scales + image * C + c, scale)
    a = scale * tl.load(weight + g * C + c)
    b = tl.load(bias + g * C + c) - mean * a
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        inside = (n < N)[:, None] & (c < C)[None, :]
        offset = n[:, None] * C + c[None, :]
        result = tl.load(x + offset, mask=inside, other=0.0).to(dtype) * a[None, :] + b[None, :]
        tl.store(y + offset, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _group_norm_gradient_kernel(
    x, dy, weight, means, scales, dx, sums, N, C: tl.constexpr, GROUPS: tl.constexpr, DOUBLE: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """dx [G,B,N,C], and the sums [G,B,2,C] of dy and dy·x̂ over positions, with x̂ = (x − μ)/σ."""
    g = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    image = g * tl.num_programs(0) + tl.program_id(0)
    x += image * N * C
    dy += image * N * C
    dx += image * N * C
    c = tl.arange(0, C)
    mean, scale = tl.load(means + image * C + c), tl.load(scales + image * C + c)
    w = tl.load(weight + g * C + c)
    total, product = tl.zeros((BN, C), dtype), tl.zeros((BN, C), dtype)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        inside = (n < N)[:, None] & (c < C)[None, :]
        offset = n[:, None] * C + c[None, :]
        gradient = tl.load(dy + offset, mask=inside, other=0.0).to(dtype)
        total += gradient
        product += gradient * (tl.load(x + offset, mask=inside, other=0.0).to(dtype) - mean[None, :])
    of_dy, of_product = tl.sum(total, 0), tl.sum(product, 0) * scale
    tl.store(sums + image * 2 * C + c, of_dy)
    tl.store(sums + image * 2 * C + C + c, of_product)
    # ∂x = (w ∂y − mean(w ∂y) − x̂ mean(w ∂y x̂))/σ = a·∂y + p·x + q
    a = scale * w
    p = -scale * scale * _average_groups(w * of_product, C, GROUPS) / N
    q = -scale * _average_groups(w * of_dy, C, GROUPS) / N - p * mean
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        inside = (n < N)[:, None] & (c < C)[None, :]
        offset = n[:, None] * C + c[None, :]
        result = tl.load(dy + offset, mask=inside, other=0.0).to(dtype) * a[None, :]
        result += tl.load(x + offset, mask=inside, other=0.0).to(dtype) * p[None, :] + q[None, :]
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=inside)


class StackedGroupNorm(torch.autograd.Function):
    """Normalize x [G,B,C,H,W] by its groups of channels; weight and bias are [G,C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
        positions, dtype = to_positions(x), torch.float64 if x.dtype == torch.float64 else torch.float32
        groups, b, c, h, w = x.shape
        y, full_weight = torch.empty_like(positions), weight.to(dtype).contiguous()
        means = torch.empty(groups, b, c, dtype=dtype, device=x.device)
        scales = torch.empty_like(means)
        constants = (c, num_groups, dtype == torch.float64, BLOCK_ELEMENTS // c)
        _group_norm_kernel[(b, groups)](
            positions, full_weight, bias.to(dtype).contiguous(), y, means, scales, h * w, eps, *constants, num_warps=8
        )
        ctx.save_for_backward(positions, full_weight, means, scales)
        ctx.shape, ctx.constants, ctx.dtypes = x.shape, constants, (weight.dtype, bias.dtype)
        return to_images(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        positions, weight, means, scales = ctx.saved_tensors
        groups, b, c, h, w = ctx.shape
        gradients, dx = to_positions(dy.to(positions.dtype)), torch.empty_like(positions)
        sums = means.new_empty(groups, b, 2, c)
        _group_norm_gradient_kernel[(b, groups)](
            positions, gradients, weight, means, scales, dx, sums, h * w, *ctx.constants, num_warps=8
        )
        dbias, dweight = sums.sum(1).unbind(1)
        return to_images(dx, ctx.shape), dweight.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None, None


class VmapGroupNorm(torch.autograd.Function):
    """Group norm that uses `StackedGroupNorm` under `vmap`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
        return F.group_norm(x, num_groups, weight.to(x.dtype), bias.to(x.dtype), eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: weights are trained only under `vmap`, which calls `StackedGroupNorm`."""

    @staticmethod
    def vmap(
        info: Any, dims: Sequence[int | None], x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float
    ) -> tuple[Tensor, int]:
        tensors = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, weight, bias), dims)
        )
        return StackedGroupNorm.apply(*tensors, num_groups, eps), 0


def is_supported(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> bool:
    """Return whether the kernels support this norm: images, weights, and numbers that are powers of 2."""
    del eps
    c = x.shape[1]
    has_powers = c & (c - 1) == 0 and c <= MAX_CHANNELS and c % num_groups == 0
    return x.dim() == 4 and weight is not None and bias is not None and has_powers


def normalize(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize with the kernels."""
    y: Tensor = VmapGroupNorm.apply(x, weight, bias, num_groups, eps)
    return y
