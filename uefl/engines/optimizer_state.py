"""Optimizer state that stays at a silo between rounds, as named tensors within its client state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uefl.core.federation import ClientModel, Tensors, is_codeword_tensor
from uefl.engines.optimizer import NamedOptimizer

OPTIMIZER_PREFIX = "optimizer."  # of optimizer state within the client state
OPTIMIZER_CODEWORDS = OPTIMIZER_PREFIX + "codewords"  # indices of the codewords that the state belongs to


def pack_optimizer_state(optimizers: Sequence[NamedOptimizer]) -> Tensors:
    """Return optimizer state as named tensors: `optimizer.<update>.<entry>.<weight>`."""
    return {
        f"{OPTIMIZER_PREFIX}{i}.{entry}.{param}": value
        for i, optimizer in enumerate(optimizers)
        for param, state in optimizer.state.items()
        for entry, value in state.items()
    }


def list_codeword_indices(access_row: Tensor) -> Tensor:
    """Return the indices of the codewords of an access row."""
    return access_row.cpu().nonzero()[:, 0]


def drop_stale_optimizer_state(client_state: Tensors, access_row: Tensor) -> Tensors:
    """Return the client state without the optimizer state of codewords, if the silo's codewords have changed."""
    if OPTIMIZER_CODEWORDS not in client_state or torch.equal(
        client_state[OPTIMIZER_CODEWORDS].cpu(), list_codeword_indices(access_row)
    ):
        return client_state
    return {
        n: t
        for n, t in client_state.items()
        if not (n.startswith(OPTIMIZER_PREFIX) and is_codeword_tensor(n.split(".", 3)[-1]))
    }


def unpack_optimizer_state(model: ClientModel, optimizers: Sequence[NamedOptimizer]) -> None:
    """Restore optimizer state from the client state; a weight whose shape has changed starts without state."""
    states: dict[tuple[int, str], Tensors] = {}
    for name, value in model.client_state.items():
        if name.startswith(OPTIMIZER_PREFIX) and name != OPTIMIZER_CODEWORDS:
            update, entry, param = name.removeprefix(OPTIMIZER_PREFIX).split(".", 2)
            states.setdefault((int(update), param), {})[entry] = value
    for (i, param), state in states.items():
        if all(value.dim() == 0 or value.shape == model.params[param].shape for value in state.values()):
            optimizers[i].state[param] = {entry: value.clone() for entry, value in state.items()}
