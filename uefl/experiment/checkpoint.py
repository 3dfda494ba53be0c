"""Safetensors files: tensors by owner, and the checkpoint of a run (server and client states)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from uefl.core.aggregate import find_non_finite
from uefl.core.checksum import compute_checksum
from uefl.core.errors import InputError, ResumableError
from uefl.core.federation import ServerState, Tensors
from uefl.engines.serial import to_channels_last
from uefl.experiment.files import write_bytes
from uefl.experiment.run_folder import RunFolder

METADATA_KEY, CHECKSUM_KEY = "uefl", "checksum"  # of a file: its JSON values, and one of them
SCALAR_FIELDS = ("round", "iteration", "is_codebook_final", "open_record")


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of a file by owner; in the file, a prefix of the name gives the owner."""

    model_state: Tensors = field(default_factory=dict)
    method_state: Tensors = field(default_factory=dict)
    client_states: dict[str, Tensors] = field(default_factory=dict)

    def to_flat(self) -> Tensors:
        """Return all tensors with their prefixes."""
        flat = {RunFolder.MODEL_PREFIX + name: t for name, t in self.model_state.items()}
        flat |= {RunFolder.METHOD_PREFIX + name: t for name, t in self.method_state.items()}
        for silo_name, client_state in self.client_states.items():
            flat |= {f"{RunFolder.CLIENTS_PREFIX}{silo_name}/{name}": t for name, t in client_state.items()}
        return flat

    @classmethod
    def from_flat(cls, flat: Mapping[str, torch.Tensor]) -> NamedTensors:
        """Sort tensors by their prefixes."""
        tensors = cls()
        for name, tensor in flat.items():
            if name.startswith(RunFolder.MODEL_PREFIX):
                tensors.model_state[name.removeprefix(RunFolder.MODEL_PREFIX)] = tensor
            elif name.startswith(RunFolder.METHOD_PREFIX):
                tensors.method_state[name.removeprefix(RunFolder.METHOD_PREFIX)] = tensor
            elif name.startswith(RunFolder.CLIENTS_PREFIX):
                # The name of a silo may contain a slash, that of a tensor does not.
                silo_name, _, own_name = name.removeprefix(RunFolder.CLIENTS_PREFIX).rpartition("/")
                tensors.client_states.setdefault(silo_name, {})[own_name] = tensor
        return tensors


def save_checkpoint(
    path: Path,
    server: ServerState,
    client_states: dict[str, Tensors],
    write: Callable[[Callable[[], None]], None] = lambda save: save(),
) -> None:
    """Save the server and the client states in one step, and keep the checkpoint before.

    A state that is not finite never replaces a checkpoint. `write` receives a function that checks and saves the copies
    of all tensors, and calls it now or later.
    """
    tensors = NamedTensors(server.model_state, server.method_state, client_states).to_flat()
    metadata = {name: getattr(server, name) for name in SCALAR_FIELDS} | {
        "silo_names": list(server.silo_names),
        # The file sorts names, but sums over tensors and the members of an ensemble depend on the server's order.
        "model_state_order": list(server.model_state),
        "method_state_on_device": [name for name, t in server.method_state.items() if t.device.type != "cpu"],
    }
    end_copy = start_copy_to_host({RunFolder.ACCESS: server.access, **tensors})
    write(partial(_write_checkpoint, path, end_copy, metadata))


def _write_checkpoint(path: Path, end_copy: Callable[[], Tensors], metadata: dict[str, Any]) -> None:
    flat = end_copy()
    tensors = NamedTensors.from_flat(flat)
    for owner, state in (("model", tensors.model_state), ("method state", tensors.method_state)):
        if name := find_non_finite(state):
            raise ResumableError(
                f"round {metadata['round']}: {name} of the server's {owner} is not finite; the previous checkpoint is "
                "kept; run the same command again to resume from it"
            )
    _write_tensors(path, flat, metadata, keep_as=RunFolder.get_previous_path(path))


def load_checkpoint(path: Path, device: torch.device | str) -> tuple[ServerState, dict[str, Tensors]]:
    """Load the server and the client states."""
    flat, metadata = load_tensors(path)
    tensors, on_device = NamedTensors.from_flat(flat), set(metadata["method_state_on_device"])
    server = ServerState(
        tuple(metadata["silo_names"]),
        # The file loses the memory layout of engines, and convolutions round differently in each layout.
        {name: to_channels_last(tensors.model_state[name].to(device)) for name in metadata["model_state_order"]},
        flat[RunFolder.ACCESS],
        {name: t.to(device) if name in on_device else t for name, t in tensors.method_state.items()},
        **{name: metadata[name] for name in SCALAR_FIELDS},
    )
    return server, {s: {n: t.to(device) for n, t in state.items()} for s, state in tensors.client_states.items()}


def read_round(path: Path) -> int:
    """Return the round of a checkpoint without loading its tensors; 0 if there is none, or a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(json.loads(file.metadata()[METADATA_KEY])["round"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return 0


def start_copy_to_host(tensors: Tensors) -> Callable[[], Tensors]:
    """Start to copy tensors to the host's memory, those of one type on a device in one transfer.

    The function that is returned waits for the copies. Meanwhile the host can give the device other work.
    """
    copies = {name: t.detach().contiguous().clone() for name, t in tensors.items() if t.device.type == "cpu"}
    on_device = {name: t.detach() for name, t in tensors.items() if t.device.type != "cpu"}
    groups: list[tuple[Tensors, torch.Tensor, torch.cuda.Event]] = []
    for device, dtype in {(t.device, t.dtype) for t in on_device.values()}:
        group = {name: t for name, t in on_device.items() if (t.device, t.dtype) == (device, dtype)}
        joined = torch.cat([t.reshape(-1) for t in group.values()]).to("cpu", non_blocking=True)
        groups.append((group, joined, torch.cuda.current_stream(device).record_event()))

    def end_copy() -> Tensors:
        for group, joined, copied in groups:
            copied.synchronize()
            pieces = torch.split(joined, [t.numel() for t in group.values()])
            copies.update({name: piece.clone().reshape(t.shape) for (name, t), piece in zip(group.items(), pieces)})
        return {name: copies[name] for name in tensors}

    return end_copy


def save_tensors(path: Path, tensors: Tensors, metadata: dict[str, Any], *, keep_as: Path | None = None) -> None:
    """Save tensors and JSON values with a checksum as a safetensors file, in one step; `keep_as` keeps the old one."""
    _write_tensors(path, start_copy_to_host(tensors)(), metadata, keep_as=keep_as)


def _write_tensors(path: Path, flat: Tensors, metadata: dict[str, Any], *, keep_as: Path | None = None) -> None:
    values = {**metadata, CHECKSUM_KEY: compute_checksum(json.dumps(metadata, sort_keys=True), flat)}
    # One text: safetensors writes several in random order, and equal runs must have equal bytes.
    write_bytes(path, save(flat, {METADATA_KEY: json.dumps(values, sort_keys=True)}), keep_as=keep_as)


def load_tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Load the tensors and values of a file that `save_tensors` wrote; a damaged file is an `InputError`."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads(file.metadata()[METADATA_KEY])
            # Copies: in the file's memory, tensors are not aligned, and matrix products would round differently.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        checksum = metadata.pop(CHECKSUM_KEY, None)  # files of earlier versions have none
        if checksum not in (None, compute_checksum(json.dumps(metadata, sort_keys=True), tensors)):
            raise ValueError("its checksum does not match")
        return tensors, metadata
    except (SafetensorError, KeyError, TypeError, ValueError) as e:
        raise InputError(f"{path} is damaged ({str(e).splitlines()[0] if str(e) else type(e).__name__})") from None
