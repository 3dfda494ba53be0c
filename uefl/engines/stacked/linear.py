"""Linear layers of stacked clients, whose gradients of weights lie in memory as the weights do.

Under `vmap`, torch multiplies by transposed weights and returns the gradient as a transposed tensor. Optimizers then
read it across, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HAS_TYPED_PRODUCTS = hasattr(torch.ops.aten.bmm, "dtype")  # since torch 2.8


class StackedLinear(torch.autograd.Function):
    """y [G,B,O] = x [G,B,I] times w [G,O,I], transposed, plus bias [G,O], computed in this type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        inputs, weights = x.to(dtype), w.to(dtype)
        ctx.save_for_backward(inputs, weights)
        ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
        if bias is None:
            return torch.bmm(inputs, weights.mT)
        return torch.baddbmm(bias.to(dtype)[:, None], inputs, weights.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        inputs, weights = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        gradients = dy.to(inputs.dtype)
        dx = torch.bmm(gradients, weights).to(x_dtype) if ctx.needs_input_grad[0] else None
        dw = multiply(gradients.mT, inputs, w_dtype) if ctx.needs_input_grad[1] else None
        dbias = None if bias_dtype is None else gradients.sum(1, dtype=bias_dtype)
        return dx, dw, dbias, None


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of stacked matrices in this type, on a GPU without a copy in half precision."""
    if a.is_cuda and a.dtype == torch.bfloat16 and dtype == torch.float32 and HAS_TYPED_PRODUCTS:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a, b).to(dtype)


class VmapLinear(torch.autograd.Function):
    """A linear layer that uses `StackedLinear` under `vmap` if clients have separate weights."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: weights are trained only under `vmap`, which calls `StackedLinear`."""

    @staticmethod
    def vmap(
        info: Any, dims: Sequence[int | None], x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
        if bias is not None:
            bias = bias.expand(info.batch_size, -1) if dims[2] is None else bias.movedim(dims[2], 0)
        if dims[1] is None:  # all silos have the same weights: one large product
            y = F.linear(x.flatten(0, 1).to(dtype), w.to(dtype)).reshape(*x.shape[:2], len(w))
            return y if bias is None else y + bias.to(dtype)[:, None], 0
        return StackedLinear.apply(x, w.movedim(dims[1], 0), bias, dtype), 0  # type: ignore[no-untyped-call]


def is_supported(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Return whether a layer has one row of inputs per example, and one bias for all."""
    return x.dim() == w.dim() == 2 and (bias is None or bias.dim() == 1)


def apply_linear(x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Apply a linear layer in this type."""
    y: Tensor = VmapLinear.apply(x, w, bias, dtype)  # type: ignore[no-untyped-call]
    return y
