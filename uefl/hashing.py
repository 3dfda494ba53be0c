"""The hash of noise.py as one CUDA kernel: in tensor operations it is two dozen, more than the layer it masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _scramble(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return h


@triton.jit  # type: ignore[untyped-decorator]
def _hash(keys, out, n, SIZE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    key = tl.load(keys + row)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    h = _scramble(_scramble(i.to(tl.uint32) ^ low) + high)
    tl.store(out + row * n + i, h.to(tl.int32, bitcast=True), mask=i < n)


def hashed(keys: Tensor, n: int) -> Tensor:
    """n words of 32 bits for each of the keys [m]: [m, n]."""
    out = torch.empty(len(keys), n, dtype=torch.int32, device=keys.device)
    if out.numel():
        _hash[triton.cdiv(n, BLOCK), len(keys)](keys.contiguous(), out, n, BLOCK)
    return out


class Hashed(torch.autograd.Function):
    """The same for a key [] or keys [..., 1], and over clients in one tensor."""

    @staticmethod
    def forward(k: Tensor, n: int) -> Tensor:
        return hashed(k.reshape(-1), n).reshape(*k.shape[:-1], n)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: bits have no gradient."""

    @staticmethod
    def vmap(_info: Any, dims: Sequence[int | None], k: Tensor, n: int) -> tuple[Tensor, int]:
        k = k.movedim(dims[0], 0)  # type: ignore[arg-type]
        return hashed(k.reshape(-1), n).reshape(*(k.shape if k.dim() == 1 else k.shape[:-1]), n), 0
