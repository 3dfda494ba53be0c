"""Convolutions of stacked clients with separate filters, as matrix products in Triton.

Torch turns a convolution under `vmap` into a grouped convolution, for which cuDNN has no fast kernel. Here each client
has a row of programs that gather columns from the images as they multiply. Sums have a fixed order, so results are
deterministic.

Legend: G clients, B images, C input and O output channels; k is the axis of a filter's rows, columns and C together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# A filter's gradient is summed over parts of the positions first: few filters would leave most of the device idle. The
# length does not depend on the number of clients, and so neither does the result.
POSITIONS_PER_PART = 4096
FEW_POSITIONS = 512  # smaller blocks then give the device more programs
FEW_CHANNELS = 8  # of images; a block of channels would be mostly empty


@triton.jit(do_not_specialize=["B"])  # type: ignore[untyped-decorator]
def _forward_kernel(
    x, w, bias, y, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BIAS: tl.constexpr, REVERSED: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """y [G,B,P,Q,OUT] = columns of x [G,B,H,W,C] times w [G,OUT,k]; with REVERSED, filters are turned around."""
    g = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (OUT + BN - 1) // BN
    K: tl.constexpr = ROWS * COLUMNS * C
    m = (tl.program_id(0) // blocks) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    x += g * B * H * W * C
    w += g * K * OUT
    y += g * B * P * Q * OUT
    inside = m < B * P * Q
    b, top, left = m // (P * Q), (m // Q) % P * STRIDE - PAD, m % Q * STRIDE - PAD
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if REVERSED:
            source = w + ((ROWS * COLUMNS - 1 - k // C) * C + k % C)[:, None] + n[None, :] * K
        else:
            source = w + k[:, None] + n[None, :] * K
        if WIDE:  # a block of k is within one position of the filter
            position = start // C
            i, j = top + position // COLUMNS, left + position % COLUMNS
            ok = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            channel = tl.multiple_of(start % C, BK)  # the compiler cannot see it, and would read one value at a time
            offset = ((b * H + i) * W + j) * C + channel
            columns = tl.load(x + offset[:, None] + tl.arange(0, BK)[None, :], mask=ok[:, None], other=0.0)
            filters = tl.load(source, mask=n[None, :] < OUT, other=0.0)
        else:
            i, j = top[:, None] + (k // C // COLUMNS)[None, :], left[:, None] + (k // C % COLUMNS)[None, :]
            ok = inside[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            columns = tl.load(x + ((b[:, None] * H + i) * W + j) * C + (k % C)[None, :], mask=ok, other=0.0)
            filters = tl.load(source, mask=(k < K)[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(columns, filters, total)
    if BIAS:
        total += tl.load(bias + g * OUT + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    valid = inside[:, None] & (n < OUT)[None, :]
    tl.store(y + m[:, None] * OUT + n[None, :], total.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["B"])  # type: ignore[untyped-decorator]
def _filter_gradient_kernel(
    x, dy, dw, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    PART: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dw [S,G,OUT,k] = dy [G,B,P,Q,OUT], transposed, times the columns of x [G,B,H,W,C], over S parts of the positions.

    A program computes TAPS neighboring positions of the filters, 1 or 3, which share the gradients. Offsets are
    computed per position, not per element, and channels are read as they lie in memory.
    """
    g, part, block = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.program_id(0)
    n_blocks: tl.constexpr = (OUT + BN - 1) // BN
    c_blocks: tl.constexpr = (C + BC - 1) // BC
    K: tl.constexpr = ROWS * COLUMNS * C
    n = (block % n_blocks) * BN + tl.arange(0, BN)
    c = (block // n_blocks % c_blocks) * BC + tl.arange(0, BC)
    tap = block // (n_blocks * c_blocks) * TAPS
    row, column = tap // COLUMNS - PAD, tap % COLUMNS - PAD
    x += g * B * H * W * C
    dy += g * B * P * Q * OUT
    dw += (part * tl.num_programs(1) + g) * K * OUT
    first, second, third = (
        tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32)
    )  # fmt: skip
    for start in range(part * PART, min(part * PART + PART, B * P * Q), BM):
        m = start + tl.arange(0, BM)
        inside = m < B * P * Q
        i, j = (m // Q) % P * STRIDE + row, m % Q * STRIDE + column
        ok = (inside & (i >= 0) & (i < H))[:, None] & (c < C)[None, :]
        source = x + ((m // (P * Q) * H + i) * W + j)[:, None] * C + c[None, :]
        gradients = tl.load(dy + m[:, None] * OUT + n[None, :], mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        gradients = tl.trans(gradients)
        columns = tl.load(source, mask=ok & ((j >= 0) & (j < W))[:, None], other=0.0)
        first = tl.dot(gradients, columns, first)
        if TAPS == 3:
            columns = tl.load(source + C, mask=ok & ((j >= -1) & (j < W - 1))[:, None], other=0.0)
            second = tl.dot(gradients, columns, second)
            columns = tl.load(source + 2 * C, mask=ok & ((j >= -2) & (j < W - 2))[:, None], other=0.0)
            third = tl.dot(gradients, columns, third)
    target = dw + n[:, None] * K + (tap * C + c)[None, :]
    valid = (n < OUT)[:, None] & (c < C)[None, :]
    tl.store(target, first, mask=valid)
    if TAPS == 3:
        tl.store(target + C, second, mask=valid)
        tl.store(target + 2 * C, third, mask=valid)


@triton.jit(do_not_specialize=["B"])  # type: ignore[untyped-decorator]
def _short_filter_gradient_kernel(
    x, dy, dw, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same for images of few channels: a program computes a block of k, and so reads the gradients once for all."""
    g, part, block = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.program_id(0)
    n_blocks: tl.constexpr = (OUT + BN - 1) // BN
    K: tl.constexpr = ROWS * COLUMNS * C
    n = (block % n_blocks) * BN + tl.arange(0, BN)
    k = (block // n_blocks) * BK + tl.arange(0, BK)
    row, column = k // C // COLUMNS - PAD, k // C % COLUMNS - PAD
    x += g * B * H * W * C
    dy += g * B * P * Q * OUT
    dw += (part * tl.num_programs(1) + g) * K * OUT
    total = tl.zeros((BN, BK), tl.float32)
    for start in range(part * PART, min(part * PART + PART, B * P * Q), BM):
        m = start + tl.arange(0, BM)
        inside = m < B * P * Q
        i, j = ((m // Q) % P * STRIDE)[:, None] + row[None, :], (m % Q * STRIDE)[:, None] + column[None, :]
        ok = inside[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        gradients = tl.load(dy + m[:, None] * OUT + n[None, :], mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        columns = tl.load(x + (((m // (P * Q) * H)[:, None] + i) * W + j) * C + (k % C)[None, :], mask=ok, other=0.0)
        total = tl.dot(tl.trans(gradients), columns, total)
    tl.store(dw + n[:, None] * K + k[None, :], total, mask=(n < OUT)[:, None] & (k < K)[None, :])


def choose_block(size: int, largest: int = 64) -> int:
    """Return the number of channels or filters of a program: a power of 2 that a matrix product supports."""
    block: int = triton.next_power_of_2(size)
    return min(largest, max(16, block))


class Tile(NamedTuple):
    """The work of one program in one step, and how it is executed: the fastest of those tried (docs/log.md)."""

    positions: int
    outputs: int  # channels of the result, or filters
    inputs: int  # of k, or channels
    num_warps: int = 4
    num_stages: int = 3  # loads that are under way; more need registers


def choose_forward_tile(dtype: torch.dtype, num_positions: int, k: int, c: int, o: int) -> Tile:
    """Return the tile of a convolution of c channels with o filters of k weights."""
    if dtype == torch.bfloat16:
        return choose_half_precision_tile(num_positions, k, c, o)
    outputs = choose_block(o)
    if c % 32 == 0 and o % 128 == 0:
        return Tile(128, 128, 32, num_warps=8)
    if c % 32 == 0:
        return Tile(128, outputs, 32)
    if c == 16:
        return Tile(128, outputs, 16, num_stages=2) if outputs <= 16 else Tile(256, outputs, 16)
    return Tile(128, outputs, 16, num_stages=1) if c == 4 else Tile(128, outputs, choose_block(k, 32))


def choose_half_precision_tile(num_positions: int, k: int, c: int, o: int) -> Tile:
    """Return the tile of a convolution in bfloat16."""
    outputs = choose_block(o)
    if c % 64 == 0 and num_positions <= FEW_POSITIONS:
        return Tile(64, outputs, 64, num_stages=4)
    if c % 64 == 0:
        return Tile(128, 128, 64, num_warps=8) if o % 128 == 0 else Tile(128, outputs, 64)
    if c % 32 == 0:
        return Tile(256, outputs, 32) if outputs <= 32 else Tile(128, outputs, 32, num_stages=4)
    if c == 16:
        return Tile(128, 16, 16, num_warps=2, num_stages=2) if outputs <= 16 else Tile(256, outputs, 16, num_stages=4)
    if k <= 16:  # images of one channel, or filters of one pixel
        return Tile(256, outputs, 16, num_warps=2) if outputs <= 32 else Tile(256, outputs, 16, num_stages=1)
    return Tile(128, outputs, choose_block(k, 128 if c < FEW_CHANNELS else 32))  # or all weights of a filter at once


def choose_gradient_tile(dtype: torch.dtype, c: int, o: int) -> Tile:
    """Return the tile of the gradient of o filters of c channels."""
    largest = 128 if dtype == torch.bfloat16 else 64
    outputs, inputs = choose_block(o, largest), choose_block(c, largest)
    size = outputs * inputs
    if dtype == torch.bfloat16:
        if size <= 1024:
            return Tile({256: 128, 512: 64}.get(size, 32), outputs, inputs, num_warps=1)
        return Tile(32, outputs, inputs, num_stages=4) if size > 8192 else Tile(64, outputs, inputs)
    if size <= 1024:
        return Tile(64 if size <= 512 else 32, outputs, inputs, num_warps=1)
    return Tile(128 if size <= 2048 else 64, outputs, inputs, num_stages=1)


def choose_short_gradient_tile(dtype: torch.dtype, k: int, o: int) -> Tile:
    """Return the tile of the gradient of o filters of k weights, of images with few channels."""
    outputs = choose_block(o)
    if dtype == torch.bfloat16 and k > 64:
        return Tile(64, outputs, choose_block(k, 128))
    inputs = choose_block(k)
    if outputs * inputs > 256:
        return Tile(64, outputs, inputs, num_stages=1)
    return Tile(128, outputs, inputs, 1, 1) if dtype == torch.bfloat16 else Tile(64, outputs, inputs, 2, 1)


def _convolve(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: int, *, stride: int = 1, is_reversed: bool = False
) -> Tensor:
    """Convolve x [G,B,H,W,C] with w [G,O,r,s,C]: [G,B,P,Q,O]; or with the rows and columns of w in reverse order."""
    (groups, b, h, width, c), (o, rows, columns) = x.shape, w.shape[1:4]
    p, q = (h + 2 * padding - rows) // stride + 1, (width + 2 * padding - columns) // stride + 1
    y = x.new_empty(groups, b, p, q, o)
    bm, bn, bk, num_warps, num_stages = choose_forward_tile(x.dtype, b * p * q, rows * columns * c, c, o)
    grid = (triton.cdiv(b * p * q, bm) * triton.cdiv(o, bn), groups)
    _forward_kernel[grid](
        x, w, y if bias is None else bias, y, b, h, width, c, p, q, o, rows, columns, stride, padding,
        bias is not None, is_reversed, c % bk == 0, bm, bn, bk, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


def _compute_filter_gradient(x: Tensor, dy: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """Return the gradient of w [G,O,r,s,C] in float32, for images x [G,B,H,W,C] and gradients dy [G,B,P,Q,O]."""
    (groups, o, rows, columns, c), (b, p, q) = w.shape, dy.shape[1:4]
    parts = triton.cdiv(b * p * q, POSITIONS_PER_PART)
    dw = torch.empty(parts, *w.shape, dtype=torch.float32, device=w.device)
    arguments = (x, dy, dw, b, *x.shape[2:4], c, p, q, o, rows, columns, stride, padding, POSITIONS_PER_PART)
    if c < FEW_CHANNELS:
        bm, bn, bk, num_warps, num_stages = choose_short_gradient_tile(x.dtype, rows * columns * c, o)
        grid = (triton.cdiv(rows * columns * c, bk) * triton.cdiv(o, bn), groups, parts)
        _short_filter_gradient_kernel[grid](*arguments, bm, bn, bk, num_warps=num_warps, num_stages=num_stages)
    else:
        bm, bn, bc, num_warps, num_stages = choose_gradient_tile(x.dtype, c, o)
        # Three larger sums do not fit into registers.
        taps = 3 if columns == 3 and bn * bc <= (1024 if x.dtype == torch.bfloat16 else 2048) else 1
        grid = (rows * columns // taps * triton.cdiv(c, bc) * triton.cdiv(o, bn), groups, parts)
        _filter_gradient_kernel[grid](*arguments, taps, bm, bn, bc, num_warps=num_warps, num_stages=num_stages)
    return dw[0] if parts == 1 else dw.sum(0)


class StackedConvolution(torch.autograd.Function):
    """Convolve x [G,B,C,H,W] with w [G,O,C,r,s]: [G,B,O,P,Q] with channels last in memory.

    If the channels of x and w are last in memory, as the engine stores them, nothing is copied but to another type, and
    few channels that are not a power of 2.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, dtype: torch.dtype
    ) -> Tensor:
        images, filters = (pad_channels(t.to(dtype).permute(0, 1, 3, 4, 2)).contiguous() for t in (x, w))
        ctx.save_for_backward(images, filters)
        ctx.stride, ctx.padding, ctx.channels = stride, padding, x.shape[2]
        ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
        return _convolve(images, filters, bias, padding, stride=stride).permute(0, 1, 4, 2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        images, filters = ctx.saved_tensors
        rows = filters.shape[2]
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        gradients = dy.to(images.dtype).permute(0, 1, 3, 4, 2).contiguous()
        dx = dbias = None
        if ctx.needs_input_grad[0]:  # the convolution of the gradients with the filters turned around
            spread = _spread(gradients, ctx.stride, *(size + 2 * ctx.padding - rows + 1 for size in images.shape[2:4]))
            # Copied with the channels of the gradients last: to read them across takes up to seven times as long.
            dx = _convolve(
                spread, filters.permute(0, 4, 2, 3, 1).contiguous(), None, rows - 1 - ctx.padding, is_reversed=True
            )
            dx = dx[..., : ctx.channels].permute(0, 1, 4, 2, 3).to(x_dtype)
        total = _compute_filter_gradient(images, gradients, filters, ctx.stride, ctx.padding)
        total = total[..., : ctx.channels].contiguous()
        if bias_dtype is not None:
            dbias = gradients.sum((1, 2, 3), dtype=torch.float32).to(bias_dtype)
        return dx, total.permute(0, 1, 4, 2, 3).to(w_dtype), dbias, None, None, None


def pad_channels(x: Tensor) -> Tensor:
    """Add zeros to few last channels, so that their number is a power of 2: three would be read one by one."""
    missing = triton.next_power_of_2(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, missing)) if missing and x.shape[-1] < FEW_CHANNELS else x  # to pad nothing would copy


def _spread(gradients: Tensor, stride: int, height: int, width: int) -> Tensor:
    """Return gradients [G,B,P,Q,O] at the positions that a stride has kept, with zeros between them."""
    if stride == 1:
        return gradients
    spread = gradients.new_zeros(*gradients.shape[:2], height, width, gradients.shape[-1])
    spread[:, :, ::stride, ::stride] = gradients
    return spread


class VmapConvolution(torch.autograd.Function):
    """A convolution that uses `StackedConvolution` under `vmap` if clients have separate filters."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
        return F.conv2d(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype), stride, padding)

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
        stride: int,
        padding: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
        if dims[1] is None:  # all silos have the same filters: one large batch
            y = F.conv2d(x.flatten(0, 1).to(dtype), w.to(dtype), None, stride, padding).unflatten(0, x.shape[:2])
            if bias is None:
                return y, 0
            bias = bias if dims[2] is None else bias.movedim(dims[2], 0)[:, None]
            return y + bias.to(dtype)[..., None, None], 0
        if bias is not None:
            bias = bias.expand(len(x), -1) if dims[2] is None else bias.movedim(dims[2], 0)
        return StackedConvolution.apply(x, w.movedim(dims[1], 0), bias, stride, padding, dtype), 0


def is_supported(
    x: Tensor, w: Tensor, _bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Return whether the kernels support this convolution: one group, equal stride and padding on all sides."""

    def is_even(value: Any) -> bool:
        return isinstance(value, int) or (isinstance(value, tuple) and len(value) == 2 and value[0] == value[1])

    square = w.shape[2] == w.shape[3]
    return x.dim() == 4 and groups == 1 and dilation in (1, (1, 1)) and is_even(stride) and is_even(padding) and square


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    """Convolve with the kernels; a stride drops pixels before filters of one pixel, so that gradients are small too."""
    if stride > 1 and w.shape[-1] == 1 and padding == 0:
        x, stride = x[..., ::stride, ::stride], 1
    y: Tensor = VmapConvolution.apply(x, w, bias, stride, padding, dtype)
    return y
