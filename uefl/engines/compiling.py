"""How `torch.compile` is asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SHAPES = 64  # of batches and books; torch stops compiling after 8


def compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss as compiled code, for each shape that it meets."""
    import torch._dynamo as dynamo  # a second of time: only who compiles pays it
    import torch._inductor as inductor

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, SHAPES)
    # Kernels must not be chosen by a race: the next run shall give the same bits. Older compilers have no such option.
    options: dict[str, Any] = {"deterministic": True} if "deterministic" in inductor.list_options() else {}
    found: Callable[..., Tensor] = torch.compile(loss, dynamic=False, options=options)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without the compiler's hints to its developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
