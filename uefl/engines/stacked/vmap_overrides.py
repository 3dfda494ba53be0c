"""Replacements for operations that `vmap` does not support, or runs slowly, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from uefl.engines.stacked import linear

CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)


class VmapOverrides(TorchFunctionMode):
    """Within this context, compute batch norm by basic operations, since torch's needs the memory layout of its input.

    With `use_triton`, convolutions, max-pooling and group norm that `convolution.py`, `pooling.py` and `group_norm.py`
    support use their kernels, batch norm of images in training those of `batch_norm.py`, and linear layers `linear.py`.
    """

    def __init__(self, *, use_triton: bool) -> None:
        super().__init__()
        self.use_triton = use_triton

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        use_triton = self.use_triton and not is_nested()
        if func is F.batch_norm:
            return batch_norm(*args, **(kwargs or {}), use_triton=use_triton)
        if func is F.max_pool2d and use_triton and not is_differentiated(*args, *(kwargs or {}).values()):
            from uefl.engines.stacked import pooling  # needs Triton

            if pooling.is_supported(*args, **(kwargs or {})):
                return pooling.VmapMaxPool.apply(args[0])  # type: ignore[no-untyped-call]
        if func is F.group_norm and use_triton and not is_differentiated(*args, *(kwargs or {}).values()):
            from uefl.engines.stacked import group_norm  # needs Triton

            if group_norm.is_supported(*args, **(kwargs or {})):
                return group_norm.normalize(*args, **(kwargs or {}))
        autocast_dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        if use_triton and func is torch.conv2d and not is_differentiated(*args, *(kwargs or {}).values()):
            from uefl.engines.stacked.convolution import convolve, is_supported  # needs Triton

            x, w, bias, stride, padding, *others = bind_conv2d_arguments(*args, **(kwargs or {}))
            if is_supported(x, w, bias, stride, padding, *others):
                stride, padding = (value if isinstance(value, int) else value[0] for value in (stride, padding))
                return convolve(x, w, bias, stride, padding, autocast_dtype or w.dtype)
        if use_triton and func is F.linear and not is_differentiated(*args, *(kwargs or {}).values()):
            x, w, bias = bind_linear_arguments(*args, **(kwargs or {}))
            if linear.is_supported(x, w, bias):
                return linear.apply_linear(x, w, bias, autocast_dtype or w.dtype)
        if func in CONVOLUTIONS and autocast_dtype:  # autocast does not convert the bias under `vmap`
            args, kwargs = tree_map(lambda t: t.to(autocast_dtype) if isinstance(t, Tensor) else t, (args, kwargs))
            with torch.autocast("cuda", enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def is_nested() -> bool:
    """Return whether a network uses `vmap` itself, within that of the engine, which our kernels do not support."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    is_vmap = interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Vmap
    return bool(is_vmap and interpreter.level() > 1)


def is_differentiated(*inputs: Any) -> bool:
    """Return whether `torch.func.grad` within `vmap` differentiates an input, which our kernels do not support.

    The engine itself differentiates the result of `vmap`.
    """
    return any(isinstance(t, Tensor) and torch._C._functorch.is_gradtrackingtensor(t) for t in inputs)


def bind_conv2d_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    """Return the arguments of `conv2d`, whether passed by position or by name."""
    return input, weight, bias, stride, padding, dilation, groups


def bind_linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Return the arguments of `linear`, whether passed by position or by name."""
    return input, weight, bias


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    use_triton: bool = False,
) -> Tensor:
    """Compute `F.batch_norm`, (x − μ) / √(σ² + ε) · γ + β per channel, with statistics in full precision."""
    y: Tensor | None = None
    if training or mean is None or variance is None:
        has_weights = weight is not None and bias is not None
        if use_triton and x.dim() == 4 and has_weights and not is_differentiated(x, weight, bias):
            from uefl.engines.stacked.batch_norm import VmapBatchNorm  # needs Triton

            y, m, v = VmapBatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
        else:
            v, m = torch.var_mean(to_full_precision(x), [i for i in range(x.dim()) if i != 1], correction=0)
        if mean is not None and variance is not None:
            n = x.numel() / x.shape[1]
            with torch.no_grad():  # the running variance is unbiased
                mean.mul_(1 - momentum).add_(m.detach() * momentum)
                variance.mul_(1 - momentum).add_(v.detach() * (momentum * n / (n - 1)))
    else:
        m, v = mean, variance
    if y is not None:
        return y
    scale = torch.rsqrt(v + eps)
    scale = scale if weight is None else scale * weight
    shift = -m * scale if bias is None else bias - m * scale
    shape = [1, -1] + [1] * (x.dim() - 2)
    return torch.addcmul(shift.reshape(shape), to_full_precision(x), scale.reshape(shape)).to(x.dtype)


def to_full_precision(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x
