"""The ledger of codewords: add codewords to the server's model, and decide which silo may use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uefl.core.federation import ServerState, is_codeword_tensor

INITIAL_SIZE = "num_initial_codewords"  # key in method_state
EXTENSION_SIZE = "num_codewords_by_rule"  # key in method_state


def add_codewords(server: ServerState, silo_names: Sequence[str], codewords: Tensor) -> ServerState:
    """Add codewords [M, v, D] that only these silos may use."""
    names = [n for n in server.model_state if is_codeword_tensor(n)]
    tensors = {n: server.model_state[n] for n in names}
    extended = {n: torch.cat([t, codewords[m].to(t)]) for m, (n, t) in enumerate(tensors.items())}
    column = torch.tensor([[name in silo_names] for name in server.silo_names])
    access = torch.cat([server.access, column.expand(-1, codewords.shape[1])], 1)
    return server.replace(model_state={**server.model_state, **extended}, access=access)


def store_initial_size(server: ServerState) -> ServerState:
    """Store the size of the initial codebook, whose codewords a silo never loses."""
    return server.replace(method_state={**server.method_state, INITIAL_SIZE: torch.tensor(server.access.shape[1])})


def store_extension_size(server: ServerState, v: int) -> ServerState:
    """Store the number of codewords that a rule chose for every extension."""
    return server.replace(method_state={**server.method_state, EXTENSION_SIZE: torch.tensor(v)})


def get_extension_size(server: ServerState) -> int:
    """Return the number of codewords that a rule chose for every extension."""
    return int(server.method_state[EXTENSION_SIZE])


def revoke_codewords(server: ServerState, silo_names: Sequence[str]) -> ServerState:
    """Revoke these silos' access to all codewords but the initial ones (D10)."""
    access, initial_size = server.access.clone(), int(server.method_state[INITIAL_SIZE])
    for name in silo_names:
        access[server.silo_names.index(name), initial_size:] = False
    return server.replace(access=access)
