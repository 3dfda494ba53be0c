"""Inputs that stay in their file until a silo takes part, so that memory does not grow with the number of silos."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class LazyTensor:
    """The inputs [n, ...] of some examples, which `load` reads at given positions.

    Shape, type and length are known without reading. An index reads what it selects, `select` reads nothing, and any
    other use, such as a function of torch, reads all.
    """

    __slots__ = ("_load", "dtype", "shape")

    def __init__(self, load: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        self._load, self.shape, self.dtype = load, torch.Size(shape), dtype

    @classmethod
    def from_array(cls, array: Any) -> LazyTensor:
        """Return the rows of a tensor or an array, such as a view of `np.memmap`, without reading them."""
        if isinstance(array, Tensor):
            return cls(lambda positions: array[positions], array.shape, array.dtype)

        def load(positions: Tensor) -> Tensor:
            rows = torch.from_numpy(np.array(array[positions.numpy()]))
            release_pages(array)
            return rows

        return cls(load, array.shape, torch.from_numpy(np.empty(0, array.dtype)).dtype)

    def load(self) -> Tensor:
        """Read all inputs."""
        return self._load(torch.arange(len(self)))

    def select(self, positions: Tensor) -> LazyTensor:
        """Return the inputs at these positions, without reading them."""
        return LazyTensor(lambda own: self._load(positions[own]), (len(positions), *self.shape[1:]), self.dtype)

    def map(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> LazyTensor:
        """Return inputs of the same shape and another type that are changed when they are read."""
        return LazyTensor(lambda positions: change(self._load(positions)), self.shape, dtype)

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        is_positions = isinstance(index, Tensor) and index.dtype == torch.int64
        positions = index if is_positions else torch.arange(len(self))[index]
        return self._load(positions) if positions.dim() else self._load(positions[None])[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def read(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(read, value))
            return value.load() if isinstance(value, LazyTensor) else value

        return function(*read(args), **{name: read(value) for name, value in (kwargs or {}).items()})


def is_lazy(x: object) -> bool:
    """Return whether inputs are read only when they are used."""
    return isinstance(x, LazyTensor)


def load_inputs(x: Any) -> Tensor:
    """Return inputs in memory."""
    tensor: Tensor = x.load() if isinstance(x, LazyTensor) else x
    return tensor


def select_inputs(x: Any, positions: Tensor) -> Any:
    """Return the inputs at these positions; lazy ones stay lazy."""
    return x.select(positions) if isinstance(x, LazyTensor) else x[positions]


def map_inputs(x: Any, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Any:
    """Return changed inputs, which have this type; lazy ones are changed when they are read."""
    return x.map(change, dtype) if isinstance(x, LazyTensor) else change(x)


def release_pages(array: Any) -> None:
    """Give the pages of a mapped file back that reading has brought into memory; the file is not changed."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and getattr(array, "mode", "") == "r" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
