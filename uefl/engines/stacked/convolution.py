"""Convolutions of stacked clients with separate filters, as matrix products in Triton.

Torch turns a convolution under `vmap` into a grouped convolution, for which cuDNN has no fast kernel. Here each client
has a row of programs that gather columns from the images as they multiply. Sums have a fixed order, so results are
deterministic.

Legend: G clients, B images, C input and O output channels; k is the axis of a filter's rows, columns and C together.
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

# A filter's gradient is summed over parts of the positions first: few filters would leave most of the device idle. The
# length does not depend on the number of clients, and so neither does the result.
POSITIONS_PER_PART = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    x, w, bias, y, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAD: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [G,B,P,Q,OUT] = columns of x [G,B,H,W,C] times w [G,k,OUT]."""
    g = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (OUT + BN - 1) // BN
    K: tl.constexpr = ROWS * COLUMNS * C
    m = (tl.program_id(0) // blocks) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    x += g * B * H * W * C
    w += g * K * OUT
    y += g * B * P * Q * OUT
    inside = m < B * P * Q
    b, top, left = m // (P * Q), (m // Q) % P - PAD, m % Q - PAD
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if WIDE:  # a block of k is within one position of the filter
            position = start // C
            i, j = top + position // COLUMNS, left + position % COLUMNS
            ok = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            offset = ((b * H + i) * W + j) * C + start % C
            columns = tl.load(x + offset[:, None] + tl.arange(0, BK)[None, :], mask=ok[:, None], other=0.0)
            filters = tl.load(w + k[:, None] * OUT + n[None, :], mask=n[None, :] < OUT, other=0.0)
        else:
            i, j = top[:, None] + (k // C // COLUMNS)[None, :], left[:, None] + (k // C % COLUMNS)[None, :]
            ok = inside[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            columns = tl.load(x + ((b[:, None] * H + i) * W + j) * C + (k % C)[None, :], mask=ok, other=0.0)
            filters = tl.load(w + k[:, None] * OUT + n[None, :], mask=(k < K)[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(columns, filters, total)
    if BIAS:
        total += tl.load(bias + g * OUT + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    valid = inside[:, None] & (n < OUT)[None, :]
    tl.store(y + m[:, None] * OUT + n[None, :], total.to(y.dtype.element_ty), mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def _filter_gradient_kernel(
    x, dy, dw, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAD: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw [S,G,k,OUT] = transposed columns of x [G,B,H,W,C] times dy [G,B,P,Q,OUT], over S parts of the positions."""
    g, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    blocks: tl.constexpr = (OUT + BN - 1) // BN
    K: tl.constexpr = ROWS * COLUMNS * C
    k = (tl.program_id(0) // blocks) * BK + tl.arange(0, BK)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    x += g * B * H * W * C
    dw += (part * tl.num_programs(1) + g) * K * OUT
    dy += g * B * P * Q * OUT
    row, column, channel = k // C // COLUMNS - PAD, k // C % COLUMNS - PAD, k % C
    total = tl.zeros((BK, BN), tl.float32)
    for start in range(0, PART, BM):
        m = part * PART + start + tl.arange(0, BM)
        inside = m < B * P * Q
        i, j = ((m // Q) % P)[None, :] + row[:, None], (m % Q)[None, :] + column[:, None]
        ok = inside[None, :] & (k < K)[:, None] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        offset = (((m // (P * Q))[None, :] * H + i) * W + j) * C + channel[:, None]
        columns = tl.load(x + offset, mask=ok, other=0.0)
        gradients = tl.load(dy + m[:, None] * OUT + n[None, :], mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(columns, gradients, total)
    tl.store(dw + k[:, None] * OUT + n[None, :], total, mask=(k < K)[:, None] & (n < OUT)[None, :])


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, kernel_size: tuple[int, int], padding: int) -> Tensor:
    """Convolve x [G,B,H,W,C] with w [G,k,O], both contiguous: [G,B,P,Q,O]."""
    (groups, b, h, width, c), o = x.shape, w.shape[-1]
    p, q = h + 2 * padding - kernel_size[0] + 1, width + 2 * padding - kernel_size[1] + 1
    y = x.new_empty(groups, b, p, q, o)
    bm, bn = 128, min(64, max(16, triton.next_power_of_2(o)))
    bk = 64 if c % 64 == 0 and x.dtype == torch.bfloat16 else 32
    grid = (triton.cdiv(b * p * q, bm) * triton.cdiv(o, bn), groups)
    _forward_kernel[grid](
        x, w, y if bias is None else bias, y, b, h, width, c, p, q, o, *kernel_size, padding, bias is not None,
        c % bk == 0, bm, bn, bk, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


class StackedConvolution(torch.autograd.Function):
    """Convolve x [G,B,C,H,W] with w [G,O,C,r,s] at stride 1: [G,B,O,P,Q] with channels last in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, padding: int, dtype: torch.dtype) -> Tensor:
        groups, o, _, rows, columns = w.shape
        images = x.to(dtype).permute(0, 1, 3, 4, 2).contiguous()
        filters = w.to(dtype).permute(0, 3, 4, 2, 1).reshape(groups, -1, o).contiguous()
        ctx.save_for_backward(images, w)
        ctx.padding, ctx.dtypes = padding, (x.dtype, None if bias is None else bias.dtype)
        return _convolve(images, filters, bias, (rows, columns), padding).permute(0, 1, 4, 2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        images, w = ctx.saved_tensors
        groups, o, c, rows, columns = w.shape
        gradients = dy.to(images.dtype).permute(0, 1, 3, 4, 2).contiguous()
        dx = dbias = None
        if ctx.needs_input_grad[0]:  # the convolution of the gradients with flipped filters
            flipped = w.to(images.dtype).flip(3, 4).permute(0, 3, 4, 1, 2).reshape(groups, -1, c).contiguous()
            dx = _convolve(gradients, flipped, None, (rows, columns), rows - 1 - ctx.padding)
            dx = dx.permute(0, 1, 4, 2, 3).to(ctx.dtypes[0])
        _, b, p, q, _ = gradients.shape
        parts = triton.cdiv(b * p * q, POSITIONS_PER_PART)
        dw = torch.empty(parts, groups, rows * columns * c, o, dtype=torch.float32, device=w.device)
        bn, bk = min(64, max(16, triton.next_power_of_2(o))), 64
        grid = (triton.cdiv(rows * columns * c, bk) * triton.cdiv(o, bn), groups, parts)
        _filter_gradient_kernel[grid](
            images, gradients, dw, b, *images.shape[2:4], c, p, q, o, rows, columns, ctx.padding, POSITIONS_PER_PART,
            64, bn, bk, num_warps=4, num_stages=3,
        )  # fmt: skip
        dw = dw.sum(0).reshape(groups, rows, columns, c, o).permute(0, 4, 3, 1, 2).to(w.dtype)
        if ctx.dtypes[1] is not None:
            dbias = gradients.sum((1, 2, 3), dtype=torch.float32).to(ctx.dtypes[1])
        return dx, dw, dbias, None, None


class VmapConvolution(torch.autograd.Function):
    """A convolution that uses `StackedConvolution` under `vmap` if clients have separate filters."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, dtype: torch.dtype) -> Tensor:
        return F.conv2d(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype), padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: filters are trained only under `vmap`, which calls `StackedConvolution`."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Sequence[int | None],
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        padding: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
        if dims[1] is None:  # all silos have the same filters: one large batch
            y = F.conv2d(x.flatten(0, 1).to(dtype), w.to(dtype), padding=padding).unflatten(0, x.shape[:2])
            if bias is None:
                return y, 0
            bias = bias if dims[2] is None else bias.movedim(dims[2], 0)[:, None]
            return y + bias.to(dtype)[..., None, None], 0
        if bias is not None:
            bias = bias.expand(len(x), -1) if dims[2] is None else bias.movedim(dims[2], 0)
        return StackedConvolution.apply(x, w.movedim(dims[1], 0), bias, padding, dtype), 0


def is_supported(
    x: Tensor, w: Tensor, _bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Return whether the kernels support this convolution: stride 1, one group, equal padding on all sides."""

    def is_one(value: Any) -> bool:
        return value in (1, (1, 1))

    square = w.shape[2] == w.shape[3]
    even = isinstance(padding, int) or (isinstance(padding, tuple) and len(padding) == 2 and padding[0] == padding[1])
    return x.dim() == 4 and groups == 1 and is_one(stride) and is_one(dilation) and even and square
