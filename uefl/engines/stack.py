"""Several silos' tensors side by side, as client tasks see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.federation import State


class Stack(NamedTuple):
    """Tensors with an axis of silos in front: the network's `own`, the words `received`, and what is `kept`.

    What is the same for all silos has no such axis: `shared` tensors of the network, `said` ones of the broadcast.
    """

    names: tuple[str, ...]
    own: State
    shared: State
    received: State
    said: State
    kept: State
    sent: State

    def at(self, rows: slice | list[int]) -> Stack:
        """Some of the silos; views, where they are neighbours."""

        def cut(tensors: State) -> State:
            return {n: t[rows] for n, t in tensors.items()}

        chosen = self.names[rows] if isinstance(rows, slice) else tuple(self.names[i] for i in rows)
        return self._replace(names=chosen, own=cut(self.own), received=cut(self.received), kept=cut(self.kept))


def stacked(each: Sequence[State]) -> State:
    """Tensors of the same names, side by side."""
    return {n: torch.stack([mine[n] for mine in each]) for n in each[0]}


def like_stack(tensor: Tensor, m: int) -> Tensor:
    """Room for m of these; images and filters with channels last, as convolutions want them."""
    if tensor.dim() == 4:
        a, c, h, w = tensor.shape
        return tensor.new_empty(m, a, h, w, c).permute(0, 1, 4, 2, 3)
    return tensor.new_empty(m, *tensor.shape)


def rows(where: list[int]) -> slice | list[int]:
    """A slice, where indices are neighbours: a view instead of a copy."""
    return slice(where[0], where[-1] + 1) if where == list(range(where[0], where[-1] + 1)) else where


def spoken(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} silos"


def to_host(sums: State) -> State:
    """Stacked answers [m, ...] in one transfer."""
    flat = torch.cat([t.reshape(len(t), -1).double() for t in sums.values()], 1).cpu()
    pieces = torch.split(flat, [t[0].numel() for t in sums.values()], 1)
    return {n: piece.reshape(t.shape) for (n, t), piece in zip(sums.items(), pieces)}
