"""The tensors of several silos, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.aggregate import PackedTensors, group_by_type
from uefl.core.federation import Tensors, is_codeword_tensor, size_in_bytes

PUBLIC_SET = "number"  # name of the only tensor in `public_set`, of shape [1]


class ReceivedClient(NamedTuple):
    """What one silo has when its round begins. Silos of one server refer to the same tensors of the broadcast."""

    name: str
    codewords: Tensors  # of the broadcast
    local_tensors: Tensors  # of the network, stored at the silo
    client_state: Tensors  # beside the network's tensors
    received: Tensors  # of the broadcast, without codewords
    extras: Tensors  # of the broadcast
    public_set: Tensors  # the number of its set of public images, if seeds have different ones

    def shapes(self) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
        """Return the shapes in which silos may differ; a stack needs equal ones.

        A silo with a model of its own has codewords in its client state too, under the name of those that it receives.
        """
        parts = (self.codewords, self.client_state)
        return tuple(tuple(sorted((n, tuple(t.shape)) for n, t in part.items())) for part in parts)


class ClientStack(NamedTuple):
    """Tensors of several silos, with an axis of silos in front unless all silos share them."""

    silo_names: tuple[str, ...]
    client_tensors: Tensors  # of the network, stacked
    shared_tensors: Tensors  # of the network, equal for all silos
    client_received: Tensors  # of the broadcast, stacked: codewords, or all tensors if silos have several servers
    shared_received: Tensors  # of the broadcast, equal for all silos
    client_state: Tensors  # beside the network's tensors, stacked
    client_extras: Tensors  # of the broadcast, stacked, if silos have several servers
    shared_extras: Tensors  # of the broadcast, equal for all silos
    public_set: Tensors  # numbers of sets of public images, stacked, if seeds have different ones

    def select(self, rows: slice | list[int]) -> ClientStack:
        """Return some of the silos; a slice gives views."""

        def select_rows(tensors: Tensors) -> Tensors:
            return {n: t[rows] for n, t in tensors.items()}

        names = self.silo_names[rows] if isinstance(rows, slice) else tuple(self.silo_names[i] for i in rows)
        return self._replace(
            silo_names=names,
            client_tensors=select_rows(self.client_tensors),
            client_received=select_rows(self.client_received),
            client_state=select_rows(self.client_state),
            client_extras=select_rows(self.client_extras),
            public_set=select_rows(self.public_set),
        )

    def received_bytes(self) -> int:
        """Return the bytes that each silo received; they are equal, as the shapes of a stack are."""
        stacked = sum(map(size_in_bytes, (self.client_received, self.client_extras))) // len(self.silo_names)
        return stacked + sum(map(size_in_bytes, (self.shared_received, self.shared_extras)))


def stack_clients(clients: Sequence[ReceivedClient], *, one_server: bool) -> ClientStack:
    """Stack silos of equal shapes; silos of several servers, such as several seeds, share no tensors."""
    codewords = stack_tensors([client.codewords for client in clients])
    local_tensors = stack_tensors([client.local_tensors for client in clients])
    received = {} if one_server else stack_tensors([client.received for client in clients])
    return ClientStack(
        silo_names=tuple(client.name for client in clients),
        client_tensors={**received, **codewords, **local_tensors},
        shared_tensors={n: t for n, t in clients[0].received.items() if one_server and n not in local_tensors},
        client_received={**received, **codewords},
        shared_received=clients[0].received if one_server else {},
        client_state=stack_tensors([client.client_state for client in clients]),
        client_extras={} if one_server else stack_tensors([client.extras for client in clients]),
        shared_extras=clients[0].extras if one_server else {},
        public_set=stack_tensors([client.public_set for client in clients]),
    )


def stack_tensors(tensor_dicts: Sequence[Tensors]) -> Tensors:
    """Stack the tensors of the same names."""
    return {n: torch.stack([tensors[n] for tensors in tensor_dicts]) for n in tensor_dicts[0]}


def unstack_tensors(stacked: Tensors, num_silos: int) -> list[Tensors]:
    """Return the tensors of each silo, as views."""
    rows = {n: t.unbind() for n, t in stacked.items()}
    return [{n: of_silos[i] for n, of_silos in rows.items()} for i in range(num_silos)]


def pack_tensors(stacked: Tensors, num_silos: int) -> list[PackedTensors]:
    """Return the tensors of each silo, copied into vectors, which its server averages in a few launches."""
    views = {n: t.clone() if is_codeword_tensor(n) else t for n, t in stacked.items()}
    vectors: dict[tuple[str, ...], tuple[Tensor, ...]] = {}
    for names in group_by_type(stacked):
        tensors = [stacked[n].movedim(2, -1) if stacked[n].dim() == 5 else stacked[n] for n in names]
        rows = torch.cat([t.reshape(num_silos, -1) for t in tensors], 1)
        pieces = torch.split(rows, [t[0].numel() for t in tensors], 1)
        for name, tensor, piece in zip(names, tensors, pieces):
            views[name] = piece.view(tensor.shape).movedim(-1, 2) if tensor.dim() == 5 else piece.view(tensor.shape)
        vectors[names] = rows.unbind()
    unpacked = unstack_tensors(views, num_silos)
    return [PackedTensors(unpacked[i], {n: v[i] for n, v in vectors.items()}) for i in range(num_silos)]


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


class BatchSums(NamedTuple):
    """What some silos of a stack computed from one batch each."""

    split: str
    rows: list[int]  # of the silos in the stack
    sums: Tensors  # stacked


def add_batch_sums(
    silo_names: Sequence[str], batches: Sequence[BatchSums], *, on_host: bool
) -> dict[str, dict[str, Tensors]]:
    """Return each silo's sums over its batches, by split; with `on_host`, they are copied there."""
    answers: dict[str, dict[str, Tensors]] = {name: {} for name in silo_names}
    for split, rows, stacked in batches:
        sums = copy_to_host(stacked) if on_host else stacked
        for row, of_silo in zip(rows, unstack_tensors(sums, len(rows))):
            answer = answers[silo_names[row]]
            total = answer.get(split)
            answer[split] = {n: total[n] + t for n, t in of_silo.items()} if total else of_silo
    return answers


def copy_to_host(sums: Tensors) -> Tensors:
    """Copy stacked tensors [m, ...] to the host in one transfer, in double precision."""
    flat = torch.cat([t.reshape(len(t), -1).double() for t in sums.values()], 1).cpu()
    pieces = torch.split(flat, [t[0].numel() for t in sums.values()], 1)
    return {n: piece.reshape(t.shape) for (n, t), piece in zip(sums.items(), pieces)}
