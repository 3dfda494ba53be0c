"""Values whose tensors are in shared memory; the rest of a value is pickled."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as in torch's own memory: kernels may round differently at other addresses


class TensorLayout(NamedTuple):
    """Where a tensor is in a buffer, and its form."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SharedBuffer:
    """Memory that several processes map. It has no name, so it is freed with the last of them, however it ends."""

    def __init__(self, num_bytes: int, handle: int | None = None) -> None:
        self.num_bytes = max(num_bytes, 1)
        self.handle = _create_file(self.num_bytes) if handle is None else handle
        weakref.finalize(self, os.close, self.handle)
        self._memory = mmap.mmap(self.handle, self.num_bytes)

    def view(self, layout: TensorLayout) -> Tensor:
        """Return a tensor in this memory."""
        count = torch.Size(layout.shape).numel()
        if not count:
            return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
        flat = torch.frombuffer(self._memory, dtype=layout.dtype, count=count, offset=layout.offset)
        return flat.as_strided(layout.shape, layout.stride)


def _create_file(num_bytes: int) -> int:
    """Create a file in memory, or on a system without such files a temporary one, that has no name."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("uefl")
    else:
        handle, name = tempfile.mkstemp()
        os.unlink(name)
    os.truncate(handle, num_bytes)
    return handle


class Parcel(NamedTuple):
    """A value in two parts: its tensors in a buffer, and the pickled rest."""

    pickled: bytes
    layouts: Sequence[TensorLayout]
    buffer: SharedBuffer | None  # None: the value has no tensors

    def unpack(self, *, copy: bool = False) -> Any:
        """Return the value; its tensors are copies, or views that change with the next value in the buffer."""
        views = [self.buffer.view(layout) for layout in self.layouts] if self.buffer else []
        return _Unpickler(self.pickled, [view.clone() for view in views] if copy else views).load()


def pack(value: Any, buffer: SharedBuffer | None = None) -> Parcel:
    """Copy the tensors of a value into a buffer, or into a new one if they do not fit, and pickle the rest."""
    pickler = _Pickler()
    pickler.dump(value)
    layouts, num_bytes = [], 0
    for tensor in pickler.tensors:
        is_dense = tensor.is_contiguous() or (
            tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        stride = tensor.stride() if is_dense else torch.empty_like(tensor, device="meta").stride()
        layouts.append(TensorLayout(num_bytes, tensor.dtype, tuple(tensor.shape), stride))
        num_bytes += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    if not layouts:
        return Parcel(pickler.file.getvalue(), (), None)
    if buffer is None or buffer.num_bytes < num_bytes:
        buffer = SharedBuffer(num_bytes)
    for tensor, layout in zip(pickler.tensors, layouts):
        buffer.view(layout).copy_(tensor)
    return Parcel(pickler.file.getvalue(), layouts, buffer)


class _Pickler(pickle.Pickler):
    """Pickle everything but dense tensors, of which it pickles the positions in a list."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []  # also keeps their ids from being reused
        self._positions: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.requires_grad or value.layout != torch.strided or value.is_cuda:
            return None
        if id(value) not in self._positions:
            self._positions[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._positions[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, position: int) -> Tensor:
        return self._tensors[position]
