"""The hash of noise.py as one CUDA kernel; tensor operations need two dozen, more than the layer they mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024


@triton.jit
def _scramble(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return h


@triton.jit  # type: ignore[untyped-decorator]
def _hash_kernel(keys, out, n, SIZE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    key = tl.load(keys + row)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    h = _scramble(_scramble(i.to(tl.uint32) ^ low) + high)
    tl.store(out + row * n + i, h.to(tl.int32, bitcast=True), mask=i < n)


def hash_keys(keys: Tensor, n: int) -> Tensor:
    """Return n random 32-bit integers for each of the keys [m]: [m, n]."""
    out = torch.empty(len(keys), n, dtype=torch.int32, device=keys.device)
    if out.numel():
        _hash_kernel[triton.cdiv(n, BLOCK_SIZE), len(keys)](keys.contiguous(), out, n, BLOCK_SIZE)
    return out


class KeyHash(torch.autograd.Function):
    """Hash a key [] or keys [..., 1], also under `vmap`."""

    @staticmethod
    def forward(key: Tensor, n: int) -> Tensor:
        return hash_keys(key.reshape(-1), n).reshape(*key.shape[:-1], n)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: bits have no gradient."""

    @staticmethod
    def vmap(_info: Any, dims: Sequence[int | None], keys: Tensor, n: int) -> tuple[Tensor, int]:
        keys = keys.movedim(dims[0], 0)  # type: ignore[arg-type]
        return hash_keys(keys.reshape(-1), n).reshape(*(keys.shape if keys.dim() == 1 else keys.shape[:-1]), n), 0
