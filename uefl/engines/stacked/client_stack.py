"""The tensors of several silos, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.federation import Tensors


class ClientStack(NamedTuple):
    """Tensors of several silos, with an axis of silos in front unless all silos share them."""

    silo_names: tuple[str, ...]
    client_tensors: Tensors  # of the network, stacked
    shared_tensors: Tensors  # of the network, equal for all silos
    received_codewords: Tensors  # of the broadcast, stacked
    received_shared: Tensors  # of the broadcast, equal for all silos
    client_state: Tensors  # beside the network's tensors, stacked
    extras: Tensors  # of the broadcast, equal for all silos

    def select(self, rows: slice | list[int]) -> ClientStack:
        """Return some of the silos; a slice gives views."""

        def select_rows(tensors: Tensors) -> Tensors:
            return {n: t[rows] for n, t in tensors.items()}

        names = self.silo_names[rows] if isinstance(rows, slice) else tuple(self.silo_names[i] for i in rows)
        return self._replace(
            silo_names=names,
            client_tensors=select_rows(self.client_tensors),
            received_codewords=select_rows(self.received_codewords),
            client_state=select_rows(self.client_state),
        )


def stack_tensors(tensor_dicts: Sequence[Tensors]) -> Tensors:
    """Stack the tensors of the same names."""
    return {n: torch.stack([tensors[n] for tensors in tensor_dicts]) for n in tensor_dicts[0]}


def allocate_stack(tensor: Tensor, num_clients: int) -> Tensor:
    """Allocate a stack of tensors of this shape; images and filters with channels last, for fast convolutions."""
    if tensor.dim() == 4:
        a, c, h, w = tensor.shape
        return tensor.new_empty(num_clients, a, h, w, c).permute(0, 1, 4, 2, 3)
    return tensor.new_empty(num_clients, *tensor.shape)


def to_slice(indices: list[int]) -> slice | list[int]:
    """Return consecutive indices as a slice, which selects a view instead of a copy."""
    return slice(indices[0], indices[-1] + 1) if indices == list(range(indices[0], indices[-1] + 1)) else indices


def describe_silos(silo_names: Sequence[str]) -> str:
    return silo_names[0] if len(silo_names) == 1 else f"{len(silo_names)} silos"


def copy_to_host(sums: Tensors) -> Tensors:
    """Copy stacked tensors [m, ...] to the host in one transfer, in double precision."""
    flat = torch.cat([t.reshape(len(t), -1).double() for t in sums.values()], 1).cpu()
    pieces = torch.split(flat, [t[0].numel() for t in sums.values()], 1)
    return {n: piece.reshape(t.shape) for (n, t), piece in zip(sums.items(), pieces)}
