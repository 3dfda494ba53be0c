"""Convolutions of clients in one tensor, each with filters of its own, as matrix products in Triton.

Torch turns a convolution under `vmap` into one with groups, for which cuDNN has no fast kernel. Here every client is a
row of programs that gather their columns from the image as they multiply. Sums have a fixed order: the same bits twice.

Legend: G clients, B images, C and O channels in and out, k the filter's rows and columns and C as one axis.
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


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
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
        if WIDE:  # a block of k lies within one place of the filter
            place = start // C
            i, j = top + place // COLUMNS, left + place % COLUMNS
            ok = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            at = ((b * H + i) * W + j) * C + start % C
            columns = tl.load(x + at[:, None] + tl.arange(0, BK)[None, :], mask=ok[:, None], other=0.0)
            filters = tl.load(w + k[:, None] * OUT + n[None, :], mask=n[None, :] < OUT, other=0.0)
        else:
            i, j = top[:, None] + (k // C // COLUMNS)[None, :], left[:, None] + (k // C % COLUMNS)[None, :]
            ok = inside[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            columns = tl.load(x + ((b[:, None] * H + i) * W + j) * C + (k % C)[None, :], mask=ok, other=0.0)
            filters = tl.load(w + k[:, None] * OUT + n[None, :], mask=(k < K)[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(columns, filters, total)
    if BIAS:
        total += tl.load(bias + g * OUT + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    there = inside[:, None] & (n < OUT)[None, :]
    tl.store(y + m[:, None] * OUT + n[None, :], total.to(y.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _filters(
    x, dy, dw, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw [G,k,OUT] = columns of x [G,B,H,W,C], turned, times dy [G,B,P,Q,OUT]."""
    g = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (OUT + BN - 1) // BN
    K: tl.constexpr = ROWS * COLUMNS * C
    k = (tl.program_id(0) // blocks) * BK + tl.arange(0, BK)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    x += g * B * H * W * C
    dw += g * K * OUT
    dy += g * B * P * Q * OUT
    row, column, channel = k // C // COLUMNS - PAD, k // C % COLUMNS - PAD, k % C
    total = tl.zeros((BK, BN), tl.float32)
    for start in range(0, B * P * Q, BM):
        m = start + tl.arange(0, BM)
        inside = m < B * P * Q
        i, j = ((m // Q) % P)[None, :] + row[:, None], (m % Q)[None, :] + column[:, None]
        ok = inside[None, :] & (k < K)[:, None] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        at = (((m // (P * Q))[None, :] * H + i) * W + j) * C + channel[:, None]
        columns = tl.load(x + at, mask=ok, other=0.0)
        slopes = tl.load(dy + m[:, None] * OUT + n[None, :], mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(columns, slopes, total)
    tl.store(dw + k[:, None] * OUT + n[None, :], total, mask=(k < K)[:, None] & (n < OUT)[None, :])


def _convolved(x: Tensor, w: Tensor, bias: Tensor | None, size: tuple[int, int], pad: int) -> Tensor:
    """x [G,B,H,W,C] and w [G,k,O], both contiguous, to [G,B,P,Q,O]."""
    (groups, b, h, width, c), o = x.shape, w.shape[-1]
    p, q = h + 2 * pad - size[0] + 1, width + 2 * pad - size[1] + 1
    y = x.new_empty(groups, b, p, q, o)
    bm, bn = 128, min(64, max(16, triton.next_power_of_2(o)))
    bk = 64 if c % 64 == 0 and x.dtype == torch.bfloat16 else 32
    grid = (triton.cdiv(b * p * q, bm) * triton.cdiv(o, bn), groups)
    _forward[grid](
        x, w, y if bias is None else bias, y, b, h, width, c, p, q, o, *size, pad, bias is not None, c % bk == 0,
        bm, bn, bk, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


class Convolution(torch.autograd.Function):
    """y [G,B,O,P,Q] of x [G,B,C,H,W] and w [G,O,C,r,s], stride 1; memory with channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, pad: int, dtype: torch.dtype) -> Tensor:
        groups, o, _, *size = w.shape
        images = x.to(dtype).permute(0, 1, 3, 4, 2).contiguous()
        filters = w.to(dtype).permute(0, 3, 4, 2, 1).reshape(groups, -1, o).contiguous()
        ctx.save_for_backward(images, w)
        ctx.pad, ctx.types = pad, (x.dtype, None if bias is None else bias.dtype)
        return _convolved(images, filters, bias, (size[0], size[1]), pad).permute(0, 1, 4, 2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        images, w = ctx.saved_tensors
        groups, o, c, rows, columns = w.shape
        slopes = dy.to(images.dtype).permute(0, 1, 3, 4, 2).contiguous()
        dx = dbias = None
        if ctx.needs_input_grad[0]:  # the convolution of the slopes with turned filters
            turned = w.to(images.dtype).flip(3, 4).permute(0, 3, 4, 1, 2).reshape(groups, -1, c).contiguous()
            dx = _convolved(slopes, turned, None, (rows, columns), rows - 1 - ctx.pad)
            dx = dx.permute(0, 1, 4, 2, 3).to(ctx.types[0])
        dw = torch.empty(groups, rows * columns * c, o, dtype=torch.float32, device=w.device)
        _, b, p, q, _ = slopes.shape
        bn, bk = min(64, max(16, triton.next_power_of_2(o))), 64
        grid = (triton.cdiv(rows * columns * c, bk) * triton.cdiv(o, bn), groups)
        _filters[grid](
            images, slopes, dw, b, *images.shape[2:4], c, p, q, o, rows, columns, ctx.pad, 64, bn, bk,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        dw = dw.reshape(groups, rows, columns, c, o).permute(0, 4, 3, 1, 2).to(w.dtype)
        if ctx.types[1] is not None:
            dbias = slopes.sum((1, 2, 3), dtype=torch.float32).to(ctx.types[1])
        return dx, dw, dbias, None, None


class Mapped(torch.autograd.Function):
    """A convolution that, once mapped over clients, knows who has filters of their own."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, pad: int, dtype: torch.dtype) -> Tensor:
        return F.conv2d(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype), padding=pad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: clients' filters learn only under `vmap`, which goes another way."""

    @staticmethod
    def vmap(
        info: Any, dims: Sequence[int | None], x: Tensor, w: Tensor, bias: Tensor | None, pad: int, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
        if dims[1] is None:  # all silos have the same filters: one large batch
            flat = F.conv2d(x.flatten(0, 1).to(dtype), w.to(dtype), padding=pad).unflatten(0, x.shape[:2])
            if bias is None:
                return flat, 0
            own = bias if dims[2] is None else bias.movedim(dims[2], 0)[:, None]
            return flat + own.to(dtype)[..., None, None], 0
        if bias is not None:
            bias = bias.expand(len(x), -1) if dims[2] is None else bias.movedim(dims[2], 0)
        return Convolution.apply(x, w.movedim(dims[1], 0), bias, pad, dtype), 0


def plain(
    x: Tensor, w: Tensor, _bias: Any = None, stride: Any = 1, pad: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether the kernels know this convolution: stride 1, one group, the same margin on all sides."""

    def one(value: Any) -> bool:
        return value in (1, (1, 1))

    margin = isinstance(pad, int) or (isinstance(pad, tuple) and len(pad) == 2 and pad[0] == pad[1])
    return x.dim() == 4 and groups == 1 and one(stride) and one(dilation) and margin and w.shape[2] == w.shape[3]
