"""The server, and what silos keep, as one safetensors file, written so that a kill leaves the old or the new one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from uefl.errors import InputError
from uefl.federation import Server, State

VALUES = ("round", "iteration", "settled", "pending")


def save_checkpoint(path: Path, server: Server, kept: dict[str, State]) -> None:
    """Write atomically: to a temporary file, to the disk, then in place of the old one."""
    tensors = {f"state/{n}": t for n, t in server.state.items()}
    tensors |= {f"memory/{n}": t for n, t in server.memory.items()}
    tensors |= {f"kept/{silo}/{n}": t for silo, mine in kept.items() for n, t in mine.items()}
    values = {name: getattr(server, name) for name in VALUES}
    # A file sorts names; sums over them, and members of an ensemble, go by the order in which the server has them.
    values |= {"order": [*server.state], "there": [n for n, t in server.memory.items() if t.device.type != "cpu"]}
    save_tensors(path, {"access": server.access, **tensors}, {"silos": list(server.silos), **values})


def load_checkpoint(path: Path, device: torch.device | str) -> tuple[Server, dict[str, State]]:
    """The server and what silos kept, as they were."""
    tensors, values = load_tensors(path)
    parts: dict[str, State] = {"state": {}, "memory": {}}
    kept: dict[str, State] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        if part == "kept":
            silo, _, inner = rest.rpartition("/")  # a silo's name may hold a slash, a tensor's does not
            kept.setdefault(silo, {})[inner] = tensor.to(device)
        elif part == "state":
            parts["state"][rest] = tensor.to(device)
        elif part == "memory":
            parts["memory"][rest] = tensor.to(device) if rest in values.get("there", ()) else tensor
    silos, order = tuple(values.pop("silos")), values.pop("order", [*parts["state"]])
    values.pop("there", None)
    state = {n: parts["state"][n] for n in order}
    return Server(silos, state, tensors["access"], parts["memory"], **values), kept


def save_tensors(path: Path, tensors: State, values: dict[str, Any]) -> None:
    """A safetensors file with a JSON header of its own, replaced in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(flat, temporary, metadata={"uefl": json.dumps(values, sort_keys=True)})
    replace_file(temporary, path)


def load_tensors(path: Path) -> tuple[State, dict[str, Any]]:
    """Tensors and header of a file that `save_tensors` wrote."""
    with safe_open(path, framework="pt") as file:
        values = json.loads(file.metadata()["uefl"])
        return {name: file.get_tensor(name) for name in file.keys()}, values  # noqa: SIM118


def made(folder: Path) -> Path:
    """A folder that is there and can be written to, or one line that says why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as e:
        raise InputError(f"cannot write to {folder}: {(e.strerror or str(e)).lower()}") from None
    return folder


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    replace_file(temporary, path)


def replace_file(temporary: Path, path: Path) -> None:
    """Put a finished file in place: on the disk first, so that a crash cannot leave an empty one."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
