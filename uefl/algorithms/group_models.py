"""One model per group of alike silos, at the server, beside the model that all silos share.

Codewords belong to no group: they are those of the shared model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from uefl.algorithms.round_record import SHARED_MODEL, start_entry
from uefl.core.federation import Broadcast, ServerState, Tensors, is_codeword_tensor

GROUP_OF_SILO = "group_of_silo"  # [K] int64 in the method state: the index of each silo's group; NO_GROUP: none
NO_GROUP = -1  # of a silo without training data, which keeps the shared model
IS_UNLIKE = "is_unlike"  # [K] bool in the method state: whether a silo is alike to no other
MODEL_PREFIX = "group."  # `group.<index>.<name>` in the method state; before its first round, a group has none


def has_groups(server: ServerState) -> bool:
    """Return whether silos are divided into groups."""
    return GROUP_OF_SILO in server.method_state


def store_groups(server: ServerState, groups: Sequence[Sequence[str]], unlike: Sequence[str]) -> ServerState:
    """Divide silos into groups, all of which start with the shared model."""
    indices = {name: i for i, group in enumerate(groups) for name in group}
    group_of_silo = torch.tensor([indices.get(name, NO_GROUP) for name in server.silo_names])
    is_unlike = torch.tensor([name in unlike for name in server.silo_names])
    state = {**server.method_state, GROUP_OF_SILO: group_of_silo, IS_UNLIKE: is_unlike}
    return server.replace(method_state=state)


def drop_groups(server: ServerState) -> ServerState:
    """Return the server without groups and their models."""
    state = {n: t for n, t in server.method_state.items() if n not in (GROUP_OF_SILO, IS_UNLIKE)}
    return server.replace(method_state={n: t for n, t in state.items() if not n.startswith(MODEL_PREFIX)})


def list_groups(server: ServerState) -> list[tuple[str, ...]]:
    """Return the silos of each group; without groups, none."""
    if not has_groups(server):
        return []
    indices: list[int] = server.method_state[GROUP_OF_SILO].tolist()
    pairs = list(zip(server.silo_names, indices, strict=True))
    return [tuple(name for name, i in pairs if i == index) for index in range(max(indices) + 1)]


def get_group_model(server: ServerState, index: int) -> Tensors:
    """Return the model of a group, by the network's names."""
    return {n: server.method_state.get(f"{MODEL_PREFIX}{index}.{n}", t) for n, t in server.model_state.items()}


def name_group_tensors(index: int, model_state: Tensors) -> Tensors:
    """Return the tensors of a group's model by their names in the method state; codewords are left out."""
    return {f"{MODEL_PREFIX}{index}.{n}": t for n, t in model_state.items() if not is_codeword_tensor(n)}


def move_group_models(server: ServerState) -> ServerState:
    """Move the models of groups, which a round has averaged, from the model state to the method state."""
    models = {n: t for n, t in server.model_state.items() if n.startswith(MODEL_PREFIX)}
    return server.replace(
        model_state={n: t for n, t in server.model_state.items() if n not in models},
        method_state={**server.method_state, **models},
    )


def split_broadcast(broadcast: Broadcast, server: ServerState) -> list[Broadcast]:
    """Return one broadcast per group with its model, and the broadcast itself to silos of no group."""
    groups = list_groups(server)
    grouped = {name for group in groups for name in group}
    others = tuple(name for name in server.silo_names if name not in grouped)
    own = [
        broadcast._replace(model_state=get_group_model(server, i), participants=group) for i, group in enumerate(groups)
    ]
    return [*own, broadcast._replace(participants=others)] if others else own


def list_shared_metrics(record: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return by silo how it measured the model of a record, given the record before its silos were evaluated."""
    added = {name: entry.keys() - before["silos"].get(name, {}).keys() for name, entry in record["silos"].items()}
    return {name: {n: record["silos"][name][n] for n in sorted(added[name])} for name in added}


def read_shared_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return by silo the metrics of the shared model that the record of a group round has."""
    return {name: entry.get(SHARED_MODEL, {}) for name, entry in record["silos"].items()}


def record_groups(server: ServerState, shared_metrics: Mapping[str, Any]) -> ServerState:
    """Add to the open record the groups, and how their silos measured the shared model before the first group round."""
    groups, silos = list_groups(server), dict(server.open_record["silos"])
    for name in (name for group in groups for name in group if shared_metrics.get(name)):
        silos[name] = {**silos.get(name, start_entry()), SHARED_MODEL: shared_metrics[name]}
    unlike = tuple(n for n, is_unlike in zip(server.silo_names, server.method_state[IS_UNLIKE].tolist()) if is_unlike)
    entries = {"silos": silos, "groups": groups, "unlike_silos": unlike}
    return server.replace(open_record={**server.open_record, **entries})
