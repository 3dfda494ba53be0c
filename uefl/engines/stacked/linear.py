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
        dw = torch.bmm(gradients.mT, inputs).to(w_dtype) if ctx.needs_input_grad[1] else None
        dbias = None if bias_dtype is None else gradients.sum(1, dtype=bias_dtype)
        return dx, dw, dbias, None


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
        stacked = (
            t if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, w, bias), dims)
        )
        return StackedLinear.apply(*stacked, dtype), 0  # type: ignore[no-untyped-call]


def is_supported(x: Tensor, w: Tensor) -> bool:
    """Return whether a layer has one row of inputs per example."""
    return x.dim() == w.dim() == 2


def apply_linear(x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Apply a linear layer in this type."""
    y: Tensor = VmapLinear.apply(x, w, bias, dtype)  # type: ignore[no-untyped-call]
    return y
