"""Tell tensors that a compiler or `vmap` follows from plain ones."""

from __future__ import annotations

import torch
from torch import Tensor


def is_traced(tensor: Tensor) -> bool:
    """Return whether code runs for a compiler, or a tensor stands for those of several clients under `vmap`.

    Such a tensor has no value that can be read, and `requires_grad` does not tell whether it has a gradient.
    """
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
