"""What `vmap` does not do well on a GPU, done otherwise while clients run in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

NORM = signature(F.batch_norm)


class Mapping(TorchFunctionMode):
    """Within it, batch norm keeps away from cuDNN, which cannot be asked under `vmap`.

    With `convolve`, plain convolutions go through kernels of our own.
    """

    def __init__(self, *, convolve: bool) -> None:
        super().__init__()
        self.convolve = convolve

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            given = NORM.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            x, mean, variance, weight, bias, training, momentum, eps = given.args
            return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, False)
        if self.convolve and func is torch.conv2d and not kwargs:
            from uefl.engines.convolution import Mapped, plain  # needs Triton, which comes with torch for CUDA alone

            if plain(*args):
                x, w, bias, _, pad, *_ = args
                dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else w.dtype
                return Mapped.apply(x, w, bias, pad if isinstance(pad, int) else pad[0], dtype)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
