"""What `vmap` does not do on a GPU, or not well, done otherwise while clients run in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)


class Mapping(TorchFunctionMode):
    """Within it, batch norm is plain arithmetic: torch's asks for a memory layout, which nobody knows under `vmap`.

    With `convolve`, plain convolutions go through kernels of our own.
    """

    def __init__(self, *, convolve: bool) -> None:
        super().__init__()
        self.convolve = convolve

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return batch_norm(*args, **(kwargs or {}))
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        if self.convolve and func is torch.conv2d:
            from uefl.engines.convolution import Mapped, plain  # needs Triton

            x, w, bias, stride, pad, *rest = spread(*args, **(kwargs or {}))
            if plain(x, w, bias, stride, pad, *rest):
                return Mapped.apply(x, w, bias, pad if isinstance(pad, int) else pad[0], half or w.dtype)  # type: ignore[no-untyped-call]
        if func in CONVOLUTIONS and half:  # autocast forgets the bias under `vmap`
            args, kwargs = tree_map(lambda t: t.to(half) if isinstance(t, Tensor) else t, (args, kwargs))
            with torch.autocast("cuda", enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def spread(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    """The arguments of `conv2d`, however they were given."""
    return input, weight, bias, stride, padding, dilation, groups


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`: (x − μ) / √(σ² + ε) · γ + β over all axes but the second; statistics in full precision."""
    full = x.float() if x.dtype == torch.bfloat16 else x
    if training or mean is None or variance is None:
        axes = [i for i in range(x.dim()) if i != 1]
        v, m = torch.var_mean(full, axes, correction=0)
        if mean is not None and variance is not None:
            n = x.numel() / x.shape[1]
            with torch.no_grad():  # the running variance is the unbiased one
                mean.mul_(1 - momentum).add_(m.detach() * momentum)
                variance.mul_(1 - momentum).add_(v.detach() * (momentum * n / (n - 1)))
    else:
        m, v = mean, variance
    scale = torch.rsqrt(v + eps)
    scale = scale if weight is None else scale * weight
    shift = -m * scale if bias is None else bias - m * scale
    shape = [1, -1] + [1] * (x.dim() - 2)
    return torch.addcmul(shift.reshape(shape), full, scale.reshape(shape)).to(x.dtype)
